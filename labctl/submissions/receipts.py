"""Receipts here: kept beside the bundles that they are for, fetched again, verified.

.labctl/submissions/<assignment>/bundle-0001.tar     what was handed in
.labctl/submissions/<assignment>/receipt-0001.json   what its receiver signed
.labctl/submissions/<assignment>/feedback.html       what was released of its grade
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from labctl.errors import NotFoundError, PolicyError
from labctl.model import Value
from labctl.submissions import posting, receipt
from labctl.submissions.assignment import Assignment
from labctl.submissions.feedback import Feedback
from labctl.submissions.receipt import Receipt, Signed
from labctl.submissions.receiver_host import ReceiverHost


class Verified(Value, frozen=True):
    """A receipt whose signature holds, and how the bundle here fits it ("absent": none is)."""

    receipt: Receipt
    path: str
    bundle: Literal["same", "changed", "absent"]


def folder(root: Path, name: str) -> Path:
    """Where an assignment's bundles and receipts lie in a lab's directory."""
    return root / ".labctl" / "submissions" / name


def bundle_beside(path: Path) -> Path:
    """Where the bundle of a receipt lies."""
    return path.with_name(path.name.replace("receipt-", "bundle-", 1)).with_suffix(".tar")


def posted_as(place: Path, sha256: str) -> Path:
    """Where a bundle waits that was posted and has no receipt yet."""
    return place / f"posted-{sha256[:12]}.tar"


def keep(root: Path, rules: Assignment, signed: Signed, *, sha256: str = "") -> Path:
    """Verify a receipt and write it; PolicyError where it is not what its receiver must sign."""
    found = receipt.verify(signed, rules.receiver)
    if found.assignment != rules.name or (sha256 and found.bundle_sha256 != sha256):
        raise PolicyError(
            "the receipt is for something else",
            why="labctl did not hand that in",
            hint="tell your instructor; then: labctl submit",
        )
    place = folder(root, rules.name)
    place.mkdir(parents=True, exist_ok=True)
    path = place / f"receipt-{found.number:04}.json"
    draft = path.with_suffix(".new")
    draft.write_bytes(receipt.encode(signed))
    draft.replace(path)
    posted = posted_as(place, found.bundle_sha256)
    if posted.is_file() and not bundle_beside(path).exists():
        posted.replace(bundle_beside(path))
    return path


def fetch(
    root: Path, rules: Assignment, host: ReceiverHost | None
) -> tuple[list[tuple[Path, Receipt]], list[str]]:
    """(receipts, now kept here, each verified; what was refused and why).

    `host` is None for an assignment that is handed in through a bucket.
    """
    refused: list[str] = []
    if host is not None:
        found = host.receipts()
    else:
        assert rules.ticket is not None
        answers = posting.answers(rules.ticket)
        found = list(answers.receipts)
        refused = [f"{one.at} {one.sha256[:12]}: {one.why}" for one in answers.refused]
    return [(keep(root, rules, signed), signed.receipt) for signed in found], refused


def fetch_feedback(
    root: Path, rules: Assignment, host: ReceiverHost | None
) -> tuple[Feedback, Path]:
    """What was released of the grade, and its page, now kept here; NotFoundError before that."""
    if host is None:
        raise NotFoundError(
            f"{rules.name} is handed in through a bucket, which brings no grade back",
            hint="ask your instructor for it",
        )
    found = host.feedback()
    if found is None:
        raise NotFoundError(
            f"nothing of your grade for {rules.name} has been released yet",
            hint="labctl submit --receipts   # what you have handed in",
        )
    place = folder(root, rules.name)
    place.mkdir(parents=True, exist_ok=True)
    path = place / "feedback.html"
    draft = path.with_suffix(".new")
    draft.write_text(found.page, encoding="utf-8")
    draft.replace(path)
    return found, path


def last(root: Path, rules: Assignment) -> Path:
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
    place = bundle_path or bundle_beside(path)
    if not place.is_file():
        if bundle_path is not None:
            raise NotFoundError(f"there is no {bundle_path}", hint="labctl submit --verify")
        return Verified(receipt=found, path=str(path), bundle="absent")
    with place.open("rb") as file:
        same = hashlib.file_digest(file, "sha256").hexdigest() == found.bundle_sha256
    return Verified(receipt=found, path=str(path), bundle="same" if same else "changed")
