"""Runs from home: start exactly once, follow through cut links, ask, cancel."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec

from labctl.config import environment, secret_values
from labctl.errors import ConnectError, LabError, NotFoundError, UsageError
from labctl.events import Note
from labctl.model import NAME_PATTERN, Run, RunSpec, Server
from labctl.runs import images, provenance
from labctl.servers.agent import Remote
from labctl.servers.context import Ground
from labctl.servers.prepare import gpu_for

LONGEST_PAUSE_S = 10.0
KNOWN_RUN_FIELDS = set(Run.__struct_fields__)
PROFILES = "profile-"
# How the names of runs begin that answer a question beside the work: none is the latest run.
ASIDE = (PROFILES, "probe-")


def new_id() -> str:
    """A run's name: when it was made, and two random bytes against two in one second."""
    return time.strftime("%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2)


def spec(
    ground: Ground, server: Server, command: tuple[str, ...], run_id: str, tty: bool
) -> RunSpec:
    """Everything the run is. Refused before anything starts: a GPU that is not there, bad names."""
    config = ground.config
    words = command or config.run
    if not words:
        raise UsageError(
            "nothing to run",
            why="lab.yaml has no `run:` and nothing follows `--`",
            hint="labctl run -- python train.py",
        )
    if not NAME_PATTERN.fullmatch(run_id):
        clean = re.sub(r"[^a-z0-9-]+", "-", run_id.lower()).strip("-")[:38]
        raise UsageError(
            f"{run_id!r} cannot name a run",
            why="names are lower-case letters, digits and `-`, at most 39",
            hint=f"labctl run --id {clean or 'first'}",
        )
    return RunSpec(
        id=run_id,
        lab=config.name,
        lab_id=ground.lab_id,
        command=words,
        image=images.reference(ground),
        env=config.env,
        secrets=config.secrets,
        outputs=config.outputs,
        gpus=gpu_for(config.server.need, ground.facts(server), ground.reporter),
        memory_bytes=config.limits.memory_bytes,
        cpus=config.limits.cpus,
        shm_bytes=config.limits.shm_bytes,
        tty=tty,
    )


def start(
    ground: Ground,
    server: Server,
    wanted: RunSpec,
    *,
    follow: bool,
    on_start: Callable[[Run, bool], None],
    on_log: Callable[[bytes], None],
) -> Run:
    """Start (or find) the run, and with `follow` hand on its log until it ends.

    A link that dies at any moment leads back to the same run. KeyboardInterrupt passes through:
    the run goes on.
    """
    with provenance.Looking(ground.config.root) as looking:
        return _start(ground, server, wanted, looking, follow, on_start, on_log)


def _start(
    ground: Ground,
    server: Server,
    wanted: RunSpec,
    looking: provenance.Looking,
    follow: bool,
    on_start: Callable[[Run, bool], None],
    on_log: Callable[[bytes], None],
) -> Run:
    remote = ground.remote(server)
    request = asked(ground, wanted)
    log = _Log(on_log)

    def started(reply: dict[str, Any]) -> None:
        if "run" in reply:
            run = to_run(reply["run"], server.id)
            ground.state.save_run(run)
            log.begun = True
            on_start(run, bool(reply["found"]))
            provenance.keep(ground, run, wanted, looking)
        else:
            log.missing = True

    for _ in range(2):
        try:
            if follow:
                closing = remote.stream("run", request, on_reply=started, on_bytes=log.feed)
            else:
                closing = remote.call("start", request)
                started(closing)
        except ConnectError as error:
            if not log.begun:
                raise
            text = f"{error.what}; the run goes on, trying again"
            ground.reporter.emit(Note(text=text, level="warning"))
            return watch(ground, server, wanted.id, offset=log.offset, on_log=on_log)
        if not log.missing:
            break
        log.missing = False
        images.ensure(ground, server, remote, wanted.image)
    else:
        raise LabError(
            f"{wanted.image} is not on the server after it was made", hint="labctl doctor"
        )
    return keep(ground, server, closing["run"])


def asked(ground: Ground, wanted: RunSpec) -> dict[str, Any]:
    """What the server's program is told of a run, secrets bared."""
    return {"spec": msgspec.to_builtins(wanted), "secrets": _secrets(ground)}


def _secrets(ground: Ground) -> dict[str, str]:
    """The values that lab.yaml's secrets stand for, bared: they travel on standard input only."""
    values = secret_values(ground.paths, ground.lab_id, ground.config, environment())
    return {name: value.reveal() for name, value in values.items()}


class _Log:
    """Counts the bytes of a run's log that have arrived."""

    def __init__(self, on_log: Callable[[bytes], None], offset: int = 0) -> None:
        self.on_log = on_log
        self.offset = offset
        self.begun = False
        self.missing = False

    def feed(self, block: bytes) -> None:
        self.offset += len(block)
        self.on_log(block)


def watch(
    ground: Ground,
    server: Server,
    run_id: str,
    *,
    offset: int = 0,
    tail: int = 0,
    follow: bool = True,
    on_log: Callable[[bytes], None],
    on_cut: Callable[[], None] = lambda: None,
) -> Run:
    """A run's log from `offset` bytes (or `tail` lines before the end), through cut links.

    `on_cut` is called at each cut, and may raise to end the watching.
    """
    log = _Log(on_log, offset)
    pause_s, attempt = 0.5, ""
    while True:
        request = _about(ground, run_id) | {"offset": log.offset, "wait": follow, "tail": tail}
        request["attempt"] = attempt
        server = _as_recorded(ground, server, run_id)

        def placed(reply: dict[str, Any], server: Server = server) -> None:
            nonlocal tail, pause_s, attempt
            log.offset, tail, pause_s = int(reply["offset"]), 0, 0.5
            attempt = keep(ground, server, reply["run"]).container

        try:
            closing = ground.remote(server).stream(
                "follow", request, on_reply=placed, on_bytes=log.feed
            )
        except ConnectError as error:
            if not follow:
                raise
            on_cut()
            look_where_it_is(ground, server)
            text = f"{error.what}; the run goes on, trying again in {pause_s:g} s"
            ground.reporter.emit(Note(text=text, level="warning"))
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, LONGEST_PAUSE_S)
            continue
        return keep(ground, server, closing["run"])


