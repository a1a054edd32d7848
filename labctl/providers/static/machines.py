"""The configured machines: how each is reached, and what is asked of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import msgspec

from labctl.commands import lease, ssh
from labctl.commands.lease import Holder, Lease
from labctl.errors import UsageError
from labctl.model import Endpoint, Offer, Server, Value
from labctl.providers import Surroundings

PROVIDER = "static"
SCRIPT_TIMEOUT_S = 30.0


class HostEntry(Value, frozen=True):
    """One machine. What is left out comes from the section's defaults, then the ssh_config.

    `alias` is its name in the user's own ssh_config; `host` may be one as well.
    """

    host: str = ""
    port: int = 0
    user: str = ""
    identity: str = ""
    jump: str = ""
    alias: str = ""


class StaticSettings(Value, frozen=True):
    """`hosts` are "host", "user@host:port" or mappings; the rest holds for all that say nothing."""

    hosts: tuple[str | HostEntry, ...] = ()
    user: str = ""
    port: int = 0
    identity: str = ""
    jump: str = ""


class Machine:
    """One configured host: its way, and the script that is run there. Connects when asked."""

    def __init__(self, name: str, find_way: Callable[[], Endpoint], around: Surroundings) -> None:
        self.name = name
        self._find_way = find_way
        self._around = around

    @cached_property
    def endpoint(self) -> Endpoint:
        """The way to it, host key pinned; the first use may ask the person to confirm the key."""
        return self._around.settle_host_key(self._find_way())

    def settle(self) -> None:
        """Find the way and have its key pinned; ConnectError where nobody answers there."""
        _ = self.endpoint

    @cached_property
    def slug(self) -> str:
        """The part of a server's id that tells the machine."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]

    def ask(self, line: str) -> Lease:
        """Run a lease's script there."""
        transport = self._around.connect(self.endpoint)
        return lease.parse(transport.run(line, timeout_s=SCRIPT_TIMEOUT_S).stdout)

    def server_id(self, token: str) -> str:
        return f"static-{self.slug}-{token}"

    def offer(self, found: Lease) -> Offer:
        gpus = found.gpus
        return Offer(
            provider=PROVIDER,
            type=self.name,
            gpu_name=gpus[0].name if gpus else "",
            gpu_count=len(gpus),
            gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        )

    def server(self, found: Lease, holder: Holder) -> Server:
        return Server(
            id=self.server_id(holder.token),
            provider=PROVIDER,
            lab=holder.lab,
            lab_id=holder.lab_id,
            alias=holder.lab,
            endpoint=self.endpoint,
            state="running",
            offer=self.offer(found),
            created_at=holder.created_at,
            deadline_at=time.time() + found.left_s,
        )


def machines(settings: StaticSettings, around: Surroundings) -> tuple[Machine, ...]:
    """Every configured host, in its order; UsageError where there is none, or one twice."""
    entries = [_entry(each, settings) for each in settings.hosts]
    if not entries:
        raise UsageError(
            "server.static.hosts in lab.yaml names no machine",
            hint="server: {provider: static, static: {hosts: [alice@gpu1.lab.example]}}",
        )
    made = tuple(Machine(_shown(entry), _way_finder(entry, around), around) for entry in entries)
    slugs = [machine.slug for machine in made]
    for machine in made:
        if slugs.count(machine.slug) > 1:
            raise UsageError(
                f"server.static.hosts names {machine.name} twice",
                hint="labctl config   # server.static.hosts",
            )
    return made


def _entry(given: str | HostEntry, settings: StaticSettings) -> HostEntry:
    """One host with the section's defaults filled in; UsageError for a bad name."""
    if isinstance(given, str):
        hops = ssh.parse_hops(given)
        if len(hops) != 1:
            raise UsageError(
                f"{given!a} is not one host", hint="labctl config   # server.static.hosts"
            )
        given = HostEntry(host=hops[0].host, user=hops[0].user, port=hops[0].port)
    if not (given.host or given.alias):
        raise UsageError(
            "an entry of server.static.hosts has neither `host` nor `alias`",
            hint="labctl config   # server.static.hosts",
        )
    ssh.check_host(given.alias or given.host)
    return msgspec.structs.replace(
        given,
        user=given.user or settings.user,
        port=given.port or settings.port,
        identity=given.identity or settings.identity,
        jump=given.jump or settings.jump,
    )


def _shown(entry: HostEntry) -> str:
    """The machine's name in offers and messages; whoever logs in, it is one machine."""
    if entry.alias:
        return entry.alias
    return entry.host + (f":{entry.port}" if entry.port not in (0, 22) else "")


def _way_finder(entry: HostEntry, around: Surroundings) -> Callable[[], Endpoint]:
    """Finds the way only when it is needed: it runs ssh to read the user's config."""

    def find() -> Endpoint:
        name = entry.alias or entry.host
        known = Endpoint(host=entry.host, user=entry.user or around.owner)
        if around.resolve_alias is not None:
            known = around.resolve_alias(name)
        identity = str(Path(entry.identity).expanduser()) if entry.identity else known.identity
        way = msgspec.structs.replace(
            known,
            host=entry.host if entry.host and entry.alias else known.host,
            user=ssh.check_user(entry.user or known.user),
            port=ssh.check_port(entry.port or known.port),
            identity=identity,
            jump=entry.jump or known.jump,
        )
        same = (way.host, way.port) == (known.host, known.port)
        return way if same else msgspec.structs.replace(way, host_key="")

    return find
