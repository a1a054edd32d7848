"""Existing lab machines, reached by ssh and shared by leases that are stored on the machines.

labctl logs in like the user (their key, agent, ssh_config). Nothing here powers a machine on or
off.
"""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import cached_property
from typing import Any, ClassVar

import msgspec

from labctl.commands import lease, ssh
from labctl.commands.lease import Holder, MachineLease
from labctl.errors import (
    AuthenticationError,
    CapacityError,
    ConnectError,
    LabError,
    NoOfferError,
    PolicyError,
    ProviderError,
    UnknownHostKeyError,
)
from labctl.errors.subject import Subject
from labctl.model import (
    Check,
    CreateServerRequest,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import ProviderContext
from labctl.providers.static.machines import (
    PROVIDER,
    SETTINGS_EXAMPLE,
    ConfiguredMachine,
    HostEntry,
    StaticSettings,
    list_machines,
)
from labctl.text import add_next, count_text, names_text

__all__ = ["HostEntry", "StaticProvider", "StaticSettings"]

DEFAULT_SPAN_S = 24 * 3600
MOST_AT_ONCE = 8

# A machine with its lease, or with the reason why it did not answer.
LeaseAnswer = tuple[ConfiguredMachine, MachineLease | LabError]


class StaticProvider:
    """Claims and releases configured machines. A server's id contains machine and claim."""

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = StaticSettings
    logs_in_as_user: ClassVar[bool] = True
    settings_example: ClassVar[str] = SETTINGS_EXAMPLE
    settle_s: float = 0.0

    def __init__(self, settings: StaticSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.context = context

    @cached_property
    def machines(self) -> tuple[ConfiguredMachine, ...]:
        return list_machines(self.settings, self.context)

    def list_machine_names(self) -> tuple[str, ...]:
        return tuple(machine.name for machine in self.machines)

    def select_machine(self, name: str) -> StaticProvider:
        selected = StaticProvider(self.settings, self.context)
        selected.machines = tuple(each for each in self.machines if each.name == name)
        return selected

    def open_machine(self, name: str) -> Any:
        (machine,) = (each for each in self.machines if each.name == name)
        machine.settle()
        return self.context.connect(machine.endpoint)

    def get_account(self) -> ProviderAccount:
        """Return no account: machines are free, and a claim is identified by its token."""
        return ProviderAccount()

    def check_settings(self) -> None:
        """UsageError if no machine is configured, or one is not valid."""
        _ = self.machines

    def check(self, need: Need | None = None) -> list[Check]:
        subject = self.context.subject
        return [_check(machine, answer, subject) for machine, answer in self._query_machines()]

    def offers(self, need: Need) -> list[Offer]:
        """List the free machines that satisfy the need, in their configured order.

        CapacityError, naming each holder, if all that satisfy it are in use; ConnectError if no
        machine can be reached.
        """
        answers = self._query_machines()
        fitting = [
            (machine, answer)
            for machine, answer in answers
            if isinstance(answer, MachineLease) and _is_suitable(machine.make_offer(answer), need)
        ]
        free = [machine.make_offer(answer) for machine, answer in fitting if answer.state == "free"]
        if not free and not fitting:
            _raise_if_all_failed(answers)
        failed = [machine.name for machine, answer in answers if isinstance(answer, LabError)]
        if failed:
            number = f"{count_text(len(failed), 'machine')} cannot be used now"
            text = f"{number}: {names_text(failed, 5)}"
            self.context.note(add_next(text, f"{self.context.subject.check}   # says why"))
        if not free and fitting:
            raise _make_busy_error(fitting)
        return free

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Claim the offered machine or, if it was claimed meanwhile, the next that satisfies.

        The same token returns the same machine. CapacityError names the holders if all are in
        use.
        """
        answers = self._query_machines(request.token)
        for machine, answer in answers:
            if isinstance(answer, MachineLease) and answer.state == "mine" and answer.holder:
                return machine.make_server(answer, answer.holder)
        _raise_if_all_failed(answers)
        fitting = [
            (machine, answer)
            for machine, answer in answers
            if isinstance(answer, MachineLease)
            and _is_suitable(machine.make_offer(answer), request.need)
        ]
        fitting.sort(key=lambda each: each[0].name != offer.type)
        refusals = []
        for machine, answer in fitting:
            claimed = self._claim(machine, request)
            if claimed.state == "mine" and claimed.holder:
                with_gpus = msgspec.structs.replace(claimed, gpus=answer.gpus)
                return machine.make_server(with_gpus, claimed.holder)
            refusals.append((machine, claimed))
        raise _make_busy_error(refusals)

    def _claim(self, machine: ConfiguredMachine, request: CreateServerRequest) -> MachineLease:
        holder = Holder(
            token=ssh.check_id(request.token),
            lab=request.lab,
            lab_id=request.lab_id,
            owner=self.context.owner,
            created_at=time.time(),
        )
        return machine.run_lease_script(lease.claim(holder, request.need.ttl_s or DEFAULT_SPAN_S))

    def find(self, server_id: str) -> Server | None:
        """Find the machine of a claim; None if nobody, or another claim, holds it."""
        for machine, token in self._find_candidates(server_id):
            answer = machine.run_lease_script(lease.show(token))
            if answer.state == "mine" and answer.holder:
                return machine.make_server(answer, answer.holder)
        return None

    def servers(self) -> list[Server]:
        """List every machine that this owner holds. ConnectError if no machine can be reached."""
        answers = self._query_machines()
        _raise_if_all_failed(answers)
        return [
            machine.make_server(answer, answer.holder)
            for machine, answer in answers
            if isinstance(answer, MachineLease)
            and answer.holder
            and answer.holder.owner == self.context.owner
        ]

    def terminate(self, server_id: str) -> None:
        """Release the machine. It stays powered on, and its files stay."""
        for machine, token in self._find_candidates(server_id):
            machine.run_lease_script(lease.release(token))

    def extend(self, server_id: str, span_s: int) -> Server | None:
        """Have the lease end `span_s` seconds from now; None if it has ended already."""
        for machine, token in self._find_candidates(server_id):
            machine.run_lease_script(lease.renew(token, span_s))
        return self.find(server_id)

    def leftovers(self) -> list[Resource]:
        return []

    def remove(self, resource: Resource) -> None:
        """Do nothing: nothing that costs money is ever left."""

    def _find_candidates(self, server_id: str) -> list[tuple[ConfiguredMachine, str]]:
        """Find the machines that an id can mean, with the claim's token."""
        return [
            (machine, token)
            for machine in self.machines
            if (token := server_id.removeprefix(machine.server_id(""))) != server_id
        ]

    def _query_machines(self, token: str = "") -> list[LeaseAnswer]:
        """Query the leases of all machines in parallel; an error if a machine does not answer."""
        # One after another, since each may ask the user to confirm a host key.
        errors = {machine.name: _settle(machine) for machine in self.machines}

        def query(machine: ConfiguredMachine) -> LeaseAnswer:
            return machine, errors[machine.name] or _query_lease(machine, token)

        with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
            return list(pool.map(query, self.machines))


def _settle(machine: ConfiguredMachine) -> LabError | None:
    """Find the machine's address and host key; return the error if it cannot be reached."""
    try:
        machine.settle()
    except (ConnectError, UnknownHostKeyError) as error:
        return error
    return None


def _query_lease(machine: ConfiguredMachine, token: str) -> MachineLease | LabError:
    try:
        return machine.run_lease_script(lease.show(token))
    except UnknownHostKeyError as error:
        return error  # of a jump host; the machines before it can be used
    except PolicyError:
        raise  # a wrong host key stops everything
    except LabError as error:
        return error


def _raise_if_all_failed(answers: list[LeaseAnswer]) -> None:
    failures = [answer for _, answer in answers if isinstance(answer, LabError)]
    if len(failures) == len(answers):
        # The user can set up a key, but not repair the network.
        refused = [error for error in failures if isinstance(error, AuthenticationError)]
        raise (refused or failures)[0]


def _is_suitable(offer: Offer, need: Need) -> bool:
    gpu = need.gpu
    if not gpu.is_required:
        return True
    named = gpu.kind == "any" or _words(gpu.kind) <= _words(offer.gpu_name)
    enough = offer.gpu_count >= max(1, gpu.count)
    return named and enough and offer.gpu_memory_bytes >= gpu.min_memory_bytes


def _words(name: str) -> set[str]:
    """Split a GPU's name into words: "NVIDIA A100-SXM4-40GB" contains "A100"."""
    return set(re.split(r"[\s_-]+", name.lower()))


def _describe_holder(answer: MachineLease) -> str:
    if answer.state == "broken":
        return f"it cannot store a lease: {answer.error}"
    if answer.holder is None:
        return "another user is claiming it at this moment"
    until = datetime.fromtimestamp(time.time() + answer.left_s, UTC)
    holder = answer.holder
    return f"held by {holder.owner} for {holder.lab} until {until:%Y-%m-%d %H:%M} UTC"


def _make_busy_error(leases: list[tuple[ConfiguredMachine, MachineLease]]) -> LabError:
    if not leases:
        return NoOfferError("no configured machine satisfies the need", hint="labctl config")
    why = "; ".join(f"{machine.name}: {_describe_holder(answer)}" for machine, answer in leases)
    if all(answer.state == "broken" for _, answer in leases):
        return ProviderError(
            "no configured machine can store a lease",
            why=why,
            hint=f"ask an administrator for a local {lease.DIRECTORY} that all users "
            f"may write to:\nsudo mkdir -m 1777 {lease.DIRECTORY}",
        )
    return CapacityError(
        "all machines that fit are in use" if len(leases) > 1 else "the machine is in use",
        why=why,
        hint="add a machine to server.static.hosts, or ask its holder to type:\nlabctl down",
    )


def _check(machine: ConfiguredMachine, answer: MachineLease | LabError, subject: Subject) -> Check:
    if isinstance(answer, LabError):
        answer.subject = subject._replace(is_checked=True)
        detail = f"{answer.what}: {answer.why}"
        return Check(name=machine.name, ok=False, detail=detail, next=answer.hint)
    if answer.state == "free":
        return Check(name=machine.name, ok=True, detail="free")
    return Check(name=machine.name, ok=answer.state != "broken", detail=_describe_holder(answer))
