"""A lab is handed to this machine: staged, tried, and only then taken into its keeper's care."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config import Paths, set_secret, trust
from labctl.errors import BusyError, ConnectError, NotFoundError, UsageError
from labctl.events import Reporter, Step
from labctl.lifecycle import kept_labs
from labctl.lifecycle.kept_labs import Ward
from labctl.lifecycle.lab_archive import Parcel, Unpacking, version
from labctl.model import Server, Value
from labctl.retry import retry_on
from labctl.servers import accounts
from labctl.servers.accounts import ENDED
from labctl.servers.context import Ground
from labctl.servers.cost import note_life
from labctl.servers.gate import admit
from labctl.servers.host_keys import make_key, replace_file
from labctl.state import State, ledgers
from labctl.stores.lab_store import lab_store

LOGIN_S = 30.0
PAUSE_S = 1.0
# What an earlier hand-over of the same lab left stays: its own mirror, and other runs' code.
CARRIED = ("runs", ".labctl/kept")


class Known(Value, frozen=True):
    """What a keeper's machine says before anything is sent. `have` is path -> sha256."""

    version: str
    host: str
    running: bool
    have: dict[str, str] = msgspec.field(default_factory=dict)


class Taken(Value, frozen=True):
    """A lab that is kept now."""

    name: str
    runs: tuple[str, ...]
    running: bool


def know(places: Paths, name: str, running: bool) -> Known:
    """What is here of this lab already, byte for byte as it came."""
    import socket

    have: dict[str, str] = {}
    try:
        one = kept_labs.ward(places, name)
    except NotFoundError:
        pass
    else:
        root = kept_labs.directory(places, one.name)
        have = {path: sha for path, (_, sha) in one.files.items() if _as_it_came(root, one, path)}
    return Known(version=version(), host=socket.gethostname(), running=running, have=have)


def _as_it_came(root: Path, ward: Ward, path: str) -> bool:
    """Nobody but the keeper writes there, so that the size tells."""
    place = root / path
    return (
        place.is_file() and not place.is_symlink() and place.stat().st_size == ward.files[path][0]
    )


def take_in(
    stream: BinaryIO,
    places: Paths,
    state: State,
    environ: Mapping[str, str],
    reporter: Reporter,
    *,
    running: bool,
) -> Taken:
    """Read a parcel, try that its lab can be kept from here, and keep it. Repeated, it updates.

    Whatever is lacking is an error, and nothing has changed then: the provider does not know the
    server, it lets nobody in from here, the store cannot be read or written.
    """
    unpacking = Unpacking(stream)
    parcel = unpacking.parcel
    name = _checked(parcel)
    with kept_labs.worked_on(places, name, "keep --add", wait_s=kept_labs.DROP_S):
        staging = places.keep_dir / f".arriving-{name}"
        shutil.rmtree(staging, ignore_errors=True)
        (staging / ".labctl").mkdir(parents=True, mode=0o700)
        try:
            arrived = unpacking.files(staging)
            known = _completed(places, name, staging, parcel.ward, arrived)
            ground = kept_labs.ground(known, places, state, reporter, environ, root=staging)
            found = _proved(ground, parcel, staging)
            (staging / "lab-key").unlink(missing_ok=True)
            _placed(places, name, staging, known)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        kept = kept_labs.ground(known, places, state, reporter, environ)
        _settled(kept, parcel, found)
    return Taken(name=name, runs=known.runs, running=running)


def _checked(parcel: Parcel) -> str:
    if parcel.version != version():
        raise UsageError(
            f"labctl here is {version()}, the one that hands over {parcel.version}",
            hint=f"pipx install --force labctl=={parcel.version}",
        )
    try:
        return parcel.ward.name
    except ValueError as error:
        raise UsageError(str(error)) from None


def _completed(places: Paths, name: str, staging: Path, ward: Ward, arrived: set[str]) -> Ward:
    """The staged lab with what was here before; its record names the runs of both."""
    root = kept_labs.directory(places, name)
    for path in ward.files.keys() - arrived:
        if not _as_it_came(root, ward, path):
            raise BusyError(f"{path} did not come along", why="it was here a moment ago")
        _linked(root / path, staging / path)
    runs = ward.runs
    if root.is_dir():
        runs = tuple(dict.fromkeys([*kept_labs.ward(places, name).runs, *ward.runs]))
    known_now = msgspec.structs.replace(ward, runs=runs)
    (staging / kept_labs.RECORD).write_bytes(msgspec.json.encode(known_now))
    return known_now


