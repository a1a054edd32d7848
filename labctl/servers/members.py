"""Ask every provider behind a market at once; one that fails leaves a reason, not an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Generic, TypeVar

import msgspec

from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.events import Note
from labctl.model import Server, Value
from labctl.parallel import run_parts
from labctl.providers import Marketplace
from labctl.servers.context import LabContext
from labctl.servers.provider_choice import select_provider

T = TypeVar("T")


class Answers(Value, Generic[T], frozen=True):
    """What each provider answered, and why others did not answer, both by the provider's name."""

    by_provider: dict[str, T]
    failures: dict[str, str] = msgspec.field(default_factory=dict)


def ask_members(context: LabContext, action: Callable[[LabContext], T]) -> Answers[T]:
    """Call `action` with the context of each provider behind the context's market.

    A provider that the market leaves out is a failure if this machine has something paid of it on
    record. A provider that is no market answers for itself, and its error is raised.
    """
    if not isinstance(context.provider, Marketplace):
        return Answers(by_provider={context.provider.name: action(context)})
    left_out = context.provider.explain_left_out()
    recorded = _list_recorded_providers(context)
    answers = ask_each(context, list_member_names(context), action)
    unasked = {name: why for name, why in left_out.items() if name in recorded}
    return msgspec.structs.replace(answers, failures={**unasked, **answers.failures})


def list_member_names(context: LabContext) -> list[str]:
    """List the providers behind the context's market that can be asked; none if it is no market."""
    market = context.provider
    return [one.name for one in market.open_members()] if isinstance(market, Marketplace) else []


def ask_each(
    context: LabContext, names: Iterable[str], action: Callable[[LabContext], T]
) -> Answers[T]:
    """Call `action` with the context of each of these providers, side by side."""

    def ask_member(name: str) -> T | Exception:
        try:
            return action(select_provider(context, name))
        except Exception as error:  # also one of a plugin package: the others must answer anyway
            return error

    parts = {name: partial(ask_member, name) for name in names}
    replies = run_parts(parts) if parts else {}
    return Answers(
        by_provider={n: one for n, one in replies.items() if not isinstance(one, Exception)},
        failures={n: _describe(one) for n, one in replies.items() if isinstance(one, Exception)},
    )


def list_servers(context: LabContext) -> list[Server]:
    """List the servers of the context's provider, or of all providers behind its market.

    A provider behind a market that cannot be asked is a warning.
    """
    answers = ask_members(context, lambda member: member.provider.servers())
    for name, why in answers.failures.items():
        text = f"labctl could not check whether the lab has a server at {name}: {why}"
        context.reporter.emit(Note(text=text, level="warning"))
    return [server for servers in answers.by_provider.values() for server in servers]


def _describe(error: Exception) -> str:
    if isinstance(error, LabError):
        return describe_error(error)
    return f"{type(error).__name__}: {error}"


def _list_recorded_providers(context: LabContext) -> set[str]:
    """List the providers of what this machine has on record and may still cost money."""
    servers = {
        server.provider
        for server in context.state.list_servers()
        if server.offer.price_usd_per_hour
    }
    return servers | {attempt.provider for attempt in context.state.list_open_attempts()}
