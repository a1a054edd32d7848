"""The parts of a student's page: their server, runs, submissions and released feedback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from labctl.courses.records.regrade_requests import RegradeRequest, refuse_request
from labctl.errors import LabError
from labctl.model import Value
from labctl.submissions.feedback import Feedback
from labctl.submissions.receiver import Receiver
from labctl.web.live_updates import Draw, Parts
from labctl.web.pages import Pages
from labctl.web.student_actions import Standing, StudentActions
from labctl.web.view import AssignmentView, PersonView, SeatView, Snapshot, SubmissionView

# feedback shown on the page; the complete one is a page of its own
MOST_FEEDBACK = 2000


class BudgetView(Value, frozen=True):
    """What a seat's budget still buys: `left_s` of a server at `usd_per_hour`.

    None without a limit, or if servers are free.
    """

    usd_per_hour: float = 0.0
    left_usd: float | None = None
    left_s: float | None = None


class WorkView(Value, frozen=True):
    """A student's work on one assignment. Only what was released of a grade is in it.

    `closed_at` is when it closed; None while it accepts submissions.
    """

    assignment: AssignmentView
    student: str
    extension_s: int = 0
    submissions: tuple[SubmissionView, ...] = ()
    counting: SubmissionView | None = None
    score: float | None = None
    points: float | None = None
    number: int = 0
    feedback: str = ""
    regrades: tuple[RegradeRequest, ...] = ()
    can_ask_regrade: bool = False
    dropped: str = ""
    is_missing: bool = False
    closed_at: int | None = None


def is_usable(standing: Standing, seat: SeatView) -> bool:
    """Tell whether the seat's server is up, and not only its machine."""
    is_up = seat.machine is not None and seat.machine.state == "running"
    return is_up and not standing.starting


def can_write_files(standing: Standing, seat: SeatView) -> bool:
    """Tell whether the student uses the seat's own lab; those of labctl get files by `join`."""
    return seat.lab_id in dict(standing.labs)


class ReleasedFeedback:
    """The feedback that was released to students; a file is read again if it changed."""

    def __init__(self, drop: Path) -> None:
        self._receiver = Receiver(drop)
        self._cache: dict[tuple[str, str], tuple[tuple[int, int], Feedback]] = {}

    def read(self, assignment: str, student: str) -> Feedback | None:
        """Return a student's feedback without its page, or None before the release."""
        key = (assignment, student)
        try:
            stat = self._receiver.feedback_file(assignment, student).stat()
            stamp = (stat.st_mtime_ns, stat.st_size)
            if key not in self._cache or self._cache[key][0] != stamp:
                feedback = self._receiver.feedback(assignment, student)
                if feedback is None:
                    return None
                self._cache[key] = (stamp, feedback.without_page())
        except (OSError, LabError):
            return None
        return self._cache[key][1]


class StudentParts:
    """Draws the pages of students. A part is drawn again only if what it shows has changed."""

    def __init__(
        self, pages: Pages, actions: StudentActions, drop: Path, *, has_services: bool
    ) -> None:
        self._pages = pages
        self._has_services = has_services
        self._actions = actions
        self._feedback = ReleasedFeedback(drop)
        # (student, part) -> what was drawn, and its HTML
        self._drawn: dict[tuple[str, str], tuple[tuple[object, ...], str]] = {}

    def draw(self, student: str) -> Draw:
        """Return the function that draws a student's page; of one who has no seat, only `gone`."""

        def draw(snapshot: Snapshot) -> Parts:
            person = snapshot.person_by_id.get(student)
            seat = snapshot.seat_by_key.get(person.seat) if person is not None else None
            if person is None or seat is None:
                return {"gone": self._render(student, "gone")}
            standing = self._actions.find_standing(student, seat)
            budget = self.compute_budget(seat)
            is_up = is_usable(standing, seat)
            can_submit = is_up and bool(seat.runs or standing.labs)
            can_get_files = is_up and can_write_files(standing, seat)
            work = tuple(self._make_work(one, person, snapshot.at) for one in snapshot.assignments)
            return {
                "server": self._render(
                    student, "server", seat, standing, is_up, budget, self._has_services
                ),
                "runs": self._render(student, "runs", seat),
                "work": self._render(
                    student,
                    "work",
                    work,
                    seat.team,
                    is_up,
                    can_submit,
                    can_get_files,
                    person.totals.released,
                ),
            }

        return draw

    def compute_budget(self, seat: SeatView) -> BudgetView:
        """Compute what the seat's budget still buys, at the price of its server or of the next."""
        offer = self._actions.find_offer()
        price = offer.price_usd_per_hour if offer is not None else 0.0
        if seat.machine is not None and seat.machine.bills:
            price = seat.machine.usd_per_hour
        if seat.budget_usd is None:
            return BudgetView(usd_per_hour=price)
        left_usd = max(0.0, seat.budget_usd - seat.spent_usd)
        left_s = round(left_usd / price * 60) * 60.0 if price else None
        return BudgetView(usd_per_hour=price, left_usd=left_usd, left_s=left_s)

    def _make_work(self, due: AssignmentView, person: PersonView, at: float) -> WorkView:
        feedback = self._feedback.read(due.name, person.id)
        regrades = person.list_regrades(due.name)
        total = person.totals.released
        dropped = total.find_dropped(due.name) if total else None
        closes_at = due.find_closing(person.id)
        return WorkView(
            assignment=due,
            student=person.id,
            extension_s=due.extensions.get(person.id, 0),
            submissions=tuple(one for one in person.hand_ins if one.assignment == due.name),
            counting=person.find_counting(due.name),
            score=feedback.score if feedback else None,
            points=feedback.points if feedback else due.points,
            number=feedback.number if feedback else 0,
            feedback=feedback.text[:MOST_FEEDBACK] if feedback else "",
            regrades=regrades,
            can_ask_regrade=feedback is not None and not refuse_request(regrades),
            dropped=dropped.reason if dropped else "",
            is_missing=total is not None and due.name in total.missing,
            closed_at=closes_at if closes_at is not None and int(at) > closes_at else None,
        )

    def _render(self, student: str, part: str, *values: Any) -> str:
        key = (student, part)
        before = self._drawn.get(key)
        if before is None or before[0] != values:
            html = self._pages.render_part("student_parts", part, *values)
            before = self._drawn[key] = (values, html)
        return before[1]
