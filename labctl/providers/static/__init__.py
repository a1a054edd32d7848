"""Existing lab servers, reached by ssh and shared by leases that lie on the machines themselves.

labctl logs in as the person does (their key, agent, ssh_config) and installs no key. Nothing here
powers a machine on or off.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from typing import ClassVar

import msgspec

from labctl.commands import lease, ssh
from labctl.commands.lease import Holder, Lease
from labctl.errors import ConnectError, LabError, PolicyError, ProviderError
from labctl.model import Check, CreateRequest, Need, Offer, ProviderAccount, Resource, Server, Value
from labctl.providers import Surroundings
from labctl.providers.static.machines import PROVIDER, HostEntry, Machine, StaticSettings, machines

__all__ = ["HostEntry", "StaticProvider", "StaticSettings"]

DEFAULT_SPAN_S = 24 * 3600
MOST_AT_ONCE = 8


Look = tuple[Machine, Lease | LabError]


class StaticProvider:
    """Claims and releases configured machines. A server's id names the machine and the claim."""

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = StaticSettings
    settle_s: float = 0.0

    def __init__(self, settings: StaticSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.surroundings = surroundings

    @cached_property
    def machines(self) -> tuple[Machine, ...]:
        return machines(self.settings, self.surroundings)

    def get_account(self) -> ProviderAccount:
        """A claim is known by its token, and nobody pays for the machine."""
        return ProviderAccount()

    def check(self, need: Need | None = None) -> list[Check]:
        return [_check(machine, found) for machine, found in self._look()]

    def offers(self, need: Need) -> list[Offer]:
        """The free machines that satisfy the need, in their configured order.

        PolicyError, naming each holder, where all that satisfy it are held; ConnectError where
        no machine can be reached.
        """
        looks = self._look()
        found = [(m, a) for m, a in looks if isinstance(a, Lease) and _satisfies(m.offer(a), need)]
        free = [machine.offer(answer) for machine, answer in found if answer.state == "free"]
        if not free and found:
            raise _all_busy(found)
        if not free:
            _raise_if_all_failed(looks)
        return free

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """Claim the offered machine or, where it was taken meanwhile, the next that satisfies.

        The same token gives the same machine. PolicyError names who holds them all.
        """
        looks = self._look(request.token)
        for machine, answer in looks:
            if isinstance(answer, Lease) and answer.state == "mine" and answer.holder:
                return machine.server(answer, answer.holder)
        _raise_if_all_failed(looks)
        fitting = [
            (machine, answer)
            for machine, answer in looks
            if isinstance(answer, Lease) and _satisfies(machine.offer(answer), request.need)
        ]
        fitting.sort(key=lambda each: each[0].name != offer.type)
        refusals = []
        for machine, seen in fitting:
            claimed = self._claim(machine, request)
            if claimed.state == "mine" and claimed.holder:
                whole = msgspec.structs.replace(claimed, gpus=seen.gpus)
                return machine.server(whole, claimed.holder)
            refusals.append((machine, claimed))
        raise _all_busy(refusals)

    def _claim(self, machine: Machine, request: CreateRequest) -> Lease:
        holder = Holder(
            token=ssh.check_id(request.token),
            lab=request.lab,
            lab_id=request.lab_id,
            owner=self.surroundings.owner,
            created_at=time.time(),
        )
        return machine.ask(lease.claim(holder, request.need.ttl_s or DEFAULT_SPAN_S))

    def find(self, server_id: str) -> Server | None:
        """None where nobody, or another claim than this, holds the machine."""
        for machine, token in self._candidates(server_id):
            found = machine.ask(lease.show(token))
            if found.state == "mine" and found.holder:
                return machine.server(found, found.holder)
        return None

    def servers(self) -> list[Server]:
        """Every machine that this owner holds. ConnectError where none can be reached."""
        looks = self._look()
        _raise_if_all_failed(looks)
        return [
            machine.server(answer, answer.holder)
            for machine, answer in looks
            if isinstance(answer, Lease)
            and answer.holder
            and answer.holder.owner == self.surroundings.owner
        ]

    def terminate(self, server_id: str) -> None:
        """Give the machine back. It stays powered on, and what lies on it stays."""
        for machine, token in self._candidates(server_id):
            machine.ask(lease.release(token))

    def extend(self, server_id: str, span_s: int) -> Server | None:
        """Have the lease end `span_s` seconds from now; None where it is not held any more."""
        for machine, token in self._candidates(server_id):
            machine.ask(lease.renew(token, span_s))
        return self.find(server_id)

    def leftovers(self) -> list[Resource]:
        return []

    def remove(self, resource: Resource) -> None:
        """Nothing that costs money is ever left here."""

    def _candidates(self, server_id: str) -> list[tuple[Machine, str]]:
        """The machines that an id can mean, with the claim's token."""
        return [
            (machine, token)
            for machine in self.machines
            if (token := server_id.removeprefix(machine.server_id(""))) != server_id
        ]

    def _look(self, token: str = "") -> list[Look]:
        """Every machine with its lease, or with why it did not answer; all at once."""
        # One after another, since each may ask the person to confirm a key.
        lost = {machine.name: _unreachable(machine) for machine in self.machines}

        def look(machine: Machine) -> Look:
            return machine, lost[machine.name] or _answer(machine, token)

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(look, self.machines))


