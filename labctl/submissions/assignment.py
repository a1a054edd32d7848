"""An assignment as its instructor wrote it, and what its rules say of a moment.

Times are Unix seconds. The file is YAML, read as lab.yaml is: every problem at once, by its line.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import msgspec

from labctl.config.document import parse, plain, read_bytes, shown
from labctl.config.reader import Parsed, keys_of, problem, read
from labctl.config.scalars import parse_name, parse_size, size_text
from labctl.config.schema import parse_bucket
from labctl.config.times import (
    ANY_S,
    DEFAULT_MAX_BYTES,
    Moment,
    late_text,
    parse_late,
    parse_moment,
    parse_part,
    parse_penalty,
)
from labctl.errors import ConfigError, Problem
from labctl.model import Value

DAY_S = 86_400
SSH_PLACE = re.compile(
    r"ssh://(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]*)@(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]*)"
    r"(?::(?P<port>[0-9]{1,5}))?"
)


def parse_public(text: str) -> str:
    """A receiver's public key, `ed25519:` and 44 characters of base64."""
    if not re.fullmatch(r"ed25519:[A-Za-z0-9+/]{43}=", text):
        raise ValueError(f"{shown(text)} is no receiver's public key: ed25519:...")
    return text


def parse_host_key(text: str) -> str:
    if not re.fullmatch(r"[a-z0-9@.-]+ [A-Za-z0-9+/]+=*", text):
        raise ValueError(f"{shown(text)} is no host key: `ssh-keyscan -t ed25519 HOST` shows it")
    return text


def parse_place(text: str) -> str:
    """Where bundles go: `ssh://user@host[:port]`, or `s3://bucket/folder`."""
    if text.startswith("s3://"):
        return parse_bucket(text)
    way = SSH_PLACE.fullmatch(text)
    if way is None or not 0 < int(way["port"] or 22) < 65536:
        raise ValueError(f"{shown(text)} is no receiver: ssh://user@host:22 or s3://bucket/folder")
    return text


def parse_address(text: str) -> str:
    """`https://...`, or http:// on this very machine."""
    if not re.fullmatch(r"https://[^\s/@]+/\S*|http://(127\.0\.0\.1|localhost):\d+/\S*", text):
        raise ValueError(f"{shown(text)} is not an https:// address")
    return text


Name = Annotated[str, Parsed(parse_name)]
Address = Annotated[str, Parsed(parse_address)]


class Ticket(Value, frozen=True):
    """Leave to post into a bucket until `expires`: form fields for the index and for each part.

    Part N of a bundle has `part_bytes` bytes, the last one fewer. `receipts` is where the
    receiver's answers can be fetched later.
    """

    url: Address
    expires: Annotated[Moment, Parsed(parse_moment)]
    part_bytes: Annotated[int, Parsed(parse_size)]
    index: dict[str, str]
    parts: tuple[dict[str, str], ...]
    receipts: Address


class Assignment(Value, frozen=True):
    """One assignment. `late` is in seconds after `due`, ANY_S for however late.

    `penalty` is in percent of the points for each day begun; it is told and stamped, never applied
    here. `student` and `ticket` are there only where this copy was made for one student.
    """

    assignment: Name
    hand_in: Annotated[str, Parsed(parse_place)]
    receiver: Annotated[str, Parsed(parse_public)]
    course: Annotated[str, Parsed(parse_name)] = ""
    due: Annotated[Moment | None, Parsed(parse_moment)] = None
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


class Standing(Value, frozen=True):
    """What the rules say of a moment. `closes_at` None: it never closes."""

    due_at: int | None
    closes_at: int | None
    accepted: bool
    late_s: int = 0
    penalty: int = 0


def judge(rules: Assignment, at: float, extension_s: int = 0) -> Standing:
    """Whether a bundle that is all there at `at` counts, and as how late. The last second counts.

    `extension_s` moves the due time, and with it the end of the late time.
    """
    if rules.due is None:
        return Standing(due_at=None, closes_at=None, accepted=True)
    due_at = rules.due.at + extension_s
    closes_at = None if rules.late == ANY_S else due_at + rules.late
    late_s = max(0, int(at) - due_at)
    days = -(-late_s // DAY_S)
    return Standing(
        due_at=due_at,
        closes_at=closes_at,
        accepted=closes_at is None or int(at) <= closes_at,
        late_s=late_s,
        penalty=min(100, days * rules.penalty),
    )


def load_assignment(path: Path, *, hint: str = "") -> Assignment:
    """The assignment in a file; ConfigError with everything that is wrong in it."""
    problems: list[Problem] = []
    data = read_bytes(path, path.name, hint=hint)
    found = parse_assignment(data, problems)
    if found is None:
        raise ConfigError(
            f"{plain(str(path))} is not an assignment as labctl reads it",
            tuple(sorted(problems, key=lambda one: one.line)),
            hint=hint or "ask your instructor for the file again; it need not be edited",
        )
    return found


def parse_assignment(data: bytes, problems: list[Problem]) -> Assignment | None:
    """The assignment that a text is; None where `problems` grew."""
    node = parse(data, "", problems)  # without an origin, problems name their lines
    if node is None:
        problems += [] if problems else [Problem("", 0, "there is nothing in it")]
        return None
    found: Assignment | None = read(node, Assignment, "", problems)
    if found is None or problems:
        return None
    if found.hand_in.startswith("ssh://") and not found.host_key:
        problems.append(problem(node, "host_key", "is required where `hand_in` is an SSH server"))
    if found.hand_in.startswith("s3://") and (found.ticket is None) != (not found.student):
        problems.append(problem(node, "student", "stands with `ticket`, and only with it"))
    return None if problems else found


def assignment_text(found: Assignment) -> str:
    """The file of an assignment: `parse_assignment` reads the same from it."""
    lines = [
        "# An assignment for `labctl submit`. Put this file beside your lab.yaml.",
        f"assignment: {found.name}",
        *([f"course: {found.course}"] if found.course else []),
        *([f"due: {found.due}"] if found.due else []),
        f"late: {late_text(found.late)}",
        *(
            [f"penalty: {found.penalty}%   # of the points, for each day begun"]
            * bool(found.penalty)
        ),
        f"max_size: {size_text(found.max_size)}",
        f"require: [{', '.join(found.require)}]",
        f"hand_in: {found.hand_in}",
        *([f"host_key: {found.host_key}"] if found.host_key else []),
        f"receiver: {found.receiver}   # signs the receipts",
        *([f"student: {found.student}"] if found.student else []),
    ]
    text = "\n".join(lines) + "\n"
    return text + _ticket_text(found.ticket) if found.ticket else text


def _ticket_text(ticket: Ticket) -> str:
    """JSON's quoting is YAML's too."""

    def fields(form: dict[str, str]) -> str:
        return msgspec.json.encode(form).decode()

    lines = [
        "ticket:   # lets its bearer hand in as this student: keep it to yourself",
        f'  url: "{ticket.url}"',
        f"  expires: {ticket.expires}",
        f"  part_bytes: {ticket.part_bytes}",
        f'  receipts: "{ticket.receipts}"',
        f"  index: {fields(ticket.index)}",
        "  parts:",
        *(f"    - {fields(part)}" for part in ticket.parts),
    ]
    return "\n".join(lines) + "\n"


def known_keys() -> list[str]:
    """The keys that an assignment's file may have."""
    return list(keys_of(Assignment))
