"""The page on which staff marks one submission: its files beside the rubric.

Everything that it changes, the command line can change too, with the same functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Literal, TypeVar

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from labctl.courses import commenting, rubric_form
from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.rubric_form import ItemEdit, SavedMarks
from labctl.courses.submission_files import require_submission
from labctl.errors import LabError, UsageError
from labctl.model import Value
from labctl.web.downloads import SANDBOX
from labctl.web.marking_view import MarkingReader, MarkingView, describe_error
from labctl.web.pseudonyms import Pseudonyms
from labctl.web.request_state import form_of, pseudonyms_of, sanitize_path, session_of
from labctl.web.responses import POLICY
from labctl.web.view import Snapshot

if TYPE_CHECKING:
    from labctl.web.app import Dashboard

Result = TypeVar("Result")
# The page shows the report in a frame, which only this page may do.
FRAME_POLICY = f"{POLICY}; frame-src 'self'"
REPORT_HEADERS = {
    "content-security-policy": SANDBOX.replace("frame-ancestors 'none'", "frame-ancestors 'self'"),
    "x-frame-options": "SAMEORIGIN",
}
# characters of a person's name in the ledger, as with labctl course --as
MAX_PERSON = 64


Change = Callable[[CourseFolder, Seat], Result]


class FormView(Value, frozen=True):
    """What the forms of the page show besides the stored values.

    `saved` says what an action of the form `about` did, `problem` why it was refused. `edits` are
    what was changed in the rubric and not saved, by item, and `item_problems` say what is wrong
    with it. `comment` and `line` were typed for a comment that was not saved, `answers` for regrade
    requests, by what `read_answers` names them.
    """

    about: Literal["marks", "comments", "regrades"] = "marks"
    saved: str = ""
    problem: str = ""
    edits: Mapping[str, ItemEdit] = {}
    item_problems: Mapping[str, str] = {}
    comment: str = ""
    line: str = ""
    answers: Mapping[str, str] = {}

    @property
    def status(self) -> int:
        return 409 if self.problem else 200


REFUSED_COMMENT = FormView(about="comments")


class MarkingPages:
    """The routes of the page for marking."""

    def __init__(self, dashboard: Dashboard, reader: MarkingReader) -> None:
        self._dashboard = dashboard
        self._reader = reader

    def add_to(self, app: FastAPI) -> None:
        page = "/assignments/{name}/marking/{key}"
        for path, show in (
            ("/assignments/{name}/marking", self.show_next),
            (page, self.show),
            (f"{page}/next", self.show_next),
            (f"{page}/report", self.send_report),
        ):
            app.add_api_route(path, show, methods=["GET"], response_class=Response)
        for path, change in (
            ("/person", self.set_person),
            (f"{page}/marks", self.save_marks),
            (f"{page}/comments", self.add_comment),
            (f"{page}/comments/remove", self.remove_comment),
            (f"{page}/comments/forget", self.forget_comment),
        ):
            app.add_api_route(path, change, methods=["POST"], response_class=Response)

    # pages

    async def show_next(self, request: Request, name: str, key: str = "") -> Response:
        return RedirectResponse(await self._find_next(request, name, key), 303)

    async def _find_next(self, request: Request, name: str, key: str) -> str:
        """Return the address of the next submission with unmarked items, or of the assignment.

        Without `key` it is that of the first submission, with unmarked items if any has.
        """
        hidden = session_of(request).hidden
        place = await asyncio.to_thread(self._reader.find_place, name, key, hidden=hidden)
        if found := place.next_unmarked or ("" if key else place.next):
            return f"/assignments/{name}/marking/{found}"
        text = "Every other submission is marked." if key else "Nothing was submitted yet."
        self._dashboard.messages.setdefault(session_of(request).id, []).append(("good", text))
        return f"/assignments/{name}"

    async def show(
        self, request: Request, name: str, key: str, file: int | None = None
    ) -> Response:
        return await self.draw(request, name, key, file, FormView())

    async def draw(
        self, request: Request, name: str, key: str, file: int | None, form: FormView
    ) -> Response:
        snapshot = await self._dashboard.feed.read_snapshot()
        pseudonyms = pseudonyms_of(request)
        view = await asyncio.to_thread(self._reader.read, name, key, file, hidden=pseudonyms.hidden)
        response = self._dashboard.render_page(
            request,
            snapshot,
            "marking",
            title=_describe_seat(snapshot, view, pseudonyms),
            view=view,
            form=form,
            base=f"/assignments/{name}/marking/{key}",
            here=name,
        )
        response.status_code = form.status
        response.headers["content-security-policy"] = FRAME_POLICY
        return response

    async def send_report(self, request: Request, name: str, key: str) -> Response:
        content = await asyncio.to_thread(self._reader.read_report, name, key)
        return Response(content, media_type="text/html; charset=utf-8", headers=REPORT_HEADERS)

    # changes

    async def set_person(self, request: Request) -> Response:
        form = form_of(request)
        person = form.get("person", "").strip()
        if not person or len(person) > MAX_PERSON or not person.isprintable():
            raise UsageError(
                "this is not a person's name", why=f"a name has 1 to {MAX_PERSON} characters"
            )
        request.session["person"] = person
        return RedirectResponse(sanitize_path(form.get("back", "/")), 303)

    async def save_marks(self, request: Request, name: str, key: str) -> Response:
        form = form_of(request)
        edits = {edit.item: edit for edit in read_edits(form)}

        def save(folder: CourseFolder, seat: Seat) -> SavedMarks:
            return rubric_form.save_marks(
                folder,
                name,
                seat.name,
                list(edits.values()),
                by=require_person(request),
                bundle_sha256=form.get("bundle", ""),
            )

        file = parse_number(form.get("file", ""))
        changed = {item: edit for item, edit in edits.items() if edit.is_change}
        answers = read_answers(form)
        refused = FormView(edits=changed, answers=answers, problem="Nothing was saved.")
        try:
            result = await asyncio.to_thread(self._reader.change, name, key, save)
        except LabError as error:
            refused = msgspec.structs.replace(refused, problem=describe_error(error))
            return await self.draw(request, name, key, file, refused)
        if result.problems or result.conflicts:
            refused = msgspec.structs.replace(refused, item_problems=result.problems)
            return await self.draw(request, name, key, file, refused)
        return await self._confirm_marks(request, name, key, result)

    async def _confirm_marks(
        self, request: Request, name: str, key: str, result: SavedMarks
    ) -> Response:
        """Draw the page with what was saved, or lead to the next submission."""
        form = form_of(request)
        if form.get("then") == "next":
            address = await self._find_next(request, name, key)
            if "hx-request" in request.headers:
                return Response(status_code=204, headers={"hx-redirect": address})
            return RedirectResponse(address, 303)
        saved = f"Saved: {', '.join(result.saved)}." if result.saved else "Nothing had changed."
        file = parse_number(form.get("file", ""))
        return await self.draw(
            request, name, key, file, FormView(saved=saved, answers=read_answers(form))
        )

    async def add_comment(self, request: Request, name: str, key: str) -> Response:
        form = form_of(request)
        text, line = form.get("text", ""), form.get("line", "")

        def add(folder: CourseFolder, seat: Seat) -> str:
            person, number = require_person(request), parse_number(line)
            if number is None:
                raise UsageError("the comment has no line")
            require_submission(folder, name, seat, form.get("bundle", ""))
            path = self._reader.find_path(folder, name, seat, parse_number(form.get("file", "")))
            comment = commenting.add_comment(
                folder,
                name,
                seat.name,
                (path, number),
                text,
                by=person,
                bundle_sha256=form.get("bundle", ""),
            )
            if form.get("reuse"):
                commenting.save_comment(folder, text, by=person)
            return f"Commented on {comment.place}."

        typed = FormView(about="comments", comment=text, line=line)
        return await self._change_comments(request, name, key, add, typed)

    async def remove_comment(self, request: Request, name: str, key: str) -> Response:
        comment_id = parse_number(form_of(request).get("id", "")) or 0

        def remove(folder: CourseFolder, seat: Seat) -> str:
            person = require_person(request)
            comment = commenting.remove_comment(folder, name, comment_id, by=person)
            return f"Removed the comment on {comment.place}."

        return await self._change_comments(request, name, key, remove, REFUSED_COMMENT)

    async def forget_comment(self, request: Request, name: str, key: str) -> Response:
        comment_id = parse_number(form_of(request).get("id", "")) or 0

        def forget(folder: CourseFolder, seat: Seat) -> str:
            commenting.forget_comment(folder, comment_id, by=require_person(request))
            return "Removed the saved comment."

        return await self._change_comments(request, name, key, forget, REFUSED_COMMENT)

    async def _change_comments(
        self,
        request: Request,
        name: str,
        key: str,
        change: Change[str],
        typed: FormView,
    ) -> Response:
        """Change comments, and draw the page; as `typed` if the change was refused."""
        file = parse_number(form_of(request).get("file", ""))
        try:
            saved = await asyncio.to_thread(self._reader.change, name, key, change)
        except LabError as error:
            typed = msgspec.structs.replace(typed, problem=describe_error(error))
            return await self.draw(request, name, key, file, typed)
        done = FormView(about="comments", saved=saved)
        return await self.draw(request, name, key, file, done)


def require_person(request: Request) -> str:
    person = session_of(request).person
    if not person:
        raise UsageError("enter your name first", why="the ledger records who gave a mark")
    return person


def read_edits(form: Mapping[str, str]) -> Iterator[ItemEdit]:
    """Yield what a form has for each item of the rubric."""
    for field, points in form.items():
        kind, _, item = field.partition("-")
        if kind != "points":
            continue
        yield ItemEdit(
            item=item,
            points=points.strip().replace(",", "."),
            note=_read_text(form, f"note-{item}"),
            shown=(form.get(f"shown-points-{item}", ""), _read_text(form, f"shown-note-{item}")),
            version=form.get(f"version-{item}", ""),
            is_confirmed=f"confirm-{item}" in form,
        )


def read_answers(form: Mapping[str, str]) -> dict[str, str]:
    """Return what was typed as answers to regrade requests, by the name of the field."""
    return {
        field: _read_text(form, field)
        for field, text in form.items()
        if field.startswith("answer-") and text.strip()
    }


def _read_text(form: Mapping[str, str], field: str) -> str:
    """Return a text as it was before a browser sent it, with its line ends."""
    return form.get(field, "").replace("\r\n", "\n").strip()


def parse_number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _describe_seat(snapshot: Snapshot, view: MarkingView, pseudonyms: Pseudonyms) -> str:
    """Return the heading: the names of the seat's students, or its pseudonym."""
    if pseudonyms.hidden:
        return view.seat.pseudonym
    people = [snapshot.person_by_id.get(student) for student in view.seat.students]
    names = [pseudonyms.person(person) for person in people if person is not None]
    return ", ".join(names) or view.seat.name
