"""The configuration of a lab whose lab.yaml has mistakes, completed from the record.

Commands that end, list or inspect what a lab has use it: a mistake in the file must not keep a
server running that costs money.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from labctl.config import LabConfig, clean_name
from labctl.errors import ConfigError, Problem
from labctl.model import Value
from labctl.state import State


class RecordedPlace(Value, frozen=True):
    """Where the lab has, or may have, a server: as recorded when that was requested."""

    provider: str
    lab: str
    account: str


def load_recorded(
    load: Callable[..., LabConfig],
    error: ConfigError,
    overrides: Mapping[str, str],
    state: State,
    lab_id: str,
    *,
    needs_provider: bool,
) -> LabConfig:
    """Load what can be read of the files, with the provider and the name of the recorded server.

    Raises `error`, the one of the whole files, if the provider or what it needs cannot be known.
    """
    place = _find_place(state, lab_id)
    known = dict(overrides)
    if place is not None:
        known = {"provider": place.provider, "name": place.lab, **known}
    elif any(problem.path in ("", "lab") for problem in error.problems):
        root = load(overrides=known, skips_faults=True).root
        known["name"] = clean_name(root.name)
    config = load(overrides=known, skips_faults=True)
    if needs_provider and not _knows_provider(config, error, place, overrides):
        raise error
    return config


def describe_faults(error: ConfigError) -> str:
    """Describe the mistakes of the files in one line, for a command that continues."""
    if not error.problems:
        return f"{error.what}; using what labctl has on record"
    first = error.problems[0]
    line = f" line {first.line}" if first.line else ""
    text = f"lab.yaml{line}: {first.path}{': ' if first.path else ''}{first.message}"
    others = len(error.problems) - 1
    more = f" (and {others} more: labctl config)" if others else ""
    return f"{text}{more}; using what labctl has on record"


def _find_place(state: State, lab_id: str) -> RecordedPlace | None:
    server = state.get_lab_server(lab_id)
    if server is not None:
        return RecordedPlace(provider=server.provider, lab=server.lab, account=server.account)
    for attempt in state.list_open_attempts(lab_id):
        lab = attempt.request.lab
        return RecordedPlace(provider=attempt.provider, lab=lab, account=attempt.account)
    return None


def _knows_provider(
    config: LabConfig, error: ConfigError, place: RecordedPlace | None, overrides: Mapping[str, str]
) -> bool:
    """Whether the provider is known, and cannot take a server of other settings for an ended one.

    A recorded account protects against that: with other credentials the provider refuses.
    """
    provider = config.server.provider
    needed = [f"server.{provider}"]
    if place is None:
        if "provider" in overrides:
            return True
        needed.append("server.provider")
    elif place.account or config.server.on_this_machine:
        return True
    problems = error.problems or (Problem("", 0, error.what),)  # nothing of the file can be read
    return not any(_concerns(problem, path) for problem in problems for path in needed)


def _concerns(problem: Problem, path: str) -> bool:
    """Whether a problem is at a dotted path, below it, or at something that contains it."""
    at = problem.path
    return not at or at == path or path.startswith(f"{at}.") or at.startswith(f"{path}.")
