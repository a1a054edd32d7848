"""Import a lab into this machine's keeper: stage its files, test the access, then install it."""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config import Paths, set_secret, trust
from labctl.config.identity import replace_file
from labctl.config.member_ids import list_lab_ids
from labctl.errors import BusyError, ConnectError, NotFoundError, UsageError
from labctl.events import Reporter, Step
from labctl.lifecycle import kept_labs
from labctl.lifecycle.kept_labs import KeptLab
from labctl.lifecycle.lab_archive import LabExport, LabExportReader, labctl_version
from labctl.model import Run, Server
from labctl.retry import retry_on
from labctl.servers import accounts, gang
from labctl.servers.accounts import ENDED
from labctl.servers.context import LabContext
from labctl.servers.cost import record_start
from labctl.servers.firewall import admit
from labctl.servers.host_keys import ensure_key_pair
from labctl.state import State, ledgers
from labctl.state.ledgers import LedgerLine
from labctl.stores.lab_store import open_lab_store
from labctl.wire.kept_labs import ImportedLab, KeeperInfo

LOGIN_S = 30.0
PAUSE_S = 1.0
# Directories that survive a second import of the same lab: its mirror, and other runs' code.
CARRIED = ("runs", ".labctl/kept")


def describe_keeper(paths: Paths, name: str, running: bool) -> KeeperInfo:
    """Describe this keeper, and list the lab's files that it already holds unchanged."""
    have: dict[str, str] = {}
    try:
        lab = kept_labs.find_kept_lab(paths, name)
    except NotFoundError:
        pass
    else:
        root = kept_labs.lab_directory(paths, lab.name)
        have = {path: sha for path, (_, sha) in lab.files.items() if _is_unchanged(root, lab, path)}
    return KeeperInfo(
        version=labctl_version(), host=socket.gethostname(), running=running, have=have
    )


def _is_unchanged(root: Path, kept_lab: KeptLab, path: str) -> bool:
    """Whether a file is as it was imported. Only the keeper writes there, so its size is enough."""
    local = root / path
    return (
        local.is_file()
        and not local.is_symlink()
        and local.stat().st_size == kept_lab.files[path][0]
    )


def import_lab(
    stream: BinaryIO,
    paths: Paths,
    state: State,
    environ: Mapping[str, str],
    reporter: Reporter,
    *,
    running: bool,
) -> ImportedLab:
    """Read an exported lab, test that it can be kept here, and install it. Repeated, it updates it.

    If a test fails, that is an error and nothing has changed: the provider does not list the
    server, the server rejects the login from here, or the store cannot be read or written.
    """
    unpacking = LabExportReader(stream)
    parcel = unpacking.parcel
    name = _check(parcel)
    with kept_labs.lock_kept_lab(paths, name, "keep --add", wait_s=kept_labs.DROP_S):
        staging = paths.keep_dir / f".arriving-{name}"
        shutil.rmtree(staging, ignore_errors=True)
        (staging / ".labctl").mkdir(parents=True, mode=0o700)
        try:
            arrived = unpacking.extract_files(staging)
            lab = _complete(paths, name, staging, parcel.kept_lab, arrived)
            context = kept_labs.make_context(lab, paths, state, reporter, environ, root=staging)
            servers = _test_access(context, parcel, staging)
            (staging / "lab-key").unlink(missing_ok=True)
            _install(paths, name, staging)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        kept = kept_labs.make_context(lab, paths, state, reporter, environ)
        _store_records(kept, parcel, servers)
    return ImportedLab(name=name, runs=lab.runs, running=running)


def _check(parcel: LabExport) -> str:
    """Return the lab's directory name; UsageError for another version or an invalid name."""
    if parcel.version != labctl_version():
        raise UsageError(
            f"this machine has labctl {labctl_version()}, "
            f"but the lab was exported by {parcel.version}",
            hint=f"pipx install --force labctl=={parcel.version}",
        )
    try:
        name = parcel.kept_lab.name
    except ValueError as error:
        raise UsageError(str(error)) from None
    foreign = {one.server.lab_id for one in parcel.members} - set(
        list_lab_ids(parcel.kept_lab.lab_id)
    )
    if foreign:
        raise UsageError(f"the exported lab has servers of another lab: {sorted(foreign)!a}")
    return name


def _complete(
    paths: Paths, name: str, staging: Path, kept_lab: KeptLab, arrived: set[str]
) -> KeptLab:
    """Add the files that were already here to the staged lab; its record names the runs of both."""
    root = kept_labs.lab_directory(paths, name)
    for path in kept_lab.files.keys() - arrived:
        if not _is_unchanged(root, kept_lab, path):
            raise BusyError(
                f"{path} is missing from the export",
                why="the copy on this machine changed or disappeared meanwhile",
            )
        _link(root / path, staging / path)
    runs = kept_lab.runs
    if root.is_dir():
        runs = tuple(dict.fromkeys([*kept_labs.find_kept_lab(paths, name).runs, *kept_lab.runs]))
    merged = msgspec.structs.replace(kept_lab, runs=runs)
    (staging / kept_labs.RECORD).write_bytes(msgspec.json.encode(merged))
    return merged


