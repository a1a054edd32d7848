"""labctl submit: a run's bundle, looked through, handed in, and its receipt verified and kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from labctl.errors import DiskFullError, InterruptError, PolicyError, UsageError
from labctl.events import Decision, Note, Progress, Step
from labctl.model import Value
from labctl.servers.context import Ground
from labctl.submissions import ASSIGNMENT_FILE, bundle, posting, receipt, receipts
from labctl.submissions.assignment import Assignment, Standing, judge, load_assignment
from labctl.submissions.bundle_checks import check_hazards, check_leaks
from labctl.submissions.bundling import Contents, contents
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Hello
from labctl.submissions.receiver_host import ReceiverHost

# By so much this machine's clock may differ from the receiver's before it is told.
CLOCK_S = 60


class Choice(Value, frozen=True):
    """What is to be handed in: the latest run, its best checkpoint, where nothing is said.

    `assignment` is the file's path, None for the one beside lab.yaml. In the files of `allowed`
    (paths in the bundle) nothing counts as a secret.
    """

    run: str = ""
    checkpoint: str = ""
    assignment: Path | None = None
    allowed: tuple[str, ...] = ()


class Terms(Value, frozen=True):
    """What is told before anything is sent. `number` None: the receiver was not asked.

    `now` is the receiver's clock where it was asked, else this machine's. `ticket_until` is when
    the leave to post into a bucket ends.
    """

    assignment: str
    course: str
    student: str
    due: str
    late: int
    penalty: int
    max_bytes: int
    hand_in: str
    now: int
    standing: Standing
    number: int | None
    ticket_until: str = ""


class HandedIn(Value, frozen=True):
    """`signed` is None where the receiver answers later: a bucket that it has not looked into."""

    signed: Signed | None
    receipt: str
    bundle: str
    sha256: str
    terms: Terms


def submit(
    ground: Ground,
    choice: Choice,
    *,
    on_terms: Callable[[Terms], None] = lambda terms: None,
    on_contents: Callable[[Contents, Terms], None] = lambda whole, terms: None,
) -> HandedIn:
    """Hand in what was chosen, once it was looked through and somebody said yes.

    PolicyError where the rules, or what is in it, do not allow it. Repeated, it goes on where it
    broke off; the same bundle again gives the same receipt.
    """
    rules = find_assignment(ground.config.root, choice.assignment)
    with ground.state.exclusive(f"{ground.lab_id}-submit", "submit"), opened(ground, rules) as host:
        terms = _terms_there(rules, host.hello()) if host else _terms_here(rules)
        on_terms(terms)
        _check_terms(ground, terms)
        whole = looked_through(ground, rules, terms, choice)
        on_contents(whole, terms)
        question = f"hand in {terms.assignment} at {rules.hand_in}?"
        if not ground.reporter.ask(Decision(question=question, default=True)):
            raise PolicyError("nothing was handed in", hint="labctl submit --yes")
        try:
            return _handed_in(ground, rules, whole, host, terms)
        except KeyboardInterrupt:
            raise InterruptError(
                "interrupted; nothing counts before all of it is there",
                why="what has arrived stays there",
                hint="labctl submit   # goes on where this ended",
            ) from None


def rehearse(ground: Ground, choice: Choice) -> tuple[Terms, Contents]:
    """The rules and what would be handed in, looked through; nobody is asked."""
    rules = find_assignment(ground.config.root, choice.assignment)
    terms = _terms_here(rules)
    return terms, looked_through(ground, rules, terms, choice)


def find_assignment(root: Path, given: Path | None) -> Assignment:
    """The assignment at `given`, or the one beside lab.yaml in `root`."""
    hint = f"put the file from your instructor there, as {ASSIGNMENT_FILE}; or --assignment FILE"
    return load_assignment(given or root / ASSIGNMENT_FILE, hint=hint)


@contextmanager
def opened(ground: Ground, rules: Assignment) -> Iterator[ReceiverHost | None]:
    """The receiver on an SSH server; None for a bucket, to which there is no way but a ticket."""
    if rules.hand_in.startswith("ssh://"):
        with ReceiverHost(ground, rules) as host:
            yield host
        return
    if rules.ticket is None:
        raise UsageError(
            "this assignment's file has no ticket of yours",
            why="a bucket takes bundles by a ticket made for one student",
            hint="ask your instructor: labctl receive ticket DIR ASSIGNMENT YOUR-NAME",
        )
    yield None


def looked_through(ground: Ground, rules: Assignment, terms: Terms, choice: Choice) -> Contents:
    """What would be handed in; PolicyError for what must not be."""
    step = Step(name="looking through")
    ground.reporter.emit(step)
    about = (terms.student, terms.max_bytes, choice.run, choice.checkpoint)
    whole = contents(ground, rules, *about, _beside(ground.config.root, choice.assignment))
    check_hazards(ground, whole)
    check_leaks(ground, whole, choice.allowed)
    ground.reporter.emit(Step(name=step.name, done=True))
    return whole


def _beside(root: Path, given: Path | None) -> Iterable[str]:
    """The assignment's own file stays here, since a ticket may stand in it."""
    path, root = (given or root / ASSIGNMENT_FILE).resolve(), root.resolve()
    return [path.relative_to(root).as_posix()] if path.is_relative_to(root) else []