def _unreachable(machine: Machine) -> ConnectError | None:
    """Why the way to the machine and its key are not known, if they are not."""
    try:
        machine.settle()
    except ConnectError as error:
        return error
    return None


def _answer(machine: Machine, token: str) -> Lease | LabError:
    try:
        return machine.ask(lease.show(token))
    except PolicyError:
        raise  # a wrong host key stops everything
    except LabError as error:
        return error


def _raise_if_all_failed(looks: list[Look]) -> None:
    failures = [answer for _, answer in looks if isinstance(answer, LabError)]
    if len(failures) == len(looks):
        raise failures[0]


def _satisfies(offer: Offer, need: Need) -> bool:
    gpu = need.gpu
    if not gpu.required:
        return True
    named = gpu.kind == "any" or _words(gpu.kind) <= _words(offer.gpu_name)
    enough = offer.gpu_count >= max(1, gpu.count)
    return named and enough and offer.gpu_memory_bytes >= gpu.min_memory_bytes


def _words(name: str) -> set[str]:
    """What a GPU's name consists of: "NVIDIA A100-SXM4-40GB" is an "A100"."""
    return set(re.split(r"[\s_-]+", name.lower()))


def _held_by(found: Lease) -> str:
    if found.state == "broken":
        return f"it can keep no lease: {found.error}"
    if found.holder is None:
        return "somebody is claiming it at this moment"
    until = datetime.fromtimestamp(time.time() + found.left_s, UTC)
    return f"held by {found.holder.owner} for {found.holder.lab} until {until:%Y-%m-%d %H:%M} UTC"


def _all_busy(found: list[tuple[Machine, Lease]]) -> LabError:
    if not found:
        return ProviderError("no configured machine satisfies the need", hint="labctl config")
    told = "; ".join(f"{machine.name}: {_held_by(answer)}" for machine, answer in found)
    if all(answer.state == "broken" for _, answer in found):
        return ProviderError(
            "no configured machine can keep a lease",
            why=told,
            hint=f"ask an administrator for a local {lease.DIRECTORY} that all may write to: "
            f"sudo mkdir -m 1777 {lease.DIRECTORY}",
        )
    return PolicyError(
        "every machine that would do is taken" if len(found) > 1 else "the machine is taken",
        why=told,
        hint="ask who holds it to run `labctl down`, or name another in server.static.hosts",
    )


def _check(machine: Machine, found: Lease | LabError) -> Check:
    if isinstance(found, LabError):
        return Check(
            name=machine.name, ok=False, detail=f"{found.what}: {found.why}", next=found.hint
        )
    if found.state == "free":
        return Check(name=machine.name, ok=True, detail="free")
    return Check(name=machine.name, ok=found.state != "broken", detail=_held_by(found))
