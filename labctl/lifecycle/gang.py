"""Act on all servers of a lab side by side, with events that say which server they are about."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import msgspec

from labctl.events import (
    AskPassword,
    Event,
    Note,
    Part,
    Progress,
    Question,
    RepeatedNote,
    Reporter,
    Step,
    find_password_prompt,
)
from labctl.model import Server
from labctl.parallel import run_parts
from labctl.servers import gang
from labctl.servers.context import LabContext
from labctl.servers.gang import has_several_servers as has_several_servers
from labctl.servers.gang import list_surplus as list_surplus
from labctl.servers.gang import select_run_server as select_run_server
from labctl.servers.gang import select_server as select_server

T = TypeVar("T")


class MemberReporter:
    """A Reporter that puts a server's name before what happens there."""

    def __init__(self, reporter: Reporter, name: str) -> None:
        self._reporter = reporter
        self._name = name

    def emit(self, event: Event) -> None:
        if isinstance(event, RepeatedNote):
            event = msgspec.structs.replace(event, name=f"{self._name}: {event.name}")
        if isinstance(event, Note):
            event = msgspec.structs.replace(event, text=f"{self._name}: {event.text}")
        elif isinstance(event, Step | Progress):
            event = msgspec.structs.replace(event, name=f"{self._name}: {event.name}")
        elif isinstance(event, Part):
            return  # the parts of several servers overlap: their times would not add up
        self._reporter.emit(event)

    def confirm(self, decision: Question) -> bool:
        question = f"{self._name}: {decision.question}"
        return self._reporter.confirm(msgspec.structs.replace(decision, question=question))

    def find_password_prompt(self) -> AskPassword | None:
        return find_password_prompt(self._reporter)


def build_members(context: LabContext, count: int = 0) -> list[LabContext]:
    """Build a context for each server that lab.yaml asks for; the events of each bear its name.

    With `count`, for the servers of a run that was started when lab.yaml asked for that many.
    """
    ranks = range(count or context.config.server.count)
    return [_label(context, gang.build_member(context, rank)) for rank in ranks]


def list_every_member(
    context: LabContext, listed: Sequence[Server] | None = None
) -> list[LabContext]:
    """Also build those beyond the number in lab.yaml, on record or `listed` by the provider."""
    surplus = [_label(context, member) for member in gang.list_surplus(context, listed or ())]
    return [*build_members(context), *surplus]


def _label(context: LabContext, member: LabContext) -> LabContext:
    reporter = MemberReporter(context.reporter, member.config.name)
    return msgspec.structs.replace(
        member,
        reporter=reporter,
        shared_provider=context.provider,
        shared_connections=context.connections,
    )


def call_for_each(members: Sequence[LabContext], action: Callable[[LabContext], T]) -> list[T]:
    """Call `action` for every server side by side; the first error ends the others' waits."""
    parts = {member.lab_id: partial(action, member) for member in members}
    results = run_parts(parts)
    return [results[member.lab_id] for member in members]