def _proved(ground: Ground, parcel: Parcel, staging: Path) -> Server:
    """The server as the provider shows it from here, after a login; the store let us in too."""
    ground.reporter.emit(Step(name=f"asking {ground.provider.name} for the server"))
    accounts.require_same_account(ground, [parcel.server])
    found = ground.provider.find(parcel.server.id)
    if found is None or found.state in ENDED:
        raise NotFoundError(
            f"{ground.provider.name} shows no server {parcel.server.id} from here",
            why="it has ended, or this machine works in another account or region",
            hint="labctl status --refresh   # at the laptop",
        )
    ground.reporter.emit(Step(name="logging in to the server"))
    key = staging / "lab-key"
    if parcel.key:
        replace_file(key, parcel.key.encode())
    _log_in(ground, found, found.endpoint.identity or (str(key) if parcel.key else ""))
    if ground.config.store:
        ground.reporter.emit(Step(name=f"trying {ground.config.store}"))
        store = lab_store(ground)
        said = {"version": 1, "keeper": ground.place, "at": time.time()}
        store.write("keeper.json", msgspec.json.encode(said))
        store.read("keeper.json")
    return found


def _log_in(ground: Ground, found: Server, identity: str) -> None:
    """From this machine's own address: the provider's gate is opened for it first."""
    known = found.endpoint
    endpoint = msgspec.structs.replace(known, identity=identity)
    admit(ground, found)

    def log_in() -> None:
        transport = ground.connections.connect(endpoint)
        try:
            transport.run("true", timeout_s=LOGIN_S)
        finally:
            transport.close()

    # A gate takes a moment to open.
    policy = retry_on(ConnectError, pause_s=PAUSE_S, deadline_s=LOGIN_S)
    try:
        policy(log_in)
    except ConnectError as error:
        raise ConnectError(
            f"the server {found.id} cannot be reached from here: {error.what}",
            why=error.why,
            hint=f"ssh -p {known.port} {known.user}@{known.host}   # from that machine",
        ) from error


def _placed(places: Paths, name: str, staging: Path, ward: Ward) -> None:
    """The staged directory in place of what was there; no moment shows half of it for long."""
    root = kept_labs.directory(places, name)
    for carried in CARRIED:
        if (root / carried).is_dir():
            _carry(root / carried, staging / carried)
    old = places.keep_dir / f".old-{name}"
    shutil.rmtree(old, ignore_errors=True)
    if root.is_dir():
        root.rename(old)
    staging.rename(root)
    root.chmod(0o700)
    shutil.rmtree(old, ignore_errors=True)


def _carry(source: Path, target: Path) -> None:
    """What `target` lacks of `source`, by links: an interruption loses nothing."""
    for folder, _, names in os.walk(source):
        for name in names:
            path = Path(folder) / name
            place = target / path.relative_to(source)
            if not place.exists() and path.is_file() and not path.is_symlink():
                _linked(path, place)


def _linked(path: Path, place: Path) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    try:
        place.hardlink_to(path)
    except OSError:  # no links on this file system
        shutil.copy2(path, place)


def _settled(ground: Ground, parcel: Parcel, found: Server) -> None:
    """The key, the secrets, the approval and the records, each where labctl keeps it."""
    if parcel.key:
        ground.identity.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(ground.identity, parcel.key.encode())
        make_key(ground.identity)
    for name, value in parcel.secrets.items():
        set_secret(ground.paths, ground.lab_id, name, value)
    trust(ground.paths, ground.config)
    ledgers.take_over(ground.state, ground.lab_id, parcel.ledger)
    ours = ground.as_ours(found, ground.state.server(found.id))
    ground.state.save_server(ours)
    ground.connections.write(ours)
    note_life(ground.state, ours)
    for run in parcel.runs:
        before = ground.state.run(ground.lab_id, run.id)
        if before is None or before.seen_at <= run.seen_at:
            ground.state.save_run(run)
