"""The questions before a course's servers end: what ends, and what is lost or revoked."""

from __future__ import annotations

from collections.abc import Sequence

from labctl.courses.leftovers import list_lab_ids
from labctl.courses.servers import ENDED, CourseOperator
from labctl.errors import PolicyError
from labctl.events import Question, report_wait
from labctl.model import Server, Value
from labctl.text import count_text, price_text

SAVES = "runs are canceled; every result and the files in home directories are downloaded first"
LOSES = "Results that were not downloaded will be LOST. "


class AccessCount(Value, frozen=True):
    """How many students have keys to the course's keeper, and how many invitations are open."""

    students: int = 0
    invitations: int = 0


NO_ACCESS = AccessCount()


def require_consent(staff: CourseOperator, servers: Sequence[Server], *, discard: bool) -> None:
    """Ask whether these servers may end; PolicyError if not."""
    count = _count_servers(servers)
    lost = LOSES if discard else ""
    question = f"{lost}end {count} of {staff.folder.config.name} ({_total_price_text(servers)})?"
    detail = "" if discard else SAVES
    if not staff.reporter.confirm(Question(question=question, detail=detail)):
        why = f"still running: {count} ({_total_price_text(servers)})"
        raise PolicyError("nothing was ended", why=why)


def require_term_consent(staff: CourseOperator, access: AccessCount, *, discard: bool) -> None:
    """Ask whether the course may end, naming everything that this does; PolicyError if not."""
    course, ours = staff.course(everywhere=True, plain=True), list_lab_ids(staff)
    with report_wait(staff.reporter, f"listing the servers at {course.provider.name}"):
        listed = course.provider.servers()
    servers = [one for one in listed if one.lab_id in ours and one.state not in ENDED]
    running = f"{_count_servers(servers)} ({_total_price_text(servers)})" if servers else ""
    revoked = [f"the keys of {count_text(access.students, 'student')}"] if access.students else []
    if access.invitations:
        revoked.append(count_text(access.invitations, "open invitation"))
    actions = [
        "collect all submissions",
        f"end {running}" if running else "",
        f"revoke {' and '.join(revoked)}" if revoked else "",
        "remove the course's images, caches and timers, and disks whose results are downloaded",
    ]
    question = f"{LOSES if discard else ''}end the course {staff.folder.config.name}?"
    detail = "This will:\n" + "\n".join(f"- {action}" for action in actions if action)
    if running and not discard:
        detail = f"{detail}\n{SAVES.capitalize()}."
    if not staff.reporter.confirm(Question(question=question, detail=detail)):
        why = f"still running: {running}" if running else "no key was revoked"
        raise PolicyError("nothing was ended", why=why)


def _count_servers(servers: Sequence[Server]) -> str:
    return f"{len(servers)} servers" if len(servers) > 1 else "one server"


def _total_price_text(servers: Sequence[Server]) -> str:
    usd_per_hour = sum(server.offer.price_usd_per_hour for server in servers)
    return price_text(usd_per_hour) if usd_per_hour else "free"
