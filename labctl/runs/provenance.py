"""The git commit, command and machine of each run, recorded in the ledger when the run starts.

git runs in a process of its own, while the server starts the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import subprocess
from pathlib import Path

import msgspec

from labctl.model import Run, ServerFacts, Value
from labctl.servers.context import LabContext
from labctl.sync.pushed_code import read_pushed_code
from labctl.wire.runs import RunSpec

# Kind of ledger entry: a Code, and how the run was started.
CODE = "code"
GIT_S = 5.0
MOST_CHANGED = 20
# The ledger has the names of a run's files of code up to this number, and of more the digest alone.
MOST_FILES = 500
NOT_CODE = ("runs/", ".labctl/", "server-edits/", "server-home/")
SECRET_NAME = re.compile(r"key|token|secret|passw|credential|auth", re.IGNORECASE)
# Settings of a repository with which `git status` starts, or may start, programs.
PROGRAMS = re.compile(rb"^\s*\[\s*(filter|include|includeif)\b|fsmonitor", re.IGNORECASE | re.M)


class GitState(Value, frozen=True):
    """The lab's git state when a run started. `commit` is "" outside of a repository.

    `dirty` is whether files of the lab differed from the commit (`changed` lists the first ones),
    None if that is unknown; `why` is the reason then.
    """

    commit: str = ""
    branch: str = ""
    dirty: bool | None = None
    changed: tuple[str, ...] = ()
    why: str = ""


class RunOrigin(Value, frozen=True):
    """How a run was started: the lab's git state, and the run's specification.

    `code_sha256` is the digest of all code that was pushed before it, `files` the hash of each
    file; both are empty if that is unknown, `files` also where there are many.
    """

    commit: str = ""
    branch: str = ""
    dirty: bool | None = None
    changed: tuple[str, ...] = ()
    why: str = ""
    command: tuple[str, ...] = ()
    image: str = ""
    env: dict[str, str] = msgspec.field(default_factory=dict)
    gpus: str = ""
    code_sha256: str = ""
    files: dict[str, str] = msgspec.field(default_factory=dict)


class MachineGpu(Value, frozen=True):
    name: str = ""
    memory_bytes: int = 0
    driver: str = ""


class ServerHardware(Value, frozen=True):
    """A server's hardware and software."""

    os: str = ""
    arch: str = ""
    kernel: str = ""
    docker: str = ""
    cpus: int = 0
    memory_bytes: int = 0
    gpus: tuple[MachineGpu, ...] = ()


class GitQuery:
    """A `git status` process for a directory.

    `read_code` waits for its result; leaving kills it.
    """

    def __init__(self, root: Path) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.why = ""
        repository = _find_repository(root)
        if repository is None:
            self.why = "the lab is not in a git repository"
            return
        if _can_start_programs(repository):
            self.why = "the repository's settings start programs, so labctl does not run git in it"
            return
        # These options keep git from locking, writing, and starting the repository's programs.
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
            self.why = "git is not installed on this machine"

    def __enter__(self) -> GitQuery:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None

    def read_code(self) -> GitState:
        """Wait up to GIT_S seconds for git and return the state; its `why` says what failed."""
        if self.process is None:
            return GitState(why=self.why)
        try:
            out, _ = self.process.communicate(timeout=GIT_S)
        except subprocess.TimeoutExpired:
            return GitState(why=f"git took longer than {GIT_S:.0f} s")
        failed, self.process = self.process.returncode != 0, None
        return GitState(why="git failed") if failed else parse_git_status(out)


def parse_git_status(out: bytes) -> GitState:
    """Parse the output of `git status --porcelain=v2 --branch -z`."""
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
            # The path follows eight fields, nine for a rename, ten for a conflict.
            path = entry.split(" ", {"1": 8, "2": 9, "u": 10, "?": 1}[kind])[-1]
            if kind == "2":
                next(entries, "")  # the path before the rename
            if not path.startswith(NOT_CODE):
                changed.append(path)
    commit = "" if commit == "(initial)" else commit
    return GitState(
        commit=commit,
        branch="" if branch == "(detached)" else branch,
        dirty=bool(changed) if commit else None,
        changed=tuple(changed[:MOST_CHANGED]),
        why="" if commit else "nothing is committed yet",
    )


def record_origin(context: LabContext, run: Run, wanted: RunSpec, looking: GitQuery) -> None:
    """Record once how this run was started, without values of variables that look like secrets."""
    if context.state.list_events(lab_id=context.lab_id, run_id=run.id, kind=CODE, limit=1):
        return
    code = looking.read_code()
    files = read_pushed_code(context.config.root, context.lab_id, run.server_id)
    env = {key: "hidden" if SECRET_NAME.search(key) else value for key, value in wanted.env.items()}
    origin = RunOrigin(
        commit=code.commit,
        branch=code.branch,
        dirty=code.dirty,
        changed=code.changed,
        why=code.why,
        command=wanted.command,
        image=wanted.image,
        env=env,
        gpus=wanted.gpus,
        code_sha256=_hash_files(files),
        files=files if len(files) <= MOST_FILES else {},
    )
    context.state.record(
        CODE,
        lab_id=context.lab_id,
        server_id=run.server_id,
        run_id=run.id,
        detail=msgspec.to_builtins(origin),
    )


def _hash_files(files: dict[str, str]) -> str:
    """Return one digest of files and their hashes; "" without files."""
    text = "".join(f"{sha256}  {path}\n" for path, sha256 in sorted(files.items()))
    return hashlib.sha256(text.encode()).hexdigest() if files else ""


def describe_machine(facts: ServerFacts) -> ServerHardware:
    """Describe a server's hardware and software for the ledger, which outlives the server."""
    return ServerHardware(
        os=facts.os,
        arch=facts.arch,
        kernel=facts.kernel,
        docker=facts.docker,
        cpus=facts.cpus,
        memory_bytes=facts.memory_bytes,
        gpus=tuple(
            MachineGpu(name=gpu.name, memory_bytes=gpu.memory_bytes, driver=gpu.driver)
            for gpu in facts.gpus
        ),
    )


def _find_repository(root: Path) -> Path | None:
    """Find the .git directory or file of the repository that contains `root`."""
    for folder in (root.resolve(), *root.resolve().parents):
        if (folder / ".git").exists():
            return folder / ".git"
    return None


def _can_start_programs(repository: Path) -> bool:
    """Whether git could start programs that a repository, perhaps a stranger's, configures."""
    if not repository.is_dir():  # a worktree or submodule has its settings elsewhere
        return True
    for name in ("config", "config.worktree"):
        with contextlib.suppress(FileNotFoundError):
            if PROGRAMS.search((repository / name).read_bytes()):
                return True
    return False
