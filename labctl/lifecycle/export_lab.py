"""Export a lab to a keeper: everything it needs to recover the run while the laptop is off."""

from __future__ import annotations

import mmap
import socket
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path

import msgspec

from labctl.config import LAB_FILE, LabConfig, copy_environment, find_user_name, read_secret_values
from labctl.errors import NotFoundError, UsageError
from labctl.events import Note, Step
from labctl.lifecycle import restore
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.kept_labs import OUTSIDE, KeptLab
from labctl.lifecycle.lab_archive import (
    LabExport,
    MemberExport,
    labctl_version,
    write_export,
)
from labctl.model import Server
from labctl.servers import cost, gang, price_consent
from labctl.servers.context import LabContext
from labctl.state import ledgers
from labctl.state.ledgers import HANDED
from labctl.sync.scan import hash_file, scan_data
from labctl.text import add_next, bytes_text
from labctl.wire.kept_labs import ImportedLab, KeeperInfo

MIB = 1024**2
LAB_RECORD = ".labctl/lab.json"
# Settings that name a directory on this machine; the keeper's machine does not have it.
MACHINE_SETTINGS = ("wheelhouse",)
# Path in the exported lab -> local path, size in bytes, sha256.
Files = dict[str, tuple[Path, int, str]]


def check_export(context: LabContext, keeper: KeeperHost) -> KeeperInfo:
    """Check that the keeper answers, has our version, and can reach the lab's servers.

    Runs before anything is started, while a failure costs nothing.
    """
    for server in gang.list_servers(context):
        if _is_local_only(server) and not keeper.is_here:
            raise UsageError(
                f"{keeper.host} cannot keep {context.config.name}",
                why=f"its server's address, {server.endpoint.host}, works only on this machine",
                hint="use another provider in lab.yaml: server: {provider: aws}, or:\n"
                "labctl run --recover",
            )
    return keeper.fetch_inventory()


def _is_local_only(server: Server) -> bool:
    endpoint = server.endpoint
    try:
        return ip_address(endpoint.host).is_loopback and not endpoint.jump
    except ValueError:
        return endpoint.host == "localhost"


def export_lab(context: LabContext, keeper: KeeperHost, server: Server, run_id: str) -> ImportedLab:
    """Export the lab to the keeper, which then recovers its run. Repeated, it updates the export.

    If the keeper lacks something, that is an error, and nothing was exported.
    """
    known = check_export(context, keeper)
    step = Step(name=f"exporting {context.config.name} to {keeper.host}")
    context.reporter.emit(step)
    files, data = _list_files(context, run_id)
    parcel = _make_parcel(context, server, run_id, files, data)
    missing = {
        path: local for path, (local, _, sha) in files.items() if known.have.get(path) != sha
    }
    size = sum(files[path][1] for path in missing)
    if size > MIB:
        amount = f"{len(missing)} files, {bytes_text(size)}"
        context.reporter.emit(Note(text=f"sending {amount} to {keeper.host}"))
    context.paths.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=context.paths.cache_dir) as packed:
        write_export(packed, parcel, missing)
        packed.flush()
        # Map the file instead of reading it: a data set may be larger than this machine's memory.
        taken = keeper.add(memoryview(mmap.mmap(packed.fileno(), 0, access=mmap.ACCESS_READ)))
    context.state.record(
        HANDED,
        lab_id=context.lab_id,
        server_id=server.id,
        run_id=run_id,
        detail={"keeper": keeper.host},
    )
    context.reporter.emit(msgspec.structs.replace(step, done=True))
    if not taken.running:
        text = f"labctl keep is not running on {keeper.host}: nothing is watched until it runs"
        hint = f"on {keeper.host}:\nlabctl keep --install"
        context.reporter.emit(Note(text=add_next(text, hint), level="warning"))
    return taken


def _list_files(context: LabContext, run_id: str) -> tuple[Files, dict[str, str]]:
    """Return the files that the keeper needs, and the path in the lab of each data set."""
    root = context.config.root
    files: Files = {}
    for name in (LAB_RECORD,):
        files[name] = _describe_file(root / name)
    files[LAB_FILE] = _describe_file(context.config.path)
    kept = root / restore.KEPT / run_id
    if not (kept / "spec.json").is_file():
        raise NotFoundError(
            f"this machine has no copy of the code of run {run_id}",
            why="the run was not started with --recover",
            hint="labctl run --recover --keeper HOST   # a new run",
        )
    for path in sorted(kept.rglob("*")):
        if path.is_file() and not path.is_symlink():
            files[str(path.relative_to(root))] = _describe_file(path)
    data: dict[str, str] = {}
    for name, source in context.config.data.items():
        if source.path is None:
            continue
        inside = source.inside_lab and source.path.is_relative_to(root)
        directory = source.path.relative_to(root) if inside else OUTSIDE / name
        data[name] = str(directory)
        for entry in scan_data(root, name, source.path, context.reporter):
            files[str(directory / entry.path)] = (
                source.path / entry.path,
                entry.size,
                entry.sha256,
            )
    return files, data


def _describe_file(path: Path) -> tuple[Path, int, str]:
    return path, path.stat().st_size, hash_file(path)


def _make_parcel(
    context: LabContext, server: Server, run_id: str, files: Files, data: dict[str, str]
) -> LabExport:
    config, state = context.config, context.state
    secrets = read_secret_values(context.paths, context.lab_id, config, copy_environment())
    run = state.get_run(context.lab_id, run_id)
    members = _export_members(context, run_id)
    lab_ids = [context.lab_id, *(member.server.lab_id for member in members)]
    kept_lab = KeptLab(
        lab=config.name,
        lab_id=context.lab_id,
        by=f"{context.owner or find_user_name()}@{socket.gethostname()}",
        at=time.time(),
        runs=(run_id,),
        settings=_settings(config),
        data=data,
        ceiling_usd_per_hour=price_consent.max_confirmed_usd_per_hour(server.offer),
        spent_usd=sum(cost.spent_usd(state, lab_id, time.time()) for lab_id in lab_ids),
        files={path: (size, sha256) for path, (_, size, sha256) in files.items()},
    )
    return LabExport(
        version=labctl_version(),
        kept_lab=kept_lab,
        server=server,
        runs=(run,) if run else (),
        ledger=tuple(ledgers.list_lines(state, context.lab_id)),
        secrets={name: value.reveal() for name, value in secrets.items()},
        key=context.identity.read_text() if context.identity.is_file() else "",
        members=tuple(members),
    )


def _export_members(context: LabContext, run_id: str) -> list[MemberExport]:
    """Export the lab's servers beside the first one, each with its part of the run."""
    state = context.state
    others = [] if context.rank is not None else gang.list_servers(context)[1:]
    exported = []
    for server in others:
        part = state.get_run(server.lab_id, run_id)
        lines = tuple(ledgers.list_lines(state, server.lab_id))
        exported.append(MemberExport(server=server, runs=(part,) if part else (), ledger=lines))
    return exported


def _settings(config: LabConfig) -> dict[str, str]:
    """Return the settings that this machine and its user added to lab.yaml."""
    return {key: value for key, value in config.beside.items() if key not in MACHINE_SETTINGS}
