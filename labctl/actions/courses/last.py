"""What the end of a term asks of the course's other parts: hand-ins home, keys taken back."""

from __future__ import annotations

from pathlib import Path

from labctl.actions.courses.ending import Collect, Revoke
from labctl.actions.courses.keys import DEFAULT_FILE, Keys
from labctl.actions.courses.servers import Staff
from labctl.errors import LabError
from labctl.submissions.receiver import Receiver


def revoker(staff: Staff, file: Path | None = None) -> Revoke:
    """Takes every student's key, and every invitation, out of this machine's authorized_keys."""

    def revoke() -> int:
        keys = Keys(staff.folder, file or Path(DEFAULT_FILE))
        gone = keys.expel()
        staff.folder.ledger.append(
            "left", by=staff.by, why="the end of the term", keys=len(gone)
        ) if gone else None
        return len(gone)

    return revoke


def collector(staff: Staff) -> Collect:
    """Checks that every hand-in of an assignment is whole, as the drop box's receipts say."""

    def collect(name: str) -> str:
        whole, bad = 0, []
        for found, why in Receiver(staff.folder.drop).check(name):
            if why:
                bad.append(f"{found if isinstance(found, str) else found.student}: {why}")
            else:
                whole += 1
        if bad:
            raise LabError(f"{len(bad)} hand-ins are not whole", why="\n".join(bad))
        return f"{whole} hand-ins, all whole"

    return collect