def _as_recorded(ground: Ground, server: Server, run_id: str) -> Server:
    """The server under its newest address, or the one on which the run was recovered since."""
    known = ground.state.server_of_lab(ground.lab_id)
    run = ground.state.run(ground.lab_id, run_id)
    moved = known and run and run.server_id == known.id
    return known if known and (moved or known.id == server.id) else server


def look_where_it_is(ground: Ground, server: Server) -> None:
    """Record the address that its provider tells now, where it is still the server we know."""
    try:
        found = ground.provider.find(server.id)
    except LabError:
        return  # this machine may be offline: asked again at the next cut
    if found is None or found.state != "running" or not found.endpoint.port:
        return
    known, now = server.endpoint, found.endpoint
    same_key = now.host_key in (known.host_key, known.next_host_key)
    if same_key and (now.host, now.port) != (known.host, known.port):
        ground.state.save_server(ground.as_ours(found, server))


def cancel(ground: Ground, server: Server, run_id: str, grace_s: int) -> tuple[Run, bool]:
    """SIGTERM, then SIGKILL after `grace_s` seconds; (the run, whether it had ended before)."""
    remote = ground.remote(server)
    request = _about(ground, run_id) | {"grace_s": grace_s}
    reply = remote.call("cancel", request, timeout_s=grace_s + 60.0)
    return keep(ground, server, reply["run"]), bool(reply["already"])


def refresh(ground: Ground, server: Server, remote: Remote | None = None) -> dict[str, Any]:
    """Ask the server for all runs in one round trip; they are recorded. Returns its whole reply."""
    remote = remote or ground.remote(server)
    reply = remote.call("status", {"lab": ground.config.name, "lab_id": ground.lab_id})
    for found in reply["runs"]:
        keep(ground, server, found)
    return reply


def keep(ground: Ground, server: Server, found: dict[str, Any]) -> Run:
    run = to_run(found, server.id)
    ground.state.save_run(run)
    return run


def to_run(found: dict[str, Any], server_id: str) -> Run:
    """A Run from what the server's program says; a claim not launched yet counts as starting."""
    known = {k: v for k, v in found.items() if k in KNOWN_RUN_FIELDS and v is not None}
    known["state"] = "starting" if found["state"] == "claimed" else found["state"]
    known |= {"server_id": server_id, "seen_at": time.time()}
    return msgspec.convert(known, Run)


def latest(ground: Ground, run_id: str = "") -> Run:
    """The run named, or the lab's latest; NotFoundError where there is none."""
    found = ground.state.run(ground.lab_id, run_id) if run_id else _latest(ground)
    if found is None:
        raise NotFoundError(
            f"there is no run {run_id}" if run_id else f"{ground.config.name} has no run yet",
            hint="labctl status --refresh" if run_id else "labctl run",
        )
    return found


def _latest(ground: Ground) -> Run | None:
    newest = ground.state.latest_run(ground.lab_id)
    if newest is None or not newest.id.startswith(ASIDE):
        return newest
    own = [run for run in ground.state.runs(ground.lab_id) if not run.id.startswith(ASIDE)]
    return own[-1] if own else None


def _about(ground: Ground, run_id: str) -> dict[str, Any]:
    return {"lab": ground.config.name, "lab_id": ground.lab_id, "run": run_id}
