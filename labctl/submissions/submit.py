"""labctl submit: build and check a run's bundle, submit it, verify and store its receipt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec

from labctl.config.times import load_zone, local_time_text, parse_moment
from labctl.errors import DiskFullError, InterruptError, LabError, PolicyError, UsageError
from labctl.events import Note, Progress, Question, Step
from labctl.model import Value
from labctl.runs.public_tests import has_public_tests, run_tests
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.submissions import ASSIGNMENT_FILE, bundle, posting, receipts
from labctl.submissions.assignment import (
    Assignment,
    DeadlineStatus,
    compute_penalty,
    count_late_days,
    judge,
    load_assignment,
)
from labctl.submissions.bundle_checks import require_no_hazards, require_no_secrets
from labctl.submissions.bundling import BundleContents, collect_contents
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Hello
from labctl.submissions.receiver_host import ReceiverHost
from labctl.text import names_text

# Seconds by which this machine's clock may differ from the receiver's without a warning.
CLOCK_S = 60
# Seconds for the public tests before a submission.
TESTS_S = 120
# Failed tests that are named.
MOST_NAMED = 5


class SubmissionChoice(Value, frozen=True):
    """The choice of what to submit: by default the latest run, with its best checkpoint.

    `assignment` is the file's path, None for the one next to lab.yaml. `allowed` are paths in the
    bundle whose secret-like text is ignored. `code_only` is for the code without a run.
    """

    run: str = ""
    checkpoint: str = ""
    assignment: Path | None = None
    allowed: tuple[str, ...] = ()
    code_only: bool = False


class Terms(Value, frozen=True):
    """The terms shown before anything is sent. `number` is None if the receiver was not asked.

    `now` is the receiver's clock if it was asked, else this machine's. `ticket_until` is when the
    ticket for a bucket expires. `zone` is the name of the time zone in which times are shown.
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
    standing: DeadlineStatus
    number: int | None
    ticket_until: str = ""
    grace_s: int = 0
    free_days: int = 0
    free_days_left: int = 0
    zone: str = ""

    def format_time(self, at: float) -> str:
        """Write a Unix time in the assignment's time zone."""
        due = parse_moment(self.due) if self.due else None
        return local_time_text(at, load_zone(self.zone, due))

    def use_free_days(self, late_s: int) -> tuple[int, int]:
        """Return the free days that so late a submission uses, and the penalty that remains."""
        days = count_late_days(late_s, self.grace_s)
        used = min(days, self.free_days_left)
        return used, compute_penalty(days - used, self.penalty)


class SubmitResult(Value, frozen=True):
    """A submission. `signed` is None if it was posted to a bucket and is not collected yet.

    `stale` says which results were not up to date. `standing` is, for a bundle that had arrived
    before, what the rules and extensions of now say of it.
    """

    signed: Signed | None
    receipt: str
    bundle: str
    sha256: str
    terms: Terms
    stale: tuple[str, ...] = ()
    standing: DeadlineStatus | None = None


def submit(
    context: LabContext,
    choice: SubmissionChoice,
    *,
    on_terms: Callable[[Terms], None] = lambda terms: None,
    on_contents: Callable[[BundleContents, Terms], None] = lambda checked, terms: None,
) -> SubmitResult:
    """Submit what was chosen, after checks and consent.

    PolicyError if the rules or the contents do not allow it. Repeating it continues a broken
    upload; the same bundle gets the same receipt.
    """
    rules = find_assignment(context.config.root, choice.assignment)
    with (
        context.state.lock(f"{context.lab_id}-submit", "submit"),
        open_receiver(context, rules) as host,
    ):
        terms = _receiver_terms(rules, host.hello()) if host else _local_terms(rules)
        on_terms(terms)
        _check_terms(context, terms)
        checked = check_contents(context, rules, terms, choice)
        on_contents(checked, terms)
        _confirm(context, rules, choice, checked)
        try:
            return _pack_and_send(context, rules, checked, host, terms)
        except KeyboardInterrupt:
            raise InterruptError(
                "interrupted; the submission does not count until all of it has arrived",
                why="the part that has arrived is kept",
                hint="labctl submit   # continues where this stopped",
            ) from None


