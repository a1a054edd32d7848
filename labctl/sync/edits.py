"""Code that was edited on the server: save it, or merge it into the lab."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from labctl.errors import PolicyError, TransferError
from labctl.events import Note, Reporter
from labctl.model import Value
from labctl.servers.agent import AgentClient
from labctl.sync.containment import escape_controls, find_name_problem, find_stored_name_problem
from labctl.sync.downloads import AnnouncedFile, Download
from labctl.sync.durability import sync_directories
from labctl.sync.file_transfer import RemoteFolder
from labctl.sync.ignore import create_ignored_directory
from labctl.sync.scan import hash_file
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.files import (
    EDITS,
    PULLED,
    EditedFile,
    EditsReply,
    PartsRequest,
    PulledEdit,
    PulledRequest,
)
from labctl.wire.verbs import LabRequest

SAVED = "server-edits"
LONG_S = 3600.0


class EditsResult(Value, frozen=True):
    """Edited files: `saved` below `directory` ("" if none), `brought` into the lab, `skipped`."""

    directory: str = ""
    saved: tuple[str, ...] = ()
    brought: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()


def pull_edits(
    remote: AgentClient,
    lab: LabRequest,
    lab_root: Path,
    *,
    reporter: Reporter,
    merge: bool = False,
) -> EditsResult:
    """Save files that were edited on the server to `<lab_root>/server-edits/<UTC time>/`.

    Those that are the same in the lab are not saved again. With `merge`, copy them into the lab
    itself instead. A file that also changed here stays, and the server's version is saved. Without
    files to save, the directory is not created. Control characters in a name are saved as %0A; with
    `merge`, such a file is skipped.
    """
    root = lab_root.resolve()
    partial = root / ".labctl" / "partial-edits"
    directory = root / SAVED / f"{datetime.now(UTC):%Y%m%dT%H%M%S.%fZ}"
    with hold_transfers(lab_root, "pull --code" if merge else "pull", reporter):
        reply = remote.call(EDITS, lab, timeout_s=LONG_S)
        edits, skipped = _sort_edits(reply, merge=merge)
        _download(remote, lab, reply, edits, partial, reporter)
        saved: list[str] = []
        brought: list[str] = []
        for edit in edits:
            if not merge and _is_same_here(root, edit):
                continue  # as after `labctl pull --code`
            is_saved = not merge or _has_changed(root, edit)
            (saved if is_saved else brought).append(edit.path)
        targets = {path: directory / escape_controls(path) for path in saved}
        targets |= {path: _resolve(root, path) for path in brought}
        if saved:
            create_ignored_directory(root / SAVED)
        for path, target in targets.items():
            _place(partial / path, target)
        if merge and saved:
            reporter.emit(Note(text=_conflict_text(saved, directory), level="warning"))
        sync_directories(targets.values(), root)
        shutil.rmtree(partial, ignore_errors=True)
        if edits:
            # The watchdog then saves only edits that are not on this machine.
            held = tuple(PulledEdit(edit.path, edit.sha256) for edit in edits)
            remote.call(PULLED, PulledRequest(*lab, edits=held))
    return EditsResult(
        directory=str(directory) if saved else "",
        saved=tuple(map(escape_controls, saved)),
        brought=tuple(brought),
        skipped=tuple(skipped),
    )


def _sort_edits(reply: EditsReply, *, merge: bool) -> tuple[list[EditedFile], list[str]]:
    """Return the edits that can be downloaded, and descriptions of the others."""
    edits = []
    skipped = [f"{ascii(path)[1:-1]}: {reason}" for path, reason in reply.skipped]
    names = {edit.path for edit in reply.files}
    for edit in reply.files:
        if merge:
            reason = find_name_problem(edit.path)
        else:
            reason = find_stored_name_problem(edit.path, names, reserved=None)
        if reason:
            skipped.append(f"{ascii(edit.path)[1:-1]}: {reason}")
        else:
            edits.append(edit)
    return edits, skipped


def _download(
    remote: AgentClient,
    lab: LabRequest,
    reply: EditsReply,
    edits: Sequence[EditedFile],
    partial: Path,
    reporter: Reporter,
) -> None:
    """Download all edited files to the partial directory and verify them."""
    download = Download(
        RemoteFolder(
            remote=remote,
            request=PartsRequest(*lab, run=""),
            directory=reply.root,
            rsync_version=reply.rsync,
        ),
        partial,
        basis=None,  # so that the server learns nothing about the local files
        reporter=reporter,
        name="pull code",
        hint="labctl pull --code",
    )
    _, bad = download.fetch(
        [AnnouncedFile(path=edit.path, size=edit.size, sha256=edit.sha256) for edit in edits]
    )
    if bad:
        raise TransferError(
            f"{escape_controls(bad[0].path)} changed on the server during the download",
            hint="labctl pull --code",
        )


def _has_changed(root: Path, edit: EditedFile) -> bool:
    """Whether the lab's own file is neither the pushed one nor the server's."""
    return _hash_local(_resolve(root, edit.path)) not in ("", edit.base, edit.sha256)


def _is_same_here(root: Path, edit: EditedFile) -> bool:
    """Whether the lab's own file has the content of the server's."""
    try:
        return _hash_local(_resolve(root, edit.path)) == edit.sha256
    except PolicyError:  # behind a symbolic link
        return False


def _place(arrived: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        arrived.chmod(target.stat().st_mode & 0o777)
    arrived.replace(target)


def _conflict_text(paths: Sequence[str], directory: Path) -> str:
    return (
        f"changed here and on the server: {', '.join(paths)}. Your files are unchanged; the "
        f"server's are in {directory}. Merge them, then:\n  labctl push --force"
    )


def _resolve(root: Path, name: str) -> Path:
    path = root
    for part in name.split("/"):
        path = path / part
        if path.is_symlink():
            raise PolicyError(
                f"{path} is a symbolic link",
                why=f"labctl does not write the server's {name} through links",
                hint=f"rm {shlex.quote(str(path))}\nlabctl pull --code",
            )
    return path


def _hash_local(path: Path) -> str:
    """Hash the lab's own file; "" if it does not exist."""
    if not os.path.lexists(path):
        return ""
    return hash_file(path) if path.is_file() else "not a file"