def _test_access(context: LabContext, parcel: LabExport, staging: Path) -> list[Server]:
    """Find the servers at the provider, log in to them, and write to the store; return them."""
    exported = [parcel.server, *(member.server for member in parcel.members)]
    accounts.require_same_account(context, exported)
    key = staging / "lab-key"
    if parcel.key:
        replace_file(key, parcel.key.encode())
    has_own_key = bool(parcel.key) and not context.logs_in_as_user
    servers = []
    for one in exported:
        context.reporter.emit(Step(name=f"looking up {one.alias} at {context.provider.name}"))
        server = _find_server(context, one)
        context.reporter.emit(Step(name=f"logging in to {one.alias}"))
        _log_in(context, server, server.endpoint.identity or (str(key) if has_own_key else ""))
        servers.append(server)
    if context.config.store:
        context.reporter.emit(Step(name=f"testing {context.config.store}"))
        store = open_lab_store(context)
        body = {"version": 1, "keeper": context.place, "at": time.time()}
        store.write("keeper.json", msgspec.json.encode(body))
        store.read("keeper.json")
    return servers


def _find_server(context: LabContext, exported: Server) -> Server:
    server = context.provider.find(exported.id)
    if server is None or server.state in ENDED:
        raise NotFoundError(
            f"{context.provider.name} does not list server {exported.id} for this machine",
            why="the server has ended, or this machine uses another account or region",
            hint="labctl status --refresh   # on the laptop",
        )
    return server


def _log_in(context: LabContext, server: Server, identity: str) -> None:
    """Log in from this machine, after opening the provider's firewall for its address."""
    address = server.endpoint
    endpoint = msgspec.structs.replace(address, identity=identity)
    admit(context, server)

    def log_in() -> None:
        transport = context.connections.connect(endpoint)
        try:
            transport.run("true", timeout_s=LOGIN_S)
        finally:
            transport.close()

    # A firewall rule takes a moment to apply.
    policy = retry_on(ConnectError, pause_s=PAUSE_S, deadline_s=LOGIN_S)
    try:
        policy(log_in)
    except ConnectError as error:
        raise ConnectError(
            f"the server {server.id} cannot be reached from here: {error.what}",
            why=error.why,
            hint=f"ssh -p {address.port} {address.user}@{address.host}   # on the keeper's machine",
        ) from error


def _install(paths: Paths, name: str, staging: Path) -> None:
    """Replace the lab's directory with the staged one, by two renames."""
    root = kept_labs.lab_directory(paths, name)
    for carried in CARRIED:
        if (root / carried).is_dir():
            _carry(root / carried, staging / carried)
    old = paths.keep_dir / f".old-{name}"
    shutil.rmtree(old, ignore_errors=True)
    if root.is_dir():
        root.rename(old)
    staging.rename(root)
    root.chmod(0o700)
    shutil.rmtree(old, ignore_errors=True)


def _carry(source: Path, target: Path) -> None:
    """Link into `target` what it lacks of `source`; with links, an interruption loses nothing."""
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder) / name
            link = target / path.relative_to(source)
            if not link.exists() and path.is_file() and not path.is_symlink():
                _link(path, link)


def _link(path: Path, link: Path) -> None:
    link.parent.mkdir(parents=True, exist_ok=True)
    try:
        link.hardlink_to(path)
    except OSError:  # this file system has no hard links
        shutil.copy2(path, link)


def _store_records(context: LabContext, parcel: LabExport, servers: Sequence[Server]) -> None:
    """Store the key, the secrets, the trust in lab.yaml, and the records of servers and runs."""
    if parcel.key:
        context.identity.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(context.identity, parcel.key.encode())
        ensure_key_pair(context.identity)
    for name, value in parcel.secrets.items():
        set_secret(context.paths, context.lab_id, name, value)
    trust(context.paths, context.config)
    first, *others = servers
    _store_server(context, first, parcel.runs, parcel.ledger)
    for server, member in zip(others, parcel.members, strict=True):
        rank = list_lab_ids(context.lab_id).index(server.lab_id)
        _store_server(gang.build_member(context, rank), server, member.runs, member.ledger)
    for run_id in parcel.kept_lab.runs:
        context.state.record(ledgers.KEPT, lab_id=context.lab_id, run_id=run_id)


def _store_server(
    context: LabContext, server: Server, runs: Sequence[Run], lines: Sequence[LedgerLine]
) -> None:
    """Store the records of one of the lab's servers, and of the runs on it."""
    ledgers.import_lines(context.state, context.lab_id, lines)
    ours = context.assign_alias(server, context.state.get_server(server.id))
    context.state.save_server(ours)
    context.connections.write(ours)
    record_start(context.state, ours)
    for run in runs:
        before = context.state.get_run(context.lab_id, run.id)
        if before is None or before.seen_at <= run.seen_at:
            context.state.save_run(run)
