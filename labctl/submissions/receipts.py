"""Local receipts: stored next to their bundles, fetched again, verified.

.labctl/submissions/<assignment>/bundle-0001.tar     the submission
.labctl/submissions/<assignment>/receipt-0001.json   its signed receipt
.labctl/submissions/<assignment>/feedback.html       the released feedback
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from labctl.errors import NotFoundError, PolicyError, UsageError
from labctl.model import Value
from labctl.submissions import posting, receipt
from labctl.submissions.assignment import Assignment, DeadlineStatus
from labctl.submissions.feedback import Feedback
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver_host import ReceiverHost
from labctl.wire.receiver import MOST_REGRADE_CHARS, RegradeRecord, TotalRecord


class Verified(Value, frozen=True):
    """A receipt with a valid signature, and whether the local bundle matches it."""

    receipt: Receipt
    path: str
    bundle: Literal["same", "changed", "absent"]


class StoredReceipt(Value, frozen=True):
    """A receipt stored at `path`, and what the rules and extensions of now say (None: unknown)."""

    path: Path
    receipt: Receipt
    standing: DeadlineStatus | None = None


def submissions_directory(root: Path, name: str) -> Path:
    """Return the directory of an assignment's bundles and receipts in a lab."""
    return root / ".labctl" / "submissions" / name


def bundle_path_of(path: Path) -> Path:
    """Return the path of a receipt's bundle."""
    return path.with_name(path.name.replace("receipt-", "bundle-", 1)).with_suffix(".tar")


def posted_path(place: Path, sha256: str) -> Path:
    """Return the path of a posted bundle that has no receipt yet."""
    return place / f"posted-{sha256[:12]}.tar"


def store_receipt(root: Path, rules: Assignment, signed: Signed, *, sha256: str = "") -> Path:
    """Verify a receipt and store it; PolicyError if it is not for this submission."""
    verified = receipt.verify(signed, rules.receiver)
    if verified.assignment != rules.name or (sha256 and verified.bundle_sha256 != sha256):
        raise PolicyError(
            "the receipt is for another submission",
            why="labctl did not submit that bundle",
            hint="tell your instructor, then:\nlabctl submit",
        )
    directory = submissions_directory(root, rules.name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"receipt-{verified.number:04}.json"
    draft = path.with_suffix(".new")
    draft.write_bytes(receipt.encode(signed))
    draft.replace(path)
    posted = posted_path(directory, verified.bundle_sha256)
    if posted.is_file() and not bundle_path_of(path).exists():
        posted.replace(bundle_path_of(path))
    return path


def fetch(
    root: Path, rules: Assignment, host: ReceiverHost | None
) -> tuple[list[StoredReceipt], list[str]]:
    """Fetch, verify and store all receipts; return them, and the refusals with their reasons.

    `host` is None for an assignment that is submitted through a bucket.
    """
    refused: list[str] = []
    receipts: list[tuple[Signed, DeadlineStatus | None]]
    if host is not None:
        receipts = host.receipts()
    else:
        assert rules.ticket is not None
        answers = posting.fetch_answers(rules.ticket)
        receipts = [(signed, None) for signed in answers.receipts]
        refused = [
            f"{refusal.at} {refusal.sha256[:12]}: {refusal.why}" for refusal in answers.refused
        ]
    stored = [
        StoredReceipt(store_receipt(root, rules, signed), signed.receipt, standing)
        for signed, standing in receipts
    ]
    return stored, refused


class FetchedFeedback(Value, frozen=True):
    """Released feedback, the `path` of its page here, the student's regrade requests and total."""

    feedback: Feedback
    path: Path
    regrades: tuple[RegradeRecord, ...] = ()
    total: TotalRecord | None = None


def fetch_feedback(root: Path, rules: Assignment, host: ReceiverHost | None) -> FetchedFeedback:
    """Fetch and store the released feedback; NotFoundError if nothing was released yet."""
    if host is None:
        raise NotFoundError(
            f"{rules.name} is submitted through a bucket, which cannot return grades",
            hint="ask your instructor for your grade",
        )
    feedback, reply = host.feedback()
    if feedback is None:
        raise NotFoundError(
            f"your grade for {rules.name} has not been released yet",
            hint="labctl submit --receipts   # lists what you have submitted",
        )
    directory = submissions_directory(root, rules.name)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "feedback.html"
    draft = path.with_suffix(".new")
    draft.write_text(feedback.page, encoding="utf-8")
    draft.replace(path)
    return FetchedFeedback(feedback=feedback, path=path, regrades=reply.regrades, total=reply.total)


def ask_regrade(rules: Assignment, host: ReceiverHost | None, text: str) -> int:
    """Ask staff for a regrade; return the number of the request."""
    if host is None:
        raise NotFoundError(
            f"{rules.name} is submitted through a bucket, which takes no requests",
            hint="ask your instructor",
        )
    if len(text.strip()) > MOST_REGRADE_CHARS:
        raise UsageError(
            f"the request has {len(text.strip())} characters",
            why=f"at most {MOST_REGRADE_CHARS} are sent",
            hint="shorten it, and name the part of the grade that it is about",
        )
    return host.ask_regrade(text)


def find_last_receipt(root: Path, rules: Assignment) -> Path:
    """Return the path of the newest local receipt; NotFoundError if it does not exist."""
    receipts = sorted(submissions_directory(root, rules.name).glob("receipt-*.json"))
    if not receipts:
        raise NotFoundError(f"this machine has no receipt for {rules.name}", hint="labctl submit")
    return receipts[-1]


def verify(path: Path, public: str, bundle_path: Path | None = None) -> Verified:
    """Verify a receipt with its receiver's public key, and its bundle by hash.

    PolicyError if the signature is not valid.
    """
    try:
        with path.open("rb") as file:
            data = file.read(receipt.MOST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(f"there is no file {path}", hint="labctl submit --receipts") from None
    verified = receipt.verify(receipt.decode(data), public)
    bundle = bundle_path or bundle_path_of(path)
    if not bundle.is_file():
        if bundle_path is not None:
            raise NotFoundError(f"there is no file {bundle_path}", hint="labctl submit --verify")
        return Verified(receipt=verified, path=str(path), bundle="absent")
    with bundle.open("rb") as file:
        is_same = hashlib.file_digest(file, "sha256").hexdigest() == verified.bundle_sha256
    return Verified(receipt=verified, path=str(path), bundle="same" if is_same else "changed")
