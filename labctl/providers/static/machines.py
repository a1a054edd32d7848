"""The machines configured in lab.yaml: their addresses, and the lease scripts that run there."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property

import msgspec

from labctl.commands import lease, ssh
from labctl.commands.lease import Holder, MachineLease
from labctl.config import expand_user
from labctl.errors import UnreachableError, UsageError
from labctl.model import Endpoint, Offer, Server, Value
from labctl.providers import ProviderContext

PROVIDER = "static"
SCRIPT_TIMEOUT_S = 30.0
# the section of lab.yaml that `labctl init` writes
SETTINGS_EXAMPLE = """\
static:
  hosts:
    - gpu1.lab.example
    - alice@gpu2.lab.example:2222
"""


class HostEntry(Value, frozen=True):
    """One machine. Missing values come from the section's defaults, then from the ssh_config.

    `alias` is its name in the user's own ssh_config; `host` may be such a name too.
    """

    host: str = ""
    port: int = 0
    user: str = ""
    identity: str = ""
    jump: str = ""
    alias: str = ""


class StaticSettings(Value, frozen=True):
    """`hosts` are "host", "user@host:port" or mappings; the other fields are their defaults."""

    hosts: tuple[str | HostEntry, ...] = ()
    user: str = ""
    port: int = 0
    identity: str = ""
    jump: str = ""


class ConfiguredMachine:
    """One configured host, and the lease scripts that run there. It connects at its first use."""

    def __init__(
        self, name: str, find_endpoint: Callable[[], Endpoint], context: ProviderContext
    ) -> None:
        self.name = name
        self._find_endpoint = find_endpoint
        self._context = context

    @cached_property
    def endpoint(self) -> Endpoint:
        """The address with its pinned host key; the first use may have the user confirm the key."""
        with self._explain_silence():
            return self._context.settle_host_key(self._find_endpoint())

    def settle(self) -> None:
        """Find the address and pin its host key.

        ConnectError if the machine does not answer, UnknownHostKeyError for a jump host before it.
        """
        _ = self.endpoint

    @cached_property
    def slug(self) -> str:
        """The part of a server's id that names the machine."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:40]

    def run_lease_script(self, line: str) -> MachineLease:
        """Run a lease script on the machine and parse its output."""
        transport = self._context.connect(self.endpoint)
        with self._explain_silence():
            return lease.parse(transport.run(line, timeout_s=SCRIPT_TIMEOUT_S).stdout)

    @contextmanager
    def _explain_silence(self) -> Iterator[None]:
        """Say what to check on a machine that does not answer: labctl cannot start it."""
        try:
            yield
        except UnreachableError as error:
            error.hint = lambda subject: (
                f"{subject.up}   # after you checked that {self.name} is on and its sshd runs"
            )
            raise

    def server_id(self, token: str) -> str:
        return f"static-{self.slug}-{token}"

    def make_offer(self, answer: MachineLease) -> Offer:
        gpus = answer.gpus
        return Offer(
            provider=PROVIDER,
            type=self.name,
            gpu_name=gpus[0].name if gpus else "",
            gpu_count=len(gpus),
            gpu_memory_bytes=min((gpu.memory_bytes for gpu in gpus), default=0),
        )

    def make_server(self, answer: MachineLease, holder: Holder) -> Server:
        return Server(
            id=self.server_id(holder.token),
            provider=PROVIDER,
            lab=holder.lab,
            lab_id=holder.lab_id,
            alias=holder.lab,
            endpoint=self.endpoint,
            state="running",
            offer=self.make_offer(answer),
            created_at=holder.created_at,
            deadline_at=time.time() + answer.left_s,
        )


def list_machines(
    settings: StaticSettings, context: ProviderContext
) -> tuple[ConfiguredMachine, ...]:
    """Return every configured host, in order; UsageError without any, or for a duplicate."""
    entries = [_complete_entry(each, settings) for each in settings.hosts]
    if not entries:
        raise UsageError(
            "server.static.hosts in lab.yaml names no machine",
            hint="write your machines in lab.yaml, for example:\n"
            "server: {provider: static, static: {hosts: [alice@gpu1.lab.example]}}",
        )
    hosts = tuple(
        ConfiguredMachine(_display_name(entry), _make_endpoint_finder(entry, context), context)
        for entry in entries
    )
    slugs = [machine.slug for machine in hosts]
    for machine in hosts:
        if slugs.count(machine.slug) > 1:
            raise UsageError(
                f"server.static.hosts names {machine.name} twice",
                hint="labctl config   # server.static.hosts",
            )
    return hosts


def _complete_entry(entry: str | HostEntry, settings: StaticSettings) -> HostEntry:
    """Fill in the section's defaults of one host; UsageError for a bad name."""
    if isinstance(entry, str):
        hops = ssh.parse_hops(entry)
        if len(hops) != 1:
            raise UsageError(
                f"{entry!a} is not a single host", hint="labctl config   # server.static.hosts"
            )
        entry = HostEntry(host=hops[0].host, user=hops[0].user, port=hops[0].port)
    if not (entry.host or entry.alias):
        raise UsageError(
            "an entry of server.static.hosts has neither `host` nor `alias`",
            hint="labctl config   # server.static.hosts",
        )
    ssh.check_host(entry.alias or entry.host)
    return msgspec.structs.replace(
        entry,
        user=entry.user or settings.user,
        port=entry.port or settings.port,
        identity=entry.identity or settings.identity,
        jump=entry.jump or settings.jump,
    )


def _display_name(entry: HostEntry) -> str:
    """Return the machine's name for offers and messages, without the user who logs in."""
    if entry.alias:
        return entry.alias
    return entry.host + (f":{entry.port}" if entry.port not in (0, 22) else "")


def _make_endpoint_finder(entry: HostEntry, context: ProviderContext) -> Callable[[], Endpoint]:
    """Return a function that finds the address: it runs ssh, so it is called only if needed."""

    def find() -> Endpoint:
        name = entry.alias or entry.host
        resolved = Endpoint(host=entry.host, user=entry.user or context.owner)
        if context.resolve_alias is not None:
            resolved = context.resolve_alias(name)
        identity = str(expand_user(entry.identity)) if entry.identity else resolved.identity
        endpoint = msgspec.structs.replace(
            resolved,
            host=entry.host if entry.host and entry.alias else resolved.host,
            user=ssh.check_user(entry.user or resolved.user),
            port=ssh.check_port(entry.port or resolved.port),
            identity=identity,
            jump=entry.jump or resolved.jump,
        )
        # A known host key is valid only for the address that ssh_config resolved.
        same = (endpoint.host, endpoint.port) == (resolved.host, resolved.port)
        return endpoint if same else msgspec.structs.replace(endpoint, host_key="")

    return find
