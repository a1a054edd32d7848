"""What people changed in the code on the server: kept, or brought back into the lab."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from labctl.errors import PolicyError, TransferError
from labctl.events import Note, Reporter
from labctl.model import Value
from labctl.servers.agent import Remote
from labctl.sync.containment import contained, unwelcome
from labctl.sync.downloads import Download, Due
from labctl.sync.durability import sync_directories
from labctl.sync.file_transfer import RemoteFolder
from labctl.sync.scan import hash_file
from labctl.sync.transfer_lock import hold_transfers

SAVED = "server-edits"
LONG_S = 3600.0


class EditsResult(Value, frozen=True):
    """`saved` lie below `directory` (""if none), `brought` in the lab itself; `skipped` nowhere."""

    directory: str = ""
    saved: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


class _Edit(Value, frozen=True):
    due: Due
    base: str


def pull_edits(
    remote: Remote,
    lab_name: str,
    lab_id: str,
    lab_root: Path,
    *,
    reporter: Reporter,
) -> EditsResult:
    """Save what was edited on the server to `<lab_root>/server-edits/<UTC time>/`; the lab's own
    files stay as they are. Nothing edited makes nothing."""
    with hold_transfers(lab_root, "pull", reporter):
        one = _Edits(remote, {"lab": lab_name, "lab_id": lab_id}, lab_root, reporter)
        edits = one.fetch()
        names = tuple(one.keep(edit.due) for edit in edits)
        return one.result(saved=names)


def pull_code(
    remote: Remote,
    lab_name: str,
    lab_id: str,
    lab_root: Path,
    *,
    reporter: Reporter,
) -> EditsResult:
    """Bring what was edited on the server into the lab itself.

    A file that changed here as well stays, and the server's is saved beside the lab's code as in
    `pull_edits`.
    """
    with hold_transfers(lab_root, "pull --code", reporter):
        one = _Edits(remote, {"lab": lab_name, "lab_id": lab_id}, lab_root, reporter)
        return _bring_back(one, lab_root)


def _bring_back(one: _Edits, lab_root: Path) -> EditsResult:
    brought, saved = [], []
    for edit in one.fetch():
        here = _hash_here(_inside(lab_root, edit.due.path))
        if here not in ("", edit.base, edit.due.sha256):
            saved.append(one.keep(edit.due))
        else:
            one.replace(edit.due)
            brought.append(edit.due.path)
    if saved:
        one.reporter.emit(
            Note(
                text=f"changed here and on the server: {', '.join(saved)}. Yours stay; the "
                f"server's are in {one.directory}. Merge them, then labctl push --force",
                level="warning",
            )
        )
    return one.result(saved=tuple(saved), brought=tuple(brought))


class _Edits:
    def __init__(
        self,
        remote: Remote,
        request: dict[str, Any],
        lab_root: Path,
        reporter: Reporter,
    ) -> None:
        self.remote = remote
        self.request = request
        self.root = lab_root.resolve()
        self.reporter = reporter
        self.partial = self.root / ".labctl" / "partial-edits"
        self.directory = self.root / SAVED / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
        self.skipped: list[str] = []
        self.held: list[list[str]] = []
        self.placed: list[Path] = []

    def fetch(self) -> Sequence[_Edit]:
        """All edited files, checked, in the partial directory."""
        reply = self.remote.call("edits", self.request, timeout_s=LONG_S)
        edits = []
        self.skipped += [f"{ascii(path)[1:-1]}: {reason}" for path, reason in reply["skipped"]]
        for path, size, sha256, base in reply["files"]:
            if reason := unwelcome(path):
                self.skipped.append(f"{ascii(path)[1:-1]}: {reason}")
            else:
                due = Due(path=contained(path), size=size, sha256=sha256)
                edits.append(_Edit(due=due, base=base))
        download = Download(
            self.remote,
            {**self.request, "run": ""},
            RemoteFolder(directory=reply["root"], rsync_version=reply["rsync"]),
            self.partial,
            basis=None,  # the server learns nothing of files here that it does not have
            reporter=self.reporter,
            name="pull code",
            hint="labctl pull --code",
        )
        _, bad = download.fetch([edit.due for edit in edits])
        if bad:
            raise TransferError(
                f"{bad[0].path} changed on the server while it was pulled",
                hint="labctl pull --code",
            )
        self.held = [[edit.due.path, edit.due.sha256] for edit in edits]
        return edits

    def keep(self, due: Due) -> str:
        place = self.directory / due.path
        place.parent.mkdir(parents=True, exist_ok=True)
        (self.partial / due.path).replace(place)
        self.placed.append(place)
        return due.path

    def replace(self, due: Due) -> None:
        place = _inside(self.root, due.path)
        place.parent.mkdir(parents=True, exist_ok=True)
        arrived = self.partial / due.path
        if place.exists():
            arrived.chmod(place.stat().st_mode & 0o777)
        arrived.replace(place)
        self.placed.append(place)

    def result(self, *, saved: tuple[str, ...] = (), brought: tuple[str, ...] = ()) -> EditsResult:
        sync_directories(self.placed, self.root)
        shutil.rmtree(self.partial, ignore_errors=True)
        if self.held:
            # Its watchdog saves only what is not safe here.
            self.remote.call("pulled", {**self.request, "edits": self.held})
        return EditsResult(
            directory=str(self.directory) if saved else "",
            saved=saved,
            brought=brought,
            skipped=tuple(self.skipped),
        )


def _inside(root: Path, name: str) -> Path:
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise PolicyError(
                f"{path} is a link",
                why=f"the server's {name} is not written through links",
                hint="labctl pull --code after the link is gone",
            )
    return path


def _hash_here(path: Path) -> str:
    """The hash of the lab's own file, "" if there is none."""
    if not os.path.lexists(path):
        return ""
    return hash_file(path) if path.is_file() else "not a file"
