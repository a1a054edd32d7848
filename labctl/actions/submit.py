"""labctl submit: a run's bundle, looked through, handed in, and its receipt verified and kept.

.labctl/submissions/<assignment>/bundle-0001.tar     what was handed in
.labctl/submissions/<assignment>/receipt-0001.json   what its receiver signed
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from labctl.actions import Note, Progress, Step, posting
from labctl.actions.bundle_checks import check_hazards, check_leaks
from labctl.actions.bundling import Contents, contents
from labctl.actions.ground import Ground
from labctl.actions.receiver_host import ReceiverHost
from labctl.errors import DiskFullError, NotFoundError, PolicyError
from labctl.model import Value
from labctl.submissions import ASSIGNMENT_FILE, bundle, receipt
from labctl.submissions.assignment import Assignment, Standing, judge, load_assignment
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver import Hello

CLOCK_S = 60
"""By so much this machine's clock may differ from the receiver's before it is told."""


class Terms(Value, frozen=True):
    """What is told before anything is sent. `number` None: nobody was asked.

    `now` is the receiver's clock where it was asked, else this machine's.
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


class Verified(Value, frozen=True):
    """A receipt whose signature holds. `bundle` says how it fits the bundle that lies here.

    "same", "changed", or "absent" where there is none beside it.
    """

    receipt: Receipt
    path: str
    bundle: str


class HandedIn(Value, frozen=True):
    """`signed` is None where the receiver answers later: a bucket that it has not looked into."""

    signed: Signed | None
    receipt: str
    bundle: str
    sha256: str


def find_assignment(root: Path, given: Path | None) -> tuple[Path, Assignment]:
    """The assignment at `given`, or the one beside lab.yaml in `root`."""
    path = given or root / ASSIGNMENT_FILE
    hint = f"put the file from your instructor there, as {ASSIGNMENT_FILE}; or --assignment FILE"
    return path, load_assignment(path, hint=hint)


def terms_here(rules: Assignment) -> Terms:
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
    )


def terms_there(rules: Assignment, told: Hello) -> Terms:
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


def check_terms(ground: Ground, terms: Terms) -> None:
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


def checked_contents(
    ground: Ground,
    rules: Assignment,
    terms: Terms,
    run_id: str,
    checkpoint: str,
    allowed: Iterable[str] = (),
    beside: Iterable[str] = (),
) -> Contents:
    """What would be handed in, looked through."""
    ground.reporter.emit(Step(name="looking through"))
    about = (terms.student, terms.max_bytes, run_id, checkpoint, beside)
    whole = contents(ground, rules, *about)
    check_hazards(ground, whole)
    check_leaks(ground, whole, allowed)
    ground.reporter.emit(Step(name="looking through", done=True))
    return whole


def folder(root: Path, name: str) -> Path:
    """Where an assignment's bundles and receipts lie in a lab's directory."""
    return root / ".labctl" / "submissions" / name


def hand_in(
    ground: Ground, rules: Assignment, whole: Contents, host: ReceiverHost | None
) -> HandedIn:
    """Pack, send, verify the receipt and keep both; repeated, it goes on where it broke off.

    `host` is None for an assignment that is handed in through a bucket.
    """
    place = folder(ground.config.root, rules.name)
    place.mkdir(parents=True, exist_ok=True)
    draft = place / "outgoing.tar"
    sha256 = _packed(ground, whole, draft)
    size = draft.stat().st_size

    def told(done: int) -> None:
        ground.reporter.emit(Progress(name="handing in", done=done, total=size, unit="bytes"))

    ground.reporter.emit(Step(name="handing in"))
    with draft.open("rb") as file:
        signed = _sent(rules, host, file, sha256, size, place, told)
    ground.reporter.emit(Step(name="handing in", done=True))
    if signed is None:
        posted = place / f"posted-{sha256[:12]}.tar"
        draft.replace(posted)
        return HandedIn(signed=None, receipt="", bundle=str(posted), sha256=sha256)
    kept = keep_receipt(ground.config.root, rules, signed, sha256=sha256)
    here = _bundle_beside(kept)
    draft.replace(here)
    return HandedIn(signed=signed, receipt=str(kept), bundle=str(here), sha256=sha256)


