"""Where a run's code came from and what it ran on, written into the ledger when it starts.

Of git only what it says of itself is asked, by a process that runs while the server starts the run.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
from pathlib import Path
from typing import Any

from labctl.model import Facts, Run, RunSpec, Value
from labctl.servers.context import Ground

# The ledger's kind of line: a Code, and how the run was started.
CODE = "code"
GIT_S = 5.0
MOST_CHANGED = 20
NOT_CODE = ("runs/", ".labctl/", "server-edits/")
SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
# What in a repository's own settings has `git status` start programs, or may.
PROGRAMS = re.compile(rb"^\s*\[\s*(filter|include|includeif)\b|fsmonitor", re.IGNORECASE | re.M)


class Code(Value, frozen=True):
    """The lab's git state when a run started. `commit` is "" outside of a repository.

    `dirty` is whether files of the lab differed from it (`changed` names the first ones), None
    where that was not asked; `why` says why not.
    """

    commit: str = ""
    branch: str = ""
    dirty: bool | None = None
    changed: tuple[str, ...] = ()
    why: str = ""


class Looking:
    """git, asked about a directory; `code` waits for its answer. Leaving it ends the asking."""

    def __init__(self, root: Path) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.why = ""
        repository = _repository(root)
        if repository is None:
            self.why = "the lab is in no git repository"
            return
        if _starts_programs(repository):
            self.why = "its own git settings name programs, which are not started for this"
            return
        # Nothing is locked or written, no program of the repository's is started.
        words = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(root)]
        words += [
            "status",
            "--porcelain=v2",
            "--branch",
            "-z",
            "--ignore-submodules=all",
            "--",
            ".",
        ]
        try:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError:
            self.why = "git is not installed here"

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def code(self) -> Code:
        if self.process is None:
            return Code(why=self.why)
        try:
            out, _ = self.process.communicate(timeout=GIT_S)
        except subprocess.TimeoutExpired:
            return Code(why=f"git took longer than {GIT_S:.0f} s")
        failed, self.process = self.process.returncode != 0, None
        return Code(why="git failed") if failed else parse_status(out)


def parse_status(out: bytes) -> Code:
    """What `git status --porcelain=v2 --branch -z` says."""
    commit = branch = ""
    changed: list[str] = []
    entries = iter(out.decode(errors="replace").split("\0"))
    for entry in entries:
        kind = entry[:1]
        if entry.startswith("# branch.oid "):
            commit = entry.removeprefix("# branch.oid ")
        elif entry.startswith("# branch.head "):
            branch = entry.removeprefix("# branch.head ")
        elif kind in ("1", "2", "u", "?"):
            # Eight fields stand before the path, nine of a rename, ten of a conflict.
            path = entry.split(" ", {"1": 8, "2": 9, "u": 10, "?": 1}[kind])[-1]
            if kind == "2":
                next(entries, "")  # where it was before
            if not path.startswith(NOT_CODE):
                changed.append(path)
    commit = "" if commit == "(initial)" else commit
    return Code(
        commit=commit,
        branch="" if branch == "(detached)" else branch,
        dirty=bool(changed) if commit else None,
        changed=tuple(changed[:MOST_CHANGED]),
        why="" if commit else "nothing is committed yet",
    )


def keep(ground: Ground, run: Run, wanted: RunSpec, looking: Looking) -> None:
    """Write down once how this run came about; variables that sound secret without their values."""
    if ground.state.events(lab_id=ground.lab_id, run_id=run.id, kind=CODE, limit=1):
        return
    code = looking.code()
    env = {key: "hidden" if SECRET_NAME.search(key) else value for key, value in wanted.env.items()}
    detail: dict[str, Any] = {
        "commit": code.commit,
        "branch": code.branch,
        "dirty": code.dirty,
        "changed": list(code.changed),
        "why": code.why,
        "command": list(wanted.command),
        "image": wanted.image,
        "env": env,
        "gpus": wanted.gpus,
    }
    ground.state.record(
        CODE, lab_id=ground.lab_id, server_id=run.server_id, run_id=run.id, detail=detail
    )


def machine(facts: Facts) -> dict[str, Any]:
    """What a server is made of, for the ledger: it outlives the server."""
    return {
        "os": facts.os,
        "arch": facts.arch,
        "kernel": facts.kernel,
        "docker": facts.docker,
        "cpus": facts.cpus,
        "memory_bytes": facts.memory_bytes,
        "gpus": [
            {"name": gpu.name, "memory_bytes": gpu.memory_bytes, "driver": gpu.driver}
            for gpu in facts.gpus
        ],
    }


def _repository(root: Path) -> Path | None:
    """The .git that `root` belongs to."""
    for folder in (root.resolve(), *root.resolve().parents):
        if (folder / ".git").exists():
            return folder / ".git"
    return None


def _starts_programs(repository: Path) -> bool:
    """Whether a repository, which may have come in an archive, would have git start programs."""
    if not repository.is_dir():  # of a worktree or a submodule: its settings lie elsewhere
        return True
    for name in ("config", "config.worktree"):
        with contextlib.suppress(FileNotFoundError):
            if PROGRAMS.search((repository / name).read_bytes()):
                return True
    return False