def _terms_here(rules: Assignment) -> Terms:
    """The terms by the assignment's file and this machine's clock."""
    now = int(time.time())
    return Terms(
        assignment=rules.name,
        course=rules.course,
        student=rules.student,
        due=str(rules.due or ""),
        late=rules.late,
        penalty=rules.penalty,
        max_bytes=rules.max_size,
        hand_in=rules.hand_in,
        now=now,
        standing=judge(rules, now),
        number=None,
        ticket_until=str(rules.ticket.expires) if rules.ticket else "",
    )


def _terms_there(rules: Assignment, told: Hello) -> Terms:
    """The terms as the receiver has them; PolicyError where it is not the assignment's."""
    if told.receiver != rules.receiver:
        raise PolicyError(
            "this is not the receiver that the assignment names",
            why=f"its key is {told.receiver}, the assignment's is {rules.receiver}",
            hint="ask your instructor for the assignment's file again",
        )
    return Terms(
        assignment=rules.name,
        course=rules.course,
        student=told.student,
        due=told.due,
        late=told.late,
        penalty=told.penalty,
        max_bytes=told.max_bytes,
        hand_in=rules.hand_in,
        now=told.now,
        standing=told.rules,
        number=told.number,
    )


def _check_terms(ground: Ground, terms: Terms) -> None:
    """PolicyError where nothing is taken in any more; a clock that goes wrong is told."""
    if not terms.standing.accepted:
        raise PolicyError(
            f"{terms.assignment} is closed since {receipt.utc_text(terms.standing.closes_at or 0)}",
            why="what was handed in before stays as it is",
            hint="labctl submit --receipts   # what you have handed in",
        )
    apart = int(time.time()) - terms.now
    if terms.number is not None and abs(apart) > CLOCK_S:
        ahead = "ahead of" if apart > 0 else "behind"
        text = f"this machine's clock is {abs(apart)} s {ahead} the receiver's, which counts"
        ground.reporter.emit(Note(text=text, level="warning"))


def _handed_in(
    ground: Ground, rules: Assignment, whole: Contents, host: ReceiverHost | None, terms: Terms
) -> HandedIn:
    """Pack, send, verify the receipt, keep both."""
    root = ground.config.root
    place = receipts.folder(root, rules.name)
    place.mkdir(parents=True, exist_ok=True)
    draft = place / "outgoing.tar"
    sha256 = _packed(ground, whole, draft)
    step = Step(name="handing in")
    ground.reporter.emit(step)
    with draft.open("rb") as file:
        signed = _sent(ground, rules, host, file, sha256)
    ground.reporter.emit(Step(name=step.name, done=True))
    kept = receipts.keep(root, rules, signed, sha256=sha256) if signed else None
    here = receipts.bundle_beside(kept) if kept else receipts.posted_as(place, sha256)
    draft.replace(here)
    return HandedIn(
        signed=signed, receipt=str(kept or ""), bundle=str(here), sha256=sha256, terms=terms
    )


def _sent(
    ground: Ground, rules: Assignment, host: ReceiverHost | None, file: BinaryIO, sha256: str
) -> Signed | None:
    path = Path(file.name)
    size = path.stat().st_size

    def told(done: int) -> None:
        ground.reporter.emit(Progress(name="handing in", done=done, total=size, unit="bytes"))

    if host is not None:
        return host.send(file, sha256, size, told)
    assert rules.ticket is not None
    posting.post(rules.ticket, file, sha256, size, path.with_name("posted.json"), told)
    return None


def _packed(ground: Ground, whole: Contents, draft: Path) -> str:
    total, done = sum(one.size for one in whole.manifest.files), 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        ground.reporter.emit(Progress(name="packing", done=done, total=total, unit="bytes"))

    step = Step(name="packing")
    ground.reporter.emit(step)
    try:
        with draft.open("wb") as out:
            sha256 = bundle.pack(whole.manifest, whole.sources, out, told)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DiskFullError(
            f"the bundle cannot be written to {draft.parent}",
            why=error.strerror or "",
            hint=f"it needs {whole.bundle_bytes:,} bytes there; then labctl submit",
        ) from None
    ground.reporter.emit(Step(name=step.name, done=True))
    return sha256
