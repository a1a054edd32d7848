"""Which results exist only on this server.

A file is saved when a client has pulled and verified it (verb `pulled`), or the watchdog has
mirrored it: the same path, size and hash. While runs go on, sizes alone give an estimate.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..host.paths import home, lab_dir, read_json, run_dir, write_json
from ..program import PROGRAM
from ..reply import Failure, reply_of
from .activity import Account

MOST_FILES = 20_000
LONG_S = 3600.0


class File(NamedTuple):
    """A file that is only here. `key` is its path below the lab's own prefix in a store."""

    path: str
    key: str
    name: str
    size: int
    sha256: str


class Unsaved(NamedTuple):
    """`broken` are files that cannot be handed out whole, each with the reason."""

    files: list[File]
    broken: list[str]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def pulled(request: dict[str, Any]) -> dict[str, Any]:
    """Note what a client holds, verified: "runs" {run: [[path, size, sha256], ...]}, and "edits"
    [[path, sha256], ...] of the lab's code."""
    root = lab_dir(request["lab"], request["lab_id"])
    for run, files in request.get("runs", {}).items():
        own = run_dir(root, run) / ".labctl"
        if not own.is_dir():
            raise Failure("missing", f"there is no run {run} here", "", "labctl status")
        note(own / "pulled.json", {path: [size, sha256] for path, size, sha256 in files})
    if request.get("edits"):
        note(root / ".labctl" / "saved-edits.json", dict(request["edits"]))
    return {}


def note(path: Path, more: dict[str, Any]) -> None:
    write_json(path, {**read_json(path), **more})


def saved_files(directory: Path) -> dict[str, list[Any]]:
    """path -> [size, sha256] of a run's files that are somewhere else too, as far as is known."""
    own = directory / ".labctl"
    return {**read_json(own / "mirrored.json"), **read_json(own / "pulled.json")}


def labs(lab_id: str, every: bool) -> list[tuple[str, str, Path]]:
    """(name, id, directory) of this lab here, or of every lab."""
    found = []
    for mark in sorted(home().glob("*/.labctl/id")):
        known, root = mark.read_text().strip(), mark.parent.parent
        if every or known == lab_id:
            ending = f"-{known[:6]}"
            name = root.name[: -len(ending)] if root.name.endswith(ending) else root.name
            found.append((name, known, root))
    return found


def estimate(lab_id: str, every: bool) -> tuple[int, int]:
    """(files, bytes) of outputs that are not known to be elsewhere, by size alone: quick."""
    count = size = 0
    for _, _, root in labs(lab_id, every):
        for directory in root.glob("runs/[a-z0-9]*"):
            saved = saved_files(directory)
            outputs = read_json(directory / ".labctl" / "spec.json").get("outputs", [])
            for output in {*outputs, "logs", "checkpoints"}:
                for path, found in _sizes(directory / output):
                    name = os.path.relpath(path, directory)
                    if saved.get(name, [-1])[0] != found:
                        count, size = count + 1, size + found
                    if count >= MOST_FILES:
                        return count, size
    return count, size


def _sizes(top: Path) -> list[tuple[str, int]]:
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            with suppress(OSError):
                path = os.path.join(folder, name)  # noqa: PTH118 (a Path a file is slow)
                found.append((path, os.lstat(path).st_size))
    return found


def unsaved(account: Account, lab_id: str, every: bool) -> Unsaved:
    """All that is only here: hashed, new files outside the outputs and edited code included."""
    files: list[File] = []
    broken: list[str] = []
    for lab, known, root in labs(lab_id, every):
        about = {"lab": lab, "lab_id": known}
        ask(account, "status", about)  # runs that have ended are recorded as such
        runs = ask(account, "manifest", {**about, "all": True})["runs"]
        for run, found in runs.items():
            saved = saved_files(root / "runs" / run)
            for path, size, sha256, _ in found["files"]:
                if saved.get(path) != [size, sha256]:
                    place = f"{found['directory']}/{path}"
                    files.append(
                        File(place, f"{lab}-{known}/runs/{run}/files/{path}", path, size, sha256)
                    )
            broken += [f"{run}/{p}: {why}" for p, why in found["skipped"]]
        known_edits = read_json(root / ".labctl" / "saved-edits.json")
        edits = ask(account, "edits", about)
        broken += [f"code/{path}: {why}" for path, why in edits["skipped"]]
        for path, size, sha256, _ in edits["files"]:
            if known_edits.get(path) != sha256:
                place, key = f"{root}/code/{path}", f"{lab}-{known}/server-edits/{path}"
                files.append(File(place, key, path, size, sha256))
    return Unsaved(files, broken)


def ask(
    account: Account, verb: str, request: dict[str, Any], python: str = sys.executable
) -> dict[str, Any]:
    """The answer of another process of this program, run as the lab's account."""
    words = [*account.words, python, str(PROGRAM), verb]
    done = subprocess.run(
        words,
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    return reply_of(verb, done.stdout, done.stderr)
