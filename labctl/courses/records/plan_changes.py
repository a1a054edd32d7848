"""course.yaml beside what was last planned, and what about it wants a second look. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from labctl.config import CourseConfig
from labctl.config.document import parse
from labctl.config.layers import leaves
from labctl.config.reader import raw
from labctl.config.scalars import duration_text
from labctl.courses.records import term
from labctl.model import Value


class Planned(Value, frozen=True):
    """What was shown last: every key of course.yaml as text, and the seats that there were."""

    version: int = 1
    at: float = 0.0
    by: str = ""
    keys: dict[str, str] = msgspec.field(default_factory=dict)
    seats: tuple[str, ...] = ()


class KeyChange(Value, frozen=True):
    """One dotted key; "" where it does not stand."""

    key: str
    before: str
    after: str


def keys_of(data: bytes) -> dict[str, str]:
    """Every key of a course.yaml that has a value, as text."""
    node = parse(data, "", [])
    if node is None:
        return {}
    found = {}
    for key, leaf in leaves(node):
        value = raw(leaf)
        found[key] = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return found


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[KeyChange]:
    """In the order of the file as it is now; what is gone comes last."""
    return [
        KeyChange(key=key, before=before.get(key, ""), after=after.get(key, ""))
        for key in dict.fromkeys([*after, *before])
        if before.get(key, "") != after.get(key, "")
    ]


def cautions(config: CourseConfig, now: float) -> list[str]:
    """What is allowed, and perhaps not meant."""
    found = []
    most = config.per_student
    if most.budget is None:
        found.append("no per_student.budget: nothing ends a server at a number of dollars")
    if config.hours and config.keeper is None:
        found.append("class hours without a keeper: they count while `labctl course serve` runs")
    if config.hours and config.term is None:
        found.append("class hours without a term: they never stop, and no forecast can be made")
    if not config.store:
        found.append("no store: results and the ledger lie on this machine and the servers alone")
    if config.lab.server.need.idle_s is None:
        found.append("no server.idle: a server with nothing to do goes on until its ttl")
    if config.shared and config.lab.server.provider == "local":
        found.append("shared servers of provider local are containers here: to try it only")
    if config.grading and config.grading.lab.server.provider == "local":
        found.append("grading.server is local: strangers' code is not run there, name another")
    return [*found, *_about_assignments(config, now)]


def _about_assignments(config: CourseConfig, now: float) -> Iterable[str]:
    zone = config.hours[0].zone if config.hours else "UTC"
    for name, one in config.assignments.items():
        if one.due is None:
            yield f"{name} has no due time: it can be handed in for ever"
            continue
        if one.due.at < now:
            yield f"{name} was due on {one.due}"
        if config.term and not (
            term.begins_at(config.term, zone) <= one.due.at <= term.ends_at(config.term, zone)
        ):
            yield f"{name} is due outside of the term"
        if one.grade and not config.grading:
            yield f"{name} has a grading command, and there is no `grading:` server to run it on"


def limits_text(config: CourseConfig) -> str:
    """What ends a server, in words."""
    most, idle_s = config.per_student, config.lab.server.need.idle_s
    said = [f"after {duration_text(most.ttl)} (with `extend` {duration_text(most.max_ttl)})"]
    said += [f"after {duration_text(idle_s)} without work"] if idle_s else []
    said += [f"at {most.budget:.2f} USD"] if most.budget is not None else []
    return ", ".join(said)
