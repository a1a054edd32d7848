"""What is saved of a run, and putting it on another server.

That is the lab's store, to which the server mirrors. Without one it is here: the code as it was
pushed, kept when a run that may be recovered starts, and the outputs that `pull --follow` brings to
runs/<run>.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.model import FileEntry, RunSpec, Server, Value
from labctl.servers.context import Ground
from labctl.stores.lab_store import lab_store, restore_run
from labctl.sync.push import push
from labctl.sync.scan import Index, scan_code, scan_data
from labctl.sync.transfer_lock import hold_transfers

KEPT = Path(".labctl") / "kept"
NOT_OUTPUTS = ("run.json", "report.html")


class Kept(Value, frozen=True):
    """A run as it was saved: what it is, and what was last said of it (`Run`'s fields)."""

    spec: RunSpec
    run: dict[str, Any]


def keep_code(ground: Ground, spec: RunSpec) -> None:
    """Keep the run's code here, hash by hash what a push of this moment sends.

    It is small, and a run that goes on elsewhere must go on with the code that it began with.
    """
    config = ground.config
    inside = [one.path for one in config.data.values() if one.path and one.inside_lab]
    files = scan_code(config.root, ground.reporter, data=inside)
    kept = config.root / KEPT / spec.id
    staging = kept.with_name(f".{spec.id}.new")
    shutil.rmtree(staging, ignore_errors=True)
    for entry in files:
        target = staging / "code" / entry.path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(config.root / entry.path, target)
    (staging / "code").mkdir(parents=True, exist_ok=True)
    (staging / "spec.json").write_bytes(msgspec.json.encode(spec))
    shutil.rmtree(kept, ignore_errors=True)
    staging.rename(kept)


def record(ground: Ground, run_id: str) -> Kept:
    """What was saved of a run; NotFoundError where that is nothing."""
    return _in_store(ground, run_id) or _here(ground, run_id)


def _in_store(ground: Ground, run_id: str) -> Kept | None:
    if not ground.config.store:
        return None
    text = lab_store(ground).read(f"runs/{run_id}/run.json")
    if text is None:
        return None
    try:
        found = msgspec.json.decode(text, type=_Stored)
    except msgspec.MsgspecError as error:
        raise LabError(
            f"the record of run {run_id} in {ground.config.store} cannot be read",
            why=str(error),
            hint="labctl run   # a new one",
        ) from error
    return Kept(spec=found.spec, run=found.record)


class _Stored(Value, frozen=True):
    """What recovery reads of run.json in a store (labctl/agent/mirror/store_index.py)."""

    spec: RunSpec
    record: dict[str, Any] = msgspec.field(default_factory=dict)


def _here(ground: Ground, run_id: str) -> Kept:
    path = ground.config.root / KEPT / run_id / "spec.json"
    try:
        spec = msgspec.json.decode(path.read_bytes(), type=RunSpec)
    except (FileNotFoundError, msgspec.MsgspecError):
        raise NotFoundError(
            f"nothing of run {run_id} was saved here",
            why="there is no store, and it was not started with --recover",
            hint="labctl run --recover   # a new one",
        ) from None
    known = ground.state.run(ground.lab_id, run_id)
    return Kept(spec=spec, run=msgspec.to_builtins(known) if known else {})


def restore(ground: Ground, server: Server, run_id: str) -> int:
    """Put what is saved of a run on the server as a lost run; how many files that took."""
    if _in_store(ground, run_id) is not None:
        done = restore_run(ground, server, run_id)
        for name, why in done["left_out"]:
            text = f"{name} is not whole in the store and was left out: {why}"
            ground.reporter.emit(Note(text=text, level="warning"))
        return int(done["files"])
    return _from_here(ground, server, run_id)


def _from_here(ground: Ground, server: Server, run_id: str) -> int:
    kept = _here(ground, run_id)
    config, remote = ground.config, ground.remote(server)
    tree = _tree(ground, run_id)
    if not any(entry.path.startswith("checkpoints/") for entry in tree.files):
        text = f"no whole checkpoint of {run_id} was saved: it begins anew"
        ground.reporter.emit(Note(text=text, level="warning"))
    target = f"restore/{run_id}"
    with hold_transfers(config.root, "push", ground.reporter):
        push(
            remote,
            config.name,
            ground.lab_id,
            target,
            tree.root,
            tree.files,
            ground.reporter,
            force=True,
            index=tree.index,
        )
    created_at = kept.run.get("created_at") or 0.0
    attempts = len(ground.state.events(lab_id=ground.lab_id, run_id=run_id, kind="recovered")) + 1
    request = {
        "spec": msgspec.to_builtins(kept.spec),
        "created_at": created_at,
        "attempts": attempts,
    }
    remote.call("restore-pushed", request)
    return len(tree.files)


@dataclass(frozen=True)
class _Tree:
    root: Path
    files: tuple[FileEntry, ...]
    index: Index


def _tree(ground: Ground, run_id: str) -> _Tree:
    """The run's directory as it is to be, made of links to what lies here."""
    root = ground.config.root
    whole = root / ".labctl" / "restoring" / run_id
    shutil.rmtree(whole, ignore_errors=True)
    _linked(root / KEPT / run_id / "code", whole / "code")
    outputs = root / "runs" / run_id
    if outputs.is_dir():
        _linked(outputs, whole, but=NOT_OUTPUTS)
    name = f"restore-{run_id}"
    index = Index(root, f"data/{name}")
    files = scan_data(root, name, whole, ground.reporter, later=index)
    return _Tree(root=whole, files=files, index=index)


def _linked(source: Path, target: Path, but: Sequence[str] = ()) -> None:
    """A copy of a tree that takes no room where the file system can link."""
    for path in source.rglob("*"):
        relative = path.relative_to(source)
        if path.is_symlink() or not path.is_file() or str(relative) in but:
            continue
        if relative.parts[0].startswith(".labctl"):
            continue
        place = target / relative
        place.parent.mkdir(parents=True, exist_ok=True)
        try:
            place.hardlink_to(path)
        except OSError:
            shutil.copy2(path, place)
    target.mkdir(parents=True, exist_ok=True)