def _confirm(
    context: LabContext, rules: Assignment, choice: SubmissionChoice, checked: BundleContents
) -> None:
    """Ask whether to submit; for results that are not up to date, the default is no."""
    stale = " as they are, not up to date" if checked.stale else ""
    question = f"submit {rules.name} to {rules.hand_in}{stale}?"
    if context.reporter.confirm(Question(question=question, default=not checked.stale)):
        return
    hint = fresh_command(choice) if checked.stale else "labctl submit --yes"
    raise PolicyError("nothing was submitted", hint=hint)


def fresh_command(choice: SubmissionChoice) -> str:
    """Return the command that brings the chosen run's results up to date and submits them."""
    return command("labctl", "submit", *list_choice_words(choice), "--fresh").render()


def list_choice_words(choice: SubmissionChoice) -> list[str]:
    """List the words that choose the same submission on the command line."""
    words = [choice.run] if choice.run else []
    words += ["--checkpoint", choice.checkpoint] if choice.checkpoint else []
    words += ["--assignment", str(choice.assignment)] if choice.assignment else []
    return words + [word for path in choice.allowed for word in ("--allow", path)]


def rehearse(context: LabContext, choice: SubmissionChoice) -> tuple[Terms, BundleContents]:
    """Return the rules and the checked contents without contacting the receiver."""
    rules = find_assignment(context.config.root, choice.assignment)
    terms = _local_terms(rules)
    return terms, check_contents(context, rules, terms, choice)


def find_assignment(root: Path, given: Path | None) -> Assignment:
    """Load the assignment at `given`, or the one next to lab.yaml in `root`."""
    hint = f"save the file from your instructor as {ASSIGNMENT_FILE}, or use --assignment FILE"
    return load_assignment(given or root / ASSIGNMENT_FILE, hint=hint)


@contextmanager
def open_receiver(context: LabContext, rules: Assignment) -> Iterator[ReceiverHost | None]:
    """Yield the receiver on an SSH server, or None for a bucket, which needs only a ticket."""
    if rules.hand_in.startswith("ssh://"):
        with closing(ReceiverHost(context, rules)) as host:
            yield host
        return
    if rules.ticket is None:
        raise UsageError(
            "this assignment's file has no ticket for you",
            why="a bucket accepts bundles only with a ticket for one student",
            hint="ask your instructor for one, made with:\n"
            "labctl receive ticket DIR ASSIGNMENT YOUR-NAME",
        )
    yield None


def check_contents(
    context: LabContext, rules: Assignment, terms: Terms, choice: SubmissionChoice
) -> BundleContents:
    """Collect and check what would be submitted; PolicyError for unsafe files and secrets."""
    step = Step(name="checking the contents")
    context.reporter.emit(step)
    options = (terms.student, terms.max_bytes, choice.run, choice.checkpoint)
    own_file = _own_file(context.config.root, choice.assignment)
    result = collect_contents(context, rules, *options, own_file, code_only=choice.code_only)
    require_no_hazards(context, result)
    require_no_secrets(context, result, choice.allowed, list_choice_words(choice))
    context.reporter.emit(Step(name=step.name, done=True))
    notes = (*result.notes, *_list_failed_tests(context))
    return msgspec.structs.replace(result, notes=notes)


def _list_failed_tests(context: LabContext) -> list[str]:
    """Say which public tests fail; [] without tests, or if all pass. Never raises an error."""
    root = context.config.root
    try:
        if not has_public_tests(root):
            return []
        step = Step(name="running the public tests on this machine")
        context.reporter.emit(step)
        report = run_tests(root, time_limit_s=TESTS_S)
        context.reporter.emit(Step(name=step.name, done=True))
    except LabError as error:
        return [f"the public tests did not run: {error.what}"]
    if not report.failed:
        return []
    names = names_text([test.name for test in report.failed], MOST_NAMED)
    return [f"{len(report.failed)} of {len(report.tests)} public tests fail: {names}"]


def _own_file(root: Path, given: Path | None) -> Iterable[str]:
    """Return the assignment's own path, which is not submitted: it may contain a ticket."""
    path, root = (given or root / ASSIGNMENT_FILE).resolve(), root.resolve()
    return [path.relative_to(root).as_posix()] if path.is_relative_to(root) else []


def _local_terms(rules: Assignment) -> Terms:
    """Return the terms by the assignment's file and this machine's clock."""
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
        zone=rules.zone,
    )


