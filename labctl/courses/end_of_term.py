"""What the end of a term asks of the course's other parts: hand-ins home, keys taken back."""

from __future__ import annotations

from pathlib import Path

from labctl.courses.collect import collect
from labctl.courses.keys import DEFAULT_FILE, Keys
from labctl.courses.servers import Staff
from labctl.courses.teardown import Collect, Revoke


def revoker(staff: Staff, file: Path | None = None) -> Revoke:
    """Takes every student's key, and every invitation, out of this machine's authorized_keys."""

    def revoke() -> int:
        keys = Keys(staff.folder, file or Path(DEFAULT_FILE))
        gone = keys.expel()
        if gone:
            why = "the end of the term: keys taken back"
            staff.folder.ledger.append("left", by=staff.by, why=why, students=gone)
        return len(gone)

    return revoke


def collector(staff: Staff) -> Collect:
    """Fetches what was handed in for an assignment, and holds it against its receipts."""

    def collect_one(name: str) -> str:
        found = collect(staff.folder, name, by=staff.by)
        missing = sum(one.state == "missing" for one in found.handed)
        told = [f"{len(found.here)} hand-ins are here and whole"]
        told += [f"{missing} seats handed nothing in"] if missing else []
        told += [f"{len(found.damaged)} ARE DAMAGED"] if found.damaged else []
        return ", ".join(told)

    return collect_one
