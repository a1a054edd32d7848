"""The saved copy of a run, and its restore on another server.

The copy is in the lab's store, to which the server mirrors. Without a store it is on this machine:
the code as pushed, kept when a run starts with --recover, and the outputs that `pull --follow`
copies to runs/<run>.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.model import FileEntry, Run, Server, Value
from labctl.servers.context import LabContext
from labctl.stores.lab_store import open_lab_store, restore_run
from labctl.sync.push import push_tree
from labctl.sync.scan import HashIndex, scan_code, scan_data
from labctl.sync.transfer_lock import hold_transfers
from labctl.wire.codec import MessageError, decode, encode
from labctl.wire.mirrors import StoredRunRecord
from labctl.wire.runs import (
    ADOPT_PUSHED,
    AdoptPushedRequest,
    RunRecord,
    RunSpec,
)

KEPT = Path(".labctl") / "kept"
NOT_OUTPUTS = ("run.json", "report.html")


class SavedRun(Value, frozen=True):
    """A saved run: its spec, and its last recorded state; None if none was recorded."""

    spec: RunSpec
    run: RunRecord | None


def keep_code(context: LabContext, spec: RunSpec) -> None:
    """Keep a copy of the run's code, exactly the files that a push would send now.

    The code is small, and a run must resume with the code that it started with.
    """
    config = context.config
    inside = [data.path for data in config.data.values() if data.path and data.inside_lab]
    files = scan_code(config.root, context.reporter, data=inside)
    kept = config.root / KEPT / spec.id
    staging = kept.with_name(f".{spec.id}.new")
    shutil.rmtree(staging, ignore_errors=True)
    for entry in files:
        target = staging / "code" / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(config.root / entry.path, target)
    (staging / "code").mkdir(parents=True, exist_ok=True)
    (staging / "spec.json").write_text(encode(spec), encoding="utf-8")
    shutil.rmtree(kept, ignore_errors=True)
    staging.rename(kept)


def read_saved_run(context: LabContext, run_id: str) -> SavedRun:
    """Read what was saved of a run; NotFoundError if nothing was."""
    return _read_from_store(context, run_id) or read_local(context, run_id)


def _read_from_store(context: LabContext, run_id: str) -> SavedRun | None:
    if not context.config.store:
        return None
    text = open_lab_store(context).read(f"runs/{run_id}/run.json")
    if text is None:
        return None
    try:
        stored = decode(StoredRunRecord, text)
    except MessageError as error:
        raise LabError(
            f"the record of run {run_id} in {context.config.store} cannot be read",
            why=str(error),
            hint="labctl run   # starts a new run",
        ) from error
    return SavedRun(spec=stored.spec, run=stored.record)


def read_local(context: LabContext, run_id: str) -> SavedRun:
    """Read what this machine has of a run; NotFoundError if it has nothing."""
    path = context.config.root / KEPT / run_id / "spec.json"
    try:
        spec = decode(RunSpec, path.read_bytes())
    except (FileNotFoundError, MessageError):
        raise NotFoundError(
            f"nothing of run {run_id} was saved on this machine",
            why="the lab has no store, and the run was not started with --recover",
            hint="labctl run --recover   # starts a new run",
        ) from None
    known = context.state.get_run(context.lab_id, run_id)
    return SavedRun(spec=spec, run=_make_record(known) if known else None)


def _make_record(run: Run) -> RunRecord:
    """Convert this machine's record of a run to the record that a server has of it."""
    return RunRecord(
        id=run.id,
        state=run.state,
        lab_id=run.lab_id,
        command=run.command,
        image=run.image,
        created_at=run.created_at,
        started_at=run.started_at,
        ended_at=run.ended_at,
        exit_code=run.exit_code,
        summary=run.summary,
        container=run.container,
        image_id=run.image_id,
        image_digest=run.image_digest,
        progress=run.progress,
        new_files=run.new_files,
        stopped_by=run.stopped_by,
        gpu_lost_at=run.gpu_lost_at,
        oom_limit_bytes=run.oom_limit_bytes if isinstance(run.oom_limit_bytes, int) else None,
        has_checkpoints=run.has_checkpoints is True,
    )


def restore(context: LabContext, server: Server, run_id: str) -> int:
    """Copy what is saved of a run to the server, as a lost run; return the number of files."""
    if _read_from_store(context, run_id) is not None:
        done = restore_run(context, server, run_id)
        for name, why in done.left_out:
            text = f"skipped {name}, which is incomplete in the store: {why}"
            context.reporter.emit(Note(text=text, level="warning"))
        return done.files
    return restore_local(context, server, run_id)


def restore_local(
    context: LabContext, server: Server, run_id: str, *, replaces: bool = False
) -> int:
    """Copy what this machine has of a run to the server, as a lost run; return the files.

    With `replaces`, it is newer than what the server has of the run.
    """
    saved = read_local(context, run_id)
    tree = build_tree(context, run_id)
    if not any(entry.path.startswith("checkpoints/") for entry in tree.files):
        text = f"no complete checkpoint of {run_id} was saved: it starts from the beginning"
        context.reporter.emit(Note(text=text, level="warning"))
    send_tree(context, server, saved, tree, replaces=replaces)
    return len(tree.files)


def send_tree(
    context: LabContext,
    server: Server,
    saved: SavedRun,
    tree: RunTree,
    *,
    completes: bool = False,
    replaces: bool = False,
) -> None:
    """Send a run's files to the server, and make a lost run of them there.

    A run that is there already stays as it is. With `completes` it gets the checkpoints, with
    `replaces` it is set aside.
    """
    run_id, remote = saved.spec.id, context.open_agent(server)
    if tree.files:
        with hold_transfers(context.config.root, "push", context.reporter):
            push_tree(
                remote,
                context.config.name,
                context.lab_id,
                f"restore/{run_id}",
                tree.root,
                tree.files,
                context.reporter,
                force=True,
                index=tree.index,
            )
    created_at = saved.run.created_at if saved.run else 0.0
    attempts = (
        len(context.state.list_events(lab_id=context.lab_id, run_id=run_id, kind="recovered")) + 1
    )
    request = AdoptPushedRequest(saved.spec, created_at, attempts, completes, replaces)
    remote.call(ADOPT_PUSHED, request)


@dataclass(frozen=True)
class RunTree:
    root: Path
    files: tuple[FileEntry, ...]
    index: HashIndex


def build_tree(context: LabContext, run_id: str) -> RunTree:
    """Build the run's directory from links to the local files."""
    root = context.config.root
    directory = root / ".labctl" / "restoring" / run_id
    shutil.rmtree(directory, ignore_errors=True)
    _link_tree(root / KEPT / run_id / "code", directory / "code")
    outputs = root / "runs" / run_id
    if outputs.is_dir():
        _link_tree(outputs, directory, skipped=NOT_OUTPUTS)
    name = f"restore-{run_id}"
    index = HashIndex(root, f"data/{name}")
    files = scan_data(root, name, directory, context.reporter, later=index)
    return RunTree(root=directory, files=files, index=index)


def _link_tree(source: Path, target: Path, skipped: Sequence[str] = ()) -> None:
    """Copy a tree by hard links, or by content if the file system has no hard links."""
    for path in source.rglob("*"):
        relative = path.relative_to(source)
        if path.is_symlink() or not path.is_file() or str(relative) in skipped:
            continue
        if relative.parts[0].startswith(".labctl"):
            continue
        link = target / relative
        link.parent.mkdir(parents=True, exist_ok=True)
        try:
            link.hardlink_to(path)
        except OSError:
            shutil.copy2(path, link)
    target.mkdir(parents=True, exist_ok=True)
