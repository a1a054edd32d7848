"""The provider of a lab's server: chosen by `up --provider`, by `auto`, or from `fallback`.

Later commands use the provider on record, and a recovery chooses by the same rule as `up` did.
"""

from __future__ import annotations

from contextlib import suppress

import msgspec

from labctl.config import LabConfig
from labctl.decoding import convert_value
from labctl.errors import UsageError
from labctl.model import Value
from labctl.providers import Marketplace, get_provider_class
from labctl.servers.context import LabContext
from labctl.servers.provider_traits import read_provider_traits
from labctl.state import State

EVENT = "provider chosen"
FLAG = "--provider"
# Kind of the ledger entry of a run that another server may resume.
RECOVERABLE = "recoverable"
# Runs that ended by themselves or were canceled: no server resumes them.
ENDED_STATES = ("exited", "cancelled")


class ProviderChoice(Value, frozen=True):
    """The provider that a lab uses, and those that a new server may come from, in their order."""

    provider: str
    candidates: tuple[str, ...] = ()


def list_candidates(config: LabConfig) -> tuple[str, ...]:
    """List the providers that a new server of the lab may come from, in their order."""
    return config.server.candidates or (config.server.provider,)


def is_market(provider: str) -> bool:
    """Whether the servers of the provider with this name come from other providers."""
    with suppress(UsageError):  # the provider is not installed
        return issubclass(get_provider_class(provider), Marketplace)
    return False


def note_choice(context: LabContext) -> None:
    """Record a provider that lab.yaml does not name alone, before a server can exist there.

    The server of a move is not the lab's own one yet: `record_choice` follows when it is.
    """
    if context.moving:
        return
    choice = ProviderChoice(
        provider=context.provider.name, candidates=list_candidates(context.config)
    )
    is_chosen = context.config.origins.get("server.provider") == FLAG
    is_chosen = is_chosen or choice.candidates != (context.config.server.provider,)
    if is_chosen and _read_last_choice(context.state, context.lab_id) != choice:
        record_choice(context)


def record_choice(context: LabContext) -> None:
    """Record the provider of this context as the lab's own."""
    choice = ProviderChoice(
        provider=context.provider.name, candidates=list_candidates(context.config)
    )
    detail = msgspec.to_builtins(choice)
    context.state.record(EVENT, lab_id=context.lab_id, detail=detail)


def find_choice(state: State, lab_id: str, config: LabConfig) -> ProviderChoice | None:
    """Return the provider of a lab that has, or may have, a server elsewhere than `config` says.

    It also stays chosen while the lab's latest run may be recovered on another server. None if
    `config` selects that provider, or if a flag or a variable selects another one.
    """
    choice = _read_last_choice(state, lab_id)
    selected = config.server.provider
    is_selected = config.origins.get("server.provider", "").startswith(("--", "LABCTL_"))
    if is_market(selected):
        places = _list_places(state, lab_id)
        return ProviderChoice(provider=places[0], candidates=(selected,)) if places else None
    if choice is None or is_selected:
        return None
    places = _list_places(state, lab_id)
    if places:
        return choice if choice.provider in places and choice.provider != selected else None
    first = choice.candidates[0] if choice.candidates else choice.provider
    if first == selected or not _can_recover_latest_run(state, lab_id):
        return None
    return msgspec.structs.replace(choice, provider=first)


def apply_choice(config: LabConfig, choice: ProviderChoice) -> LabConfig:
    """Return the configuration, loaded with the chosen provider, with the choice's candidates."""
    candidates = () if choice.candidates == (choice.provider,) else choice.candidates
    server = msgspec.structs.replace(config.server, candidates=candidates)
    return msgspec.structs.replace(config, server=server)


def restore_candidates(context: LabContext, config: LabConfig) -> LabConfig:
    """Return the configuration with the candidates of the lab's last choice, for a recovery."""
    choice = _read_last_choice(context.state, context.lab_id)
    if choice is None or choice.provider != config.server.provider or config.server.candidates:
        return config
    return apply_choice(config, choice)


def select_provider(context: LabContext, name: str) -> LabContext:
    """Return the context of the same lab with the provider `name`."""
    if name == context.provider.name:
        return context
    if name not in context.by_provider:
        context.by_provider[name] = _make_selected(context, name)
    return context.by_provider[name]


def select_alone(context: LabContext, name: str) -> LabContext:
    """Return the context with the provider `name` as the only candidate, as an option has it."""
    selected = select_provider(context, name)
    server = msgspec.structs.replace(selected.config.server, candidates=())
    return msgspec.structs.replace(
        selected,
        config=msgspec.structs.replace(selected.config, server=server),
        shared_provider=selected.provider,
    )


def _make_selected(context: LabContext, name: str) -> LabContext:
    traits = read_provider_traits(name)
    server = msgspec.structs.replace(
        context.config.server,
        provider=name,
        candidates=list_candidates(context.config),
        on_this_machine=traits.on_this_machine,
        is_market=traits.is_market,
    )
    return msgspec.structs.replace(
        context,
        config=msgspec.structs.replace(context.config, server=server),
        shared_provider=None,
        shared_connections=context.connections,
    )


def use_recorded_provider(context: LabContext, *, by_rule: bool = False) -> LabContext:
    """Return the context with the provider of the lab's recorded server.

    Another process may have created that server at another provider meanwhile, or moved the lab. A
    provider that the lab was not allowed to use stays an error of `adopt`; with `by_rule`, also one
    that is not among the context's own candidates, since the user may have typed another one.
    """
    server = context.state.get_lab_server(context.lab_id, context.moving)
    if server is None or server.provider == context.provider.name:
        return context
    choice = _read_last_choice(context.state, context.lab_id)
    is_chosen = choice is not None and choice.provider == server.provider
    if choice is not None and by_rule:
        is_chosen = is_chosen and choice.candidates == list_candidates(context.config)
    is_chosen = is_chosen or bool(context.moving)
    if not is_chosen and not isinstance(context.provider, Marketplace):
        return context
    return select_provider(context, server.provider)


def _list_places(state: State, lab_id: str) -> list[str]:
    """List the providers at which the lab has a server, or may have one: the recorded one first."""
    server = state.get_lab_server(lab_id)
    if server is not None:
        return [server.provider]
    return [
        attempt.provider
        for attempt in state.list_open_attempts(lab_id)
        if not attempt.request.moving
    ]


def _can_recover_latest_run(state: State, lab_id: str) -> bool:
    run = state.get_latest_run(lab_id)
    if run is None or run.state in ENDED_STATES:
        return False
    return bool(state.list_events(lab_id=lab_id, run_id=run.id, kind=RECOVERABLE, limit=1))


def _read_last_choice(state: State, lab_id: str) -> ProviderChoice | None:
    """Read the last choice; one of an earlier labctl has no candidates."""
    for line in state.list_events(lab_id=lab_id, kind=EVENT, limit=1):
        return convert_value(line.detail, ProviderChoice)
    return None
