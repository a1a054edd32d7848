"""Evidence about where a submission came from, for a person to look at. Never a verdict.

Each flag says what was seen and where. Two students may share a file because it was handed out; a
run may have been made at home because that was allowed. labctl takes no points off for any flag.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from labctl.courses.grading.claims import Comparison
from labctl.courses.grading.results import cleaned
from labctl.model import FileEntry, Value

LEAST_MODEL_BYTES = 1024
LEAST_CODE_BYTES = 200
# A file that more than this share of the class (and more than two) has was handed out.
HANDED_OUT = 0.25
MOST_NAMED = 5
LABELS = re.compile(rb"/lab/labels|labels\.csv|LABCTL_LABELS|LABCTL_RESULTS|results\.json")
SERVER = re.compile(r"course-([0-9a-f]{8})-[0-9a-f]{6,32}")


class Flag(Value, frozen=True):
    """`kind` for machines; `what` was seen, `evidence` is where to look."""

    kind: str
    what: str
    evidence: str = ""


class Facts(Value, frozen=True):
    """What is known of one submission. `commit` is that of its code, `run_commit` that of the code
    when its run began; `mentions` are places in its code that name labels."""

    seat: str
    pseudonym: str = ""
    run: str = ""
    record: dict[str, Any] = msgspec.field(default_factory=dict)
    commit: str = ""
    run_commit: str = ""
    files: tuple[FileEntry, ...] = ()
    comparison: Comparison = Comparison()
    mentions: tuple[str, ...] = ()


def flags(submissions: Sequence[Facts]) -> dict[str, tuple[Flag, ...]]:
    """seat -> its flags, with each seat's last submission looked at beside all others."""
    shared = _shared(submissions)
    seats = {one.pseudonym: one.seat for one in submissions if one.pseudonym}
    # Where nobody used a server of the course, not having used one says nothing.
    usual = any(SERVER.fullmatch(_server(one)) for one in submissions)
    return {
        one.seat: (
            *_claim(one),
            *shared.get(one.seat, []),
            *_run(one),
            *(_where(one, seats) if usual else ()),
            *_code(one),
            *_mentions(one),
        )
        for one in submissions
    }


def _claim(one: Facts) -> Iterable[Flag]:
    if one.comparison.agrees is False:
        yield Flag(
            kind="claim",
            what="its own evaluation and the measurement differ by more than the tolerance",
            evidence=one.comparison.told(),
        )


def _shared(submissions: Sequence[Facts]) -> dict[str, list[Flag]]:
    """Files that some, and not most, have in common, byte for byte."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for one in submissions:
        for file in one.files:
            model = file.path.startswith("model/") and file.size >= LEAST_MODEL_BYTES
            code = file.path.startswith("code/") and file.size >= LEAST_CODE_BYTES
            if model or code:
                owners[file.sha256].setdefault(one.seat, file.path)
    most = max(2.0, HANDED_OUT * len(submissions))
    found: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for have in owners.values():
        if 1 < len(have) <= most:
            for seat, path in have.items():
                for other in sorted(set(have) - {seat}):
                    found[seat][(path.split("/")[0], other)].append(path)
    return {
        seat: [
            Flag(
                kind=f"same-{part}",
                what=f"{_count(len(paths), part)} byte for byte as {other} has",
                evidence=_named(paths),
            )
            for (part, other), paths in sorted(pairs.items())
        ]
        for seat, pairs in found.items()
    }


def _run(one: Facts) -> Iterable[Flag]:
    record = one.record
    if not record or not one.run:
        yield Flag(kind="no-record", what="it names no run, or has no record of one")
        return
    if record.get("id") != one.run:
        yield Flag(
            kind="other-run",
            what="its record is of another run than the one that it names",
            evidence=cleaned(f"{one.run}, {record.get('id')}", 200),
        )
    if record.get("state") != "exited" or record.get("exit_code") != 0:
        told = f"{record.get('state')}, exit code {record.get('exit_code')}"
        yield Flag(
            kind="run-not-ended",
            what="its run had not ended well when it was handed in",
            evidence=cleaned(told, 200),
        )


def _where(one: Facts, seats: dict[str, str]) -> Iterable[Flag]:
    if not one.record or not one.pseudonym:
        return
    server = _server(one)
    match = SERVER.fullmatch(server)
    if match is None:
        yield Flag(
            kind="elsewhere",
            what="its run was not on a server of this course",
            evidence=cleaned(server, 200),
        )
    elif match[1] != one.pseudonym:
        yield Flag(
            kind="other-seat",
            what=f"its run was on the server of {seats.get(match[1], 'another seat')}",
            evidence=server,
        )


def _server(one: Facts) -> str:
    return str(one.record.get("server_id", ""))


def _code(one: Facts) -> Iterable[Flag]:
    if one.run_commit and one.commit and one.run_commit != one.commit:
        yield Flag(
            kind="other-commit",
            what="the code handed in is of another commit than the run began with",
            evidence=f"run {one.run_commit[:10]}, handed in {one.commit[:10]}",
        )


def _mentions(one: Facts) -> Iterable[Flag]:
    if one.mentions:
        yield Flag(
            kind="names-labels",
            what="its code names the place of the hidden labels or of the results",
            evidence=_named(one.mentions),
        )


def mentions_in(path: str, content: bytes) -> list[str]:
    """`file:line` of what in a submission's code looks for the labels."""
    return [
        f"{path}:{number}"
        for number, line in enumerate(content.split(b"\n"), 1)
        if LABELS.search(line)
    ]


def _count(number: int, part: str) -> str:
    return f"a {part} file is" if number == 1 else f"{number} {part} files are"


def _named(paths: Sequence[str]) -> str:
    more = f" and {len(paths) - MOST_NAMED} more" if len(paths) > MOST_NAMED else ""
    return cleaned(", ".join(paths[:MOST_NAMED]) + more, 1000)