def _sent(
    rules: Assignment,
    host: ReceiverHost | None,
    file: BinaryIO,
    sha256: str,
    size: int,
    place: Path,
    told: Callable[[int], None],
) -> Signed | None:
    if host is not None:
        return host.send(file, sha256, size, told)
    assert rules.ticket is not None
    posting.post(rules.ticket, file, sha256, size, place / "posted.json", told)
    return None


def fetch_receipts(
    root: Path, rules: Assignment, host: ReceiverHost | None
) -> tuple[list[tuple[Path, Receipt]], list[str]]:
    """(receipts, now kept here, each verified; what was refused and why)."""
    refused: list[str] = []
    if host is not None:
        found = host.receipts()
    else:
        if rules.ticket is None:
            raise NotFoundError(f"{rules.name} has no ticket", hint="ask your instructor")
        answers = posting.answers(rules.ticket)
        found = list(answers.receipts)
        refused = [f"{one.at} {one.sha256[:12]}: {one.why}" for one in answers.refused]
    kept = [(keep_receipt(root, rules, signed), signed.receipt) for signed in found]
    for path, one in kept:
        posted = folder(root, rules.name) / f"posted-{one.bundle_sha256[:12]}.tar"
        if posted.is_file() and not _bundle_beside(path).exists():
            posted.replace(_bundle_beside(path))
    return kept, refused


def keep_receipt(root: Path, rules: Assignment, signed: Signed, *, sha256: str = "") -> Path:
    """Verify a receipt and write it; PolicyError where it is not what its receiver must sign."""
    found = receipt.verify(signed, rules.receiver)
    if found.assignment != rules.name or (sha256 and found.bundle_sha256 != sha256):
        raise PolicyError("the receipt is for something else", why="labctl did not hand that in")
    place = folder(root, rules.name)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"receipt-{found.number:04}.json"
    draft = path.with_suffix(".new")
    draft.write_bytes(receipt.encode(signed))
    draft.replace(path)
    return path


def last_receipt(root: Path, rules: Assignment) -> Path:
    """The newest receipt here; NotFoundError where there is none."""
    known = sorted(folder(root, rules.name).glob("receipt-*.json"))
    if not known:
        raise NotFoundError(f"there is no receipt for {rules.name} here", hint="labctl submit")
    return known[-1]


def verify(path: Path, public: str, bundle_path: Path | None = None) -> Verified:
    """A receipt by its receiver's public key, and the bundle beside it (or given) by its hash.

    PolicyError where the signature does not hold.
    """
    try:
        with path.open("rb") as file:
            data = file.read(receipt.MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no {path}", hint="labctl submit --receipts") from None
    found = receipt.verify(receipt.decode(data), public)
    place = bundle_path or _bundle_beside(path)
    said = "absent"
    if place.is_file():
        with place.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        said = "same" if digest == found.bundle_sha256 else "changed"
    elif bundle_path is not None:
        raise NotFoundError(f"there is no {bundle_path}")
    return Verified(receipt=found, path=str(path), bundle=said)


def _bundle_beside(path: Path) -> Path:
    return path.with_name(path.name.replace("receipt-", "bundle-", 1)).with_suffix(".tar")


def _packed(ground: Ground, whole: Contents, draft: Path) -> str:
    total, done = sum(one.size for one in whole.manifest.files), 0

    def told(count: int) -> None:
        nonlocal done
        done += count
        ground.reporter.emit(Progress(name="packing", done=done, total=total, unit="bytes"))

    ground.reporter.emit(Step(name="packing"))
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
    ground.reporter.emit(Step(name="packing", done=True))
    return sha256