def _receiver_terms(rules: Assignment, hello: Hello) -> Terms:
    """Return the receiver's terms; PolicyError if it is not the assignment's receiver."""
    if hello.receiver != rules.receiver:
        raise PolicyError(
            "this is not the receiver of the assignment",
            why=f"its key is {hello.receiver}, the assignment's is {rules.receiver}",
            hint="ask your instructor for the assignment's file again",
        )
    return Terms(
        assignment=rules.name,
        course=rules.course,
        student=hello.student,
        due=hello.due,
        late=hello.late,
        penalty=hello.penalty,
        max_bytes=hello.max_bytes,
        hand_in=rules.hand_in,
        now=hello.now,
        standing=hello.rules,
        number=hello.number,
        grace_s=hello.grace_s,
        free_days=hello.free_days,
        free_days_left=hello.free_days_left,
        zone=rules.zone,
    )


def _check_terms(context: LabContext, terms: Terms) -> None:
    """Raise PolicyError if the assignment is closed; warn about a wrong clock."""
    if not terms.standing.accepted:
        raise PolicyError(
            f"{terms.assignment} closed on {terms.format_time(terms.standing.closes_at or 0)}",
            why="earlier submissions stay as they are",
            hint="labctl submit --receipts   # lists what you have submitted",
        )
    offset_s = int(time.time()) - terms.now
    if terms.number is not None and abs(offset_s) > CLOCK_S:
        ahead = "ahead of" if offset_s > 0 else "behind"
        text = f"this machine's clock is {abs(offset_s)} s {ahead} the receiver's, which decides"
        context.reporter.emit(Note(text=text, level="warning"))


def _pack_and_send(
    context: LabContext,
    rules: Assignment,
    result: BundleContents,
    host: ReceiverHost | None,
    terms: Terms,
) -> SubmitResult:
    """Pack and send the bundle, verify the receipt, and store both."""
    root = context.config.root
    directory = receipts.submissions_directory(root, rules.name)
    directory.mkdir(parents=True, exist_ok=True)
    draft = directory / "outgoing.tar"
    sha256 = _pack(context, result, draft)
    step = Step(name="submitting")
    context.reporter.emit(step)
    with draft.open("rb") as file:
        signed = _send(context, rules, host, file, sha256)
    context.reporter.emit(Step(name=step.name, done=True))
    receipt_path = receipts.store_receipt(root, rules, signed, sha256=sha256) if signed else None
    bundle_path = (
        receipts.bundle_path_of(receipt_path)
        if receipt_path
        else receipts.posted_path(directory, sha256)
    )
    draft.replace(bundle_path)
    return SubmitResult(
        signed=signed,
        receipt=str(receipt_path or ""),
        bundle=str(bundle_path),
        sha256=sha256,
        terms=terms,
        stale=result.stale,
        standing=_judge_repeated(host, signed, terms),
    )


def _judge_repeated(
    host: ReceiverHost | None, signed: Signed | None, terms: Terms
) -> DeadlineStatus | None:
    """Return what counts now of a bundle that was submitted before; None for a new one."""
    if host is None or signed is None or signed.receipt.number > (terms.number or 0):
        return None
    return next((standing for one, standing in host.receipts() if one == signed), None)


def _send(
    context: LabContext, rules: Assignment, host: ReceiverHost | None, file: BinaryIO, sha256: str
) -> Signed | None:
    path = Path(file.name)
    size = path.stat().st_size

    def report(done: int) -> None:
        context.reporter.emit(Progress(name="submitting", done=done, total=size, unit="bytes"))

    if host is not None:
        return host.send(file, sha256, size, report)
    assert rules.ticket is not None
    posting.post_bundle(rules.ticket, file, sha256, size, path.with_name("posted.json"), report)
    return None


def _pack(context: LabContext, result: BundleContents, draft: Path) -> str:
    total, done = sum(file.size for file in result.manifest.files), 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        context.reporter.emit(Progress(name="packing", done=done, total=total, unit="bytes"))

    step = Step(name="packing")
    context.reporter.emit(step)
    try:
        with draft.open("wb") as out:
            sha256 = bundle.write_bundle(result.manifest, result.sources, out, report)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise DiskFullError(
            f"the bundle cannot be written to {draft.parent}",
            why=error.strerror or "",
            hint=f"free {result.bundle_bytes:,} bytes there, then:\nlabctl submit",
        ) from None
    context.reporter.emit(Step(name=step.name, done=True))
    return sha256
