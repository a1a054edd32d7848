"""An assignment's file, and its rules for a submission at a given time.

Times are Unix seconds. The file is YAML, read like lab.yaml: all problems at once, with lines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import tzinfo
from pathlib import Path
from typing import Annotated, Protocol

import msgspec

from labctl.config.document import escape, parse, quote, read_bytes
from labctl.config.locations import parse_bucket
from labctl.config.reader import Parsed, make_problem, read
from labctl.config.scalars import format_size, parse_name, parse_size
from labctl.config.times import (
    ANY_S,
    DEFAULT_MAX_BYTES,
    Moment,
    late_text,
    load_zone,
    local_time_text,
    parse_late,
    parse_moment,
    parse_part,
    parse_penalty,
    parse_zone_name,
)
from labctl.errors import ConfigError, Problem
from labctl.model import Value

DAY_S = 86_400
SSH_PLACE = re.compile(
    r"ssh://(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]*)@(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def parse_public(text: str) -> str:
    """Check a receiver's public key: `ed25519:` and 44 characters of base64."""
    if not re.fullmatch(r"ed25519:[A-Za-z0-9+/]{43}=", text):
        raise ValueError(f"{quote(text)} is not a receiver's public key: ed25519:...")
    return text


def parse_host_key(text: str) -> str:
    """Check a host key: its type and base64."""
    if not re.fullmatch(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", text):
        raise ValueError(f"{quote(text)} is not a host key: `ssh-keyscan -t ed25519 HOST` shows it")
    return text


def parse_place(text: str) -> str:
    """Check the destination of bundles: `ssh://user@host[:port]`, or `s3://bucket/folder`."""
    if text.startswith("s3://"):
        return parse_bucket(text)
    match = SSH_PLACE.fullmatch(text)
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise ValueError(
            f"{quote(text)} is not a destination: ssh://user@host:22 or s3://bucket/folder. "
            "Students also use ssh where they share a machine or file system with the receiver: "
            "it tells who submits"
        )
    return text


def parse_address(text: str) -> str:
    """Check an address: `https://...`, or http:// on this machine."""
    if not re.fullmatch(r"https://[^\s/@]+/\S*|http://(127\.0\.0\.1|localhost):\d+/\S*", text):
        raise ValueError(f"{quote(text)} is not an https:// address")
    return text


Name = Annotated[str, Parsed(parse_name)]
Address = Annotated[str, Parsed(parse_address)]


class Ticket(Value, frozen=True):
    """Permission to post into a bucket until `expires`: form fields for the index and each part.

    Every part of a bundle has `part_bytes` bytes, the last one perhaps fewer. `receipts` is the URL
    of the receiver's answers.
    """

    url: Address
    expires: Annotated[Moment, Parsed(parse_moment)]
    part_bytes: Annotated[int, Parsed(parse_size)]
    index: dict[str, str]
    parts: tuple[dict[str, str], ...]
    receipts: Address


class Assignment(Value, frozen=True):
    """An assignment. `late` is in seconds after `due`; ANY_S accepts any delay.

    `penalty` is in percent of the points for each day or part of a day; it is shown and stamped,
    but not applied here. `zone` is the time zone in which times are shown. `student` and
    `ticket` are set only in a copy that was made for one student.
    """

    assignment: Name
    hand_in: Annotated[str, Parsed(parse_place)]
    receiver: Annotated[str, Parsed(parse_public)]
    course: Annotated[str, Parsed(parse_name)] = ""
    due: Annotated[Moment | None, Parsed(parse_moment)] = None
    zone: Annotated[str, Parsed(parse_zone_name)] = ""
    late: Annotated[int, Parsed(parse_late)] = 0
    penalty: Annotated[int, Parsed(parse_penalty)] = 0
    max_size: Annotated[int, Parsed(parse_size)] = DEFAULT_MAX_BYTES
    require: tuple[Annotated[str, Parsed(parse_part)], ...] = ("model",)
    host_key: Annotated[str, Parsed(parse_host_key)] = ""
    student: Annotated[str, Parsed(parse_name)] = ""
    ticket: Ticket | None = None

    @property
    def name(self) -> str:
        return self.assignment

    @property
    def time_zone(self) -> tzinfo:
        return load_zone(self.zone, self.due)

    def format_time(self, at: float) -> str:
        """Write a Unix time in the assignment's time zone."""
        return local_time_text(at, self.time_zone)


# Stretches of Unix time that do not count as late, such as holidays: ordered and disjoint.
Pauses = Sequence[tuple[int, int]]


class DeadlineRules(Protocol):
    """What `judge` needs of an assignment's file, or of an assignment in course.yaml."""

    @property
    def due(self) -> Moment | None: ...

    @property
    def late(self) -> int: ...

    @property
    def penalty(self) -> int: ...


class DeadlineStatus(Value, frozen=True):
    """The result of the rules at a given time. `closes_at` is None if it never closes.

    Within the grace period a submission is not late: `late_s` is 0 then, and `in_grace_s` are the
    seconds since it was due.
    """

    due_at: int | None
    closes_at: int | None
    accepted: bool
    late_s: int = 0
    penalty: int = 0
    in_grace_s: int = 0


def judge(
    rules: DeadlineRules,
    at: float,
    extension_s: int = 0,
    grace_s: int = 0,
    pauses: Pauses = (),
) -> DeadlineStatus:
    """Judge a bundle that is complete at Unix time `at`. The last second is still in time.

    `extension_s` moves the due time, and with it the end of the late period. Up to `grace_s` after
    it nothing is late; the days of the penalty begin after that. Time in a pause does not count.
    """
    if rules.due is None:
        return DeadlineStatus(due_at=None, closes_at=None, accepted=True)
    due_at = rules.due.at + extension_s
    closes_at = None if rules.late == ANY_S else _add_time(due_at, max(rules.late, grace_s), pauses)
    late_s = _count_time(due_at, int(at), pauses)
    is_late = late_s > grace_s
    return DeadlineStatus(
        due_at=due_at,
        closes_at=closes_at,
        accepted=closes_at is None or int(at) <= closes_at,
        late_s=late_s if is_late else 0,
        penalty=compute_penalty(count_late_days(late_s, grace_s), rules.penalty),
        in_grace_s=0 if is_late else late_s,
    )


def count_late_days(late_s: int, grace_s: int = 0) -> int:
    """Return the days of the penalty that have begun; they begin after the grace period."""
    return -(-max(0, late_s - grace_s) // DAY_S)


def compute_penalty(days: int, percent: int) -> int:
    """Return the penalty for so many late days, in percent."""
    return min(100, days * percent)


def _count_time(since: int, until: int, pauses: Pauses) -> int:
    """Return the seconds from `since` to `until` outside the pauses; 0 if it is over."""
    paused = sum(max(0, min(until, end) - max(since, begin)) for begin, end in pauses)
    return max(0, until - since - paused)


def _add_time(since: int, seconds: int, pauses: Pauses) -> int:
    """Return when this many seconds outside the pauses have passed since `since`."""
    until = since + seconds
    for begin, end in pauses:
        if begin < until and end > since:
            until += end - max(begin, since)
    return until


def load_assignment(path: Path, *, hint: str = "") -> Assignment:
    """Read an assignment's file; ConfigError lists everything that is wrong in it."""
    problems: list[Problem] = []
    data = read_bytes(path, path.name, hint=hint)
    assignment = parse_assignment(data, problems)
    if assignment is None:
        raise ConfigError(
            f"{escape(str(path))} is not a valid assignment file",
            tuple(sorted(problems, key=lambda problem: problem.line)),
            hint=hint or "ask your instructor for the file again, and do not edit it",
        )
    return assignment


def parse_assignment(data: bytes, problems: list[Problem]) -> Assignment | None:
    """Parse an assignment; None, with `problems`, if it is not valid."""
    node = parse(data, "", problems)  # without an origin, problems name their lines
    if node is None:
        problems += [] if problems else [Problem("", 0, "the file is empty")]
        return None
    assignment: Assignment | None = read(node, Assignment, "", problems)
    if assignment is None or problems:
        return None
    if assignment.hand_in.startswith("ssh://") and not assignment.host_key:
        problems.append(make_problem(node, "host_key", "is required if `hand_in` is an SSH server"))
    if assignment.hand_in.startswith("s3://") and (assignment.ticket is None) != (
        not assignment.student
    ):
        problems.append(make_problem(node, "student", "must be set together with `ticket`"))
    return None if problems else assignment


def assignment_text(assignment: Assignment) -> str:
    """Return the text of an assignment's file; `parse_assignment` reads it back."""
    lines = [
        "# An assignment for `labctl submit`. Put this file next to your lab.yaml.",
        f"assignment: {assignment.name}",
        *([f"course: {assignment.course}"] if assignment.course else []),
        *([f"due: {assignment.due}"] if assignment.due else []),
        *([f"zone: {assignment.zone}"] if assignment.zone else []),
        f"late: {late_text(assignment.late)}",
        *(
            [f"penalty: {assignment.penalty}%   # of the points, for each day or part of a day"]
            * bool(assignment.penalty)
        ),
        f"max_size: {format_size(assignment.max_size)}",
        f"require: [{', '.join(assignment.require)}]",
        f"hand_in: {assignment.hand_in}",
        *([f"host_key: {assignment.host_key}"] if assignment.host_key else []),
        f"receiver: {assignment.receiver}   # signs the receipts",
        *([f"student: {assignment.student}"] if assignment.student else []),
    ]
    text = "\n".join(lines) + "\n"
    return text + _ticket_text(assignment.ticket) if assignment.ticket else text


def _ticket_text(ticket: Ticket) -> str:
    """Return the ticket as YAML, with JSON's quoting."""

    def fields(form: dict[str, str]) -> str:
        return msgspec.json.encode(form).decode()

    lines = [
        "ticket:   # whoever has it can submit as this student: keep it secret",
        f'  url: "{ticket.url}"',
        f"  expires: {ticket.expires}",
        f"  part_bytes: {ticket.part_bytes}",
        f'  receipts: "{ticket.receipts}"',
        f"  index: {fields(ticket.index)}",
        "  parts:",
        *(f"    - {fields(part)}" for part in ticket.parts),
    ]
    return "\n".join(lines) + "\n"
