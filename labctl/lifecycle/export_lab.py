"""Handing a lab to a keeper: all that it needs to recover the lab's run with the laptop closed."""

from __future__ import annotations

import getpass
import mmap
import socket
import tempfile
import time
from ipaddress import ip_address
from pathlib import Path

import msgspec

from labctl.config import LAB_FILE, LabConfig, environment, secret_values
from labctl.errors import NotFoundError, UsageError
from labctl.events import Note, Step
from labctl.lifecycle import restore
from labctl.lifecycle.import_lab import Known, Taken
from labctl.lifecycle.keeper_host import KeeperHost
from labctl.lifecycle.kept_labs import OUTSIDE, Ward
from labctl.lifecycle.lab_archive import Parcel, version, write
from labctl.model import Server
from labctl.servers import attempts, cost
from labctl.servers.context import Ground
from labctl.state import ledgers
from labctl.state.ledgers import HANDED
from labctl.sync.scan import hash_file, scan_data

MIB = 1024**2
LAB_RECORD = ".labctl/lab.json"
# Settings that lead to a directory here.
OF_THIS_MACHINE = ("wheelhouse",)
# Path in the ward -> where it lies here, its size, its sha256.
Files = dict[str, tuple[Path, int, str]]


def check(ground: Ground, keeper: KeeperHost, server: Server) -> Known:
    """Whether the keeper is there, of our version, and can reach such a server at all.

    Before anything is started: what is lacking is said while it costs nothing.
    """
    if _only_from_here(server) and not keeper.is_here:
        raise UsageError(
            f"{keeper.host} cannot keep {ground.config.name}",
            why=f"its server is reached at {server.endpoint.host}, from this machine alone",
            hint="another provider in lab.yaml: server: {provider: aws}; or labctl run --recover",
        )
    return keeper.hello()


def _only_from_here(server: Server) -> bool:
    endpoint = server.endpoint
    try:
        return ip_address(endpoint.host).is_loopback and not endpoint.jump
    except ValueError:
        return endpoint.host == "localhost"


def hand_over(ground: Ground, keeper: KeeperHost, server: Server, run_id: str) -> Taken:
    """Have the keeper look after the lab's run. Repeated, it updates what was handed over.

    What the keeper lacks is an error, and then nothing was handed over.
    """
    known = check(ground, keeper, server)
    step = Step(name=f"handing {ground.config.name} over to {keeper.host}")
    ground.reporter.emit(step)
    files, data = _files(ground, run_id)
    parcel = _parcel(ground, server, run_id, files, data)
    wanted = {path: place for path, (place, _, sha) in files.items() if known.have.get(path) != sha}
    size = sum(files[path][1] for path in wanted)
    if size > MIB:
        many = f"{len(wanted)} files, {size / MIB:.0f} MiB"
        ground.reporter.emit(Note(text=f"sending {many} to {keeper.host}"))
    ground.paths.cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=ground.paths.cache_dir) as packed:
        write(packed, parcel, wanted)
        packed.flush()
        # The file's pages, not a copy of them: a data set may be larger than the memory here.
        taken = keeper.add(memoryview(mmap.mmap(packed.fileno(), 0, access=mmap.ACCESS_READ)))
    ground.state.record(
        HANDED,
        lab_id=ground.lab_id,
        server_id=server.id,
        run_id=run_id,
        detail={"keeper": keeper.host},
    )
    ground.reporter.emit(msgspec.structs.replace(step, done=True))
    if not taken.running:
        text = f"no labctl keep runs at {keeper.host} now: nothing is watched until it does"
        ground.reporter.emit(
            Note(text=f"{text}\n  next, at {keeper.host}: labctl keep --install", level="warning")
        )
    return taken


def _files(ground: Ground, run_id: str) -> tuple[Files, dict[str, str]]:
    """What the keeper needs of the lab directory, and where in it each data set lies then."""
    root = ground.config.root
    files: Files = {}
    for name in (LAB_RECORD,):
        files[name] = _one(root / name)
    files[LAB_FILE] = _one(ground.config.path)
    kept = root / restore.KEPT / run_id
    if not (kept / "spec.json").is_file():
        raise NotFoundError(
            f"the code of run {run_id} was not kept here",
            why="it was not started with --recover",
            hint="labctl run --recover --keeper HOST   # a new run",
        )
    for path in sorted(kept.rglob("*")):
        if path.is_file() and not path.is_symlink():
            files[str(path.relative_to(root))] = _one(path)
    data: dict[str, str] = {}
    for name, source in ground.config.data.items():
        if source.path is None:
            continue
        inside = source.inside_lab and source.path.is_relative_to(root)
        place = source.path.relative_to(root) if inside else OUTSIDE / name
        data[name] = str(place)
        for entry in scan_data(root, name, source.path, ground.reporter):
            found = (source.path / entry.path, entry.size, entry.sha256)
            files[str(place / entry.path)] = found
    return files, data


def _one(path: Path) -> tuple[Path, int, str]:
    return path, path.stat().st_size, hash_file(path)


def _parcel(
    ground: Ground, server: Server, run_id: str, files: Files, data: dict[str, str]
) -> Parcel:
    config, state = ground.config, ground.state
    bare = secret_values(ground.paths, ground.lab_id, config, environment())
    run = state.run(ground.lab_id, run_id)
    ward = Ward(
        lab=config.name,
        lab_id=ground.lab_id,
        by=f"{ground.owner or getpass.getuser()}@{socket.gethostname()}",
        at=time.time(),
        runs=(run_id,),
        settings=_settings(config),
        data=data,
        ceiling_usd_per_hour=attempts.agreed_usd_per_hour(server.offer),
        spent_usd=cost.spent_usd(state, ground.lab_id, time.time()),
        files={path: (size, sha256) for path, (_, size, sha256) in files.items()},
    )
    return Parcel(
        version=version(),
        ward=ward,
        server=server,
        runs=(run,) if run else (),
        ledger=tuple(ledgers.lines(state, ground.lab_id)),
        secrets={name: value.reveal() for name, value in bare.items()},
        key=ground.identity.read_text() if ground.identity.is_file() else "",
    )


def _settings(config: LabConfig) -> dict[str, str]:
    """What this machine and its user have added to lab.yaml."""
    return {key: text for key, text in config.beside.items() if key not in OF_THIS_MACHINE}
