"""Evidence about the origin of submissions, for staff to review. It is not proof of misconduct.

Each flag says what was found and where. Two students may share a file because it was handed out; a
run may have been made at home because that was allowed. labctl deducts no points for any flag.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from labctl.courses.grading.claims import AccuracyComparison
from labctl.courses.grading.results import clean_text
from labctl.model import FileEntry, Value
from labctl.text import names_text

LEAST_MODEL_BYTES = 1024
LEAST_CODE_BYTES = 200
# A file that more than this share of the class (and more than two seats) has was handed out.
HANDED_OUT = 0.25
MOST_NAMED = 5
# Files that a training program writes without anybody's work: the state of random generators, which
# is the same for equal seeds, and of schedulers; and files that package managers write.
GENERATED = re.compile(
    r"(?:random|rng|seed|scheduler|training_args)(?:_?states?)?(?:[_-]?[0-9]+)?"
    r"\.(?:safetensors|pt|pth|bin|npz|npy|pkl|json|txt)"
    r"|(?:uv|poetry|pipfile|conda|pixi)[.-]lock|package-lock\.json|\.gitignore|\.labignore",
    re.IGNORECASE,
)
LABELS = re.compile(
    rb"/lab/(?:labels|staff)|labels\.csv|LABCTL_(?:LABELS|RESULTS|TESTS)|results\.json|/autograder/"
)
SERVER = re.compile(r"course-([0-9a-f]{8})-[0-9a-f]{6,32}")


class Flag(Value, frozen=True):
    """A finding: its `kind` for machines, `what` was found, and the `evidence` to review."""

    kind: str
    what: str
    evidence: str = ""


class SubmittedRun(Value, frozen=True):
    """The record of a run as its submission has it: a stranger's word, of any type."""

    id: object = None
    state: object = None
    exit_code: object = None
    server_id: object = ""


class SubmissionFacts(Value, frozen=True):
    """The facts about one submission.

    `record` is that of its run, None without one. `commit` is that of the submitted code,
    `run_commit` that of the code when its run started. `mentions` are places in its code that name
    the labels.
    """

    seat: str
    pseudonym: str = ""
    run: str = ""
    record: SubmittedRun | None = None
    commit: str = ""
    run_commit: str = ""
    files: tuple[FileEntry, ...] = ()
    comparison: AccuracyComparison = AccuracyComparison()
    mentions: tuple[str, ...] = ()

    @property
    def is_code_alone(self) -> bool:
        """Whether it has no model, and so needs no run that it comes from."""
        has_model = any(file.path.startswith("model/") for file in self.files)
        return not self.run and not has_model


def find_flags(submissions: Sequence[SubmissionFacts]) -> dict[str, tuple[Flag, ...]]:
    """Return the flags of each seat, from comparing all seats' submissions."""
    shared = _flag_shared_files(submissions)
    seats = {facts.pseudonym: facts.seat for facts in submissions if facts.pseudonym}
    # If nobody used a server of the course, not having used one means nothing.
    is_usual = any(SERVER.fullmatch(_server_id(facts)) for facts in submissions)
    return {
        facts.seat: (
            *_flag_claim(facts),
            *shared.get(facts.seat, []),
            *_flag_run(facts),
            *(_flag_server(facts, seats) if is_usual else ()),
            *_flag_commit(facts),
            *_flag_mentions(facts),
        )
        for facts in submissions
    }


def _flag_claim(facts: SubmissionFacts) -> Iterable[Flag]:
    if facts.comparison.agrees is False:
        yield Flag(
            kind="claim",
            what="its own evaluation differs from the measurement by more than the tolerance",
            evidence=facts.comparison.describe(),
        )


def _flag_shared_files(submissions: Sequence[SubmissionFacts]) -> dict[str, list[Flag]]:
    """Flag files that some seats, but not most, have in common byte for byte."""
    owners: dict[str, dict[str, str]] = defaultdict(dict)
    for facts in submissions:
        for file in facts.files:
            is_model = file.path.startswith("model/") and file.size >= LEAST_MODEL_BYTES
            is_code = file.path.startswith("code/") and file.size >= LEAST_CODE_BYTES
            if (is_model or is_code) and not is_generated(file.path):
                owners[file.sha256].setdefault(facts.seat, file.path)
    max_owners = max(2.0, HANDED_OUT * len(submissions))
    shared: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    for paths_by_seat in owners.values():
        if 1 < len(paths_by_seat) <= max_owners:
            for seat, path in paths_by_seat.items():
                for other in sorted(set(paths_by_seat) - {seat}):
                    shared[seat][(path.split("/")[0], other)].append(path)
    return {
        seat: [
            Flag(
                kind=f"same-{part}",
                what=f"{_count_text(len(paths), part)} identical to {other}'s",
                evidence=_first_paths(paths),
            )
            for (part, other), paths in sorted(pairs.items())
        ]
        for seat, pairs in shared.items()
    }


def is_generated(path: str) -> bool:
    """Whether programs write a file of this name, alike for everybody."""
    return bool(GENERATED.fullmatch(path.rpartition("/")[2]))


def _flag_run(facts: SubmissionFacts) -> Iterable[Flag]:
    if facts.is_code_alone:
        return
    record = facts.record
    if record is None or not facts.run:
        yield Flag(kind="no-record", what="it names no run, or has no record of it")
        return
    if record.id != facts.run:
        yield Flag(
            kind="other-run",
            what="its record belongs to another run than the one it names",
            evidence=clean_text(f"{facts.run}, {record.id}", 200),
        )
    if record.state != "exited" or record.exit_code != 0:
        state = f"{record.state}, exit code {record.exit_code}"
        yield Flag(
            kind="run-not-ended",
            what="its run had not ended successfully when it was submitted",
            evidence=clean_text(state, 200),
        )


def _flag_server(facts: SubmissionFacts, seats: dict[str, str]) -> Iterable[Flag]:
    if facts.record is None or not facts.pseudonym or facts.is_code_alone:
        return
    server = _server_id(facts)
    match = SERVER.fullmatch(server)
    if match is None:
        yield Flag(
            kind="elsewhere",
            what="its run was not on a server of this course",
            evidence=clean_text(server, 200),
        )
    elif match[1] != facts.pseudonym:
        yield Flag(
            kind="other-seat",
            what=f"its run was on the server of {seats.get(match[1], 'another seat')}",
            evidence=server,
        )


def _server_id(facts: SubmissionFacts) -> str:
    return str(facts.record.server_id) if facts.record else ""


def _flag_commit(facts: SubmissionFacts) -> Iterable[Flag]:
    if facts.run_commit and facts.commit and facts.run_commit != facts.commit:
        yield Flag(
            kind="other-commit",
            what="the submitted code is from another commit than the code of the run",
            evidence=f"run {facts.run_commit[:10]}, submitted {facts.commit[:10]}",
        )


def _flag_mentions(facts: SubmissionFacts) -> Iterable[Flag]:
    if facts.mentions:
        yield Flag(
            kind="names-labels",
            what="its code names the path of the hidden labels or of the results",
            evidence=_first_paths(facts.mentions),
        )


def find_mentions(path: str, content: bytes) -> list[str]:
    """Return `file:line` of each line of code that names the labels or the results."""
    return [
        f"{path}:{number}"
        for number, line in enumerate(content.split(b"\n"), 1)
        if LABELS.search(line)
    ]


def _count_text(number: int, part: str) -> str:
    return f"a {part} file is" if number == 1 else f"{number} {part} files are"


def _first_paths(paths: Sequence[str]) -> str:
    return clean_text(names_text(paths, MOST_NAMED), 1000)
