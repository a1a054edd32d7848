"""The answers to regrade requests on the page for marking, alone or with changed marks."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from labctl.courses.records.folder import CourseFolder, Seat
from labctl.courses.regrades import answer_with_marks, prepare_answer
from labctl.courses.rubric_form import SavedMarks
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.web.marking_page import (
    FormView,
    MarkingPages,
    parse_number,
    read_answers,
    read_edits,
    require_person,
)
from labctl.web.marking_view import MarkingReader, describe_error
from labctl.web.request_state import form_of

ACCEPT, DECLINE = "accept", "decline"


class RegradeAnswers:
    """The route that answers a regrade request."""

    def __init__(self, pages: MarkingPages, reader: MarkingReader) -> None:
        self._pages = pages
        self._reader = reader

    def add_to(self, app: FastAPI) -> None:
        path = "/assignments/{name}/marking/{key}/regrades"
        app.add_api_route(path, self.answer, methods=["POST"], response_class=Response)

    async def answer(self, request: Request, name: str, key: str) -> Response:
        """Answer a request; accepting it also saves what was changed in the rubric."""
        form = form_of(request)
        changed = {edit.item: edit for edit in read_edits(form) if edit.is_change}
        answers, decision = read_answers(form), form.get("decision", "")
        student_key, number = form.get("student", ""), parse_number(form.get("number", "")) or 0

        def answer(folder: CourseFolder, seat: Seat) -> SavedMarks:
            if decision not in (ACCEPT, DECLINE):
                raise UsageError("choose Accept or Decline")
            person = require_person(request)
            prepared = prepare_answer(
                folder,
                name,
                _find_student(folder, seat, student_key),
                answers.get(f"answer-{student_key}-{number}", ""),
                accepted=decision == ACCEPT,
                by=person,
                number=number,
            )
            edits = list(changed.values()) if decision == ACCEPT else []
            bundle = form.get("bundle", "")
            return answer_with_marks(
                folder, name, seat.name, prepared, edits, by=person, bundle_sha256=bundle
            )

        refused = FormView(about="regrades", edits=changed, answers=answers)
        file = parse_number(form.get("file", ""))
        try:
            result = await asyncio.to_thread(self._reader.change, name, key, answer)
        except LabError as error:
            problem = f"{describe_error(error)} Nothing was saved."
            return await self._pages.draw(request, name, key, file, _change(refused, problem))
        if result.problems or result.conflicts:
            refused = _change(refused, "Nothing was saved: see the rubric.", result.problems)
            return await self._pages.draw(request, name, key, file, refused)
        answers.pop(f"answer-{student_key}-{number}", None)
        done = FormView(
            about="regrades",
            saved=_describe_answer(name, decision, result),
            edits={} if decision == ACCEPT else changed,
            answers=answers,
        )
        return await self._pages.draw(request, name, key, file, done)


def _change(view: FormView, problem: str, item_problems: Mapping[str, str] = {}) -> FormView:
    return msgspec.structs.replace(view, problem=problem, item_problems=item_problems)


def _find_student(folder: CourseFolder, seat: Seat, key: str) -> str:
    for student in seat.students:
        if folder.pseudonym(student) == key:
            return student
    raise NotFoundError("this student does not have this seat")


def _describe_answer(assignment: str, decision: str, result: SavedMarks) -> str:
    if decision == DECLINE:
        return "Declined. The student reads your answer."
    marks = f"Saved: {', '.join(result.saved)}. " if result.saved else ""
    return (
        f"Accepted. {marks}The student reads your answer now, and a changed grade after the next "
        f"release: labctl course grades {assignment} --release"
    )
