"""Signing in to the page for students, and out of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response

from labctl.errors import ConnectError, LabError, NotFoundError, PolicyError
from labctl.web.pages import Pages
from labctl.web.request_state import form_of
from labctl.web.student_access import (
    BEGIN,
    DONE,
    ENDED,
    SIGN_IN,
    UNSENT,
    StudentAccess,
    StudentSession,
    session_of,
)
from labctl.web.web_site import add_routes

if TYPE_CHECKING:
    from labctl.web.institution_sign_in import InstitutionSignIn

SESSION_ENDED = {
    ENDED: PolicyError("your session has ended", why="sign in again"),
    UNSENT: PolicyError(
        "your session has ended, and nothing was sent",
        why="sign in again; this tab keeps the text of a regrade request",
    ),
}


class StudentSignIn:
    """The routes of signing in by join code or, if there is one, at the institution."""

    def __init__(
        self, pages: Pages, access: StudentAccess, institution: InstitutionSignIn | None
    ) -> None:
        self._pages = pages
        self._access = access
        self._institution = institution

    def add_to(self, app: FastAPI) -> None:
        pages = {
            SIGN_IN: self.show_sign_in,
            BEGIN: self.begin_institution,
            DONE: self.finish_institution,
        }
        add_routes(app, "GET", pages)
        add_routes(app, "POST", {SIGN_IN: self.sign_in, "/sign-out": self.sign_out})

    async def show_sign_in(self, request: Request) -> Response:
        reasons = (one for name, one in SESSION_ENDED.items() if name in request.query_params)
        return self._render_sign_in(request, next(reasons, None))

    async def sign_in(self, request: Request) -> Response:
        form = form_of(request)
        student, code = form.get("student", "").strip(), form.get("code", "").strip().lower()
        address = request.client.host if request.client else ""
        try:
            data = self._access.sign_in(student, code, address)
        except PolicyError as error:
            return self._render_sign_in(request, error, student, status=403)
        return _begin_session(request, data)

    async def begin_institution(self, request: Request) -> Response:
        try:
            return await self._require_institution().begin(request)
        except ConnectError as error:
            return self._render_sign_in(request, error, status=502)

    async def finish_institution(self, request: Request) -> Response:
        institution = self._require_institution()
        try:
            data = self._access.sign_in_by_email(await institution.finish(request))
        except (ConnectError, PolicyError) as error:
            status = 502 if isinstance(error, ConnectError) else 403
            return self._render_sign_in(request, error, status=status)
        return _begin_session(request, data)

    def _require_institution(self) -> InstitutionSignIn:
        if self._institution is None:
            raise NotFoundError("this page does not exist")
        return self._institution

    async def sign_out(self, request: Request) -> Response:
        self._access.sign_out(session_of(request).id)
        request.session.clear()
        return RedirectResponse(SIGN_IN, 303)

    def _render_sign_in(
        self,
        request: Request,
        error: LabError | None = None,
        student: str = "",
        status: int = 200,
    ) -> Response:
        session = StudentSession(id="", csrf="")
        frame = {"course": "labctl", "session": session, "messages": [], "stream": ""}
        page = self._pages.render(
            "student_sign_in",
            **frame,
            error=error,
            student=student,
            institution=BEGIN if self._institution is not None else "",
        )
        return HTMLResponse(page, status)


def _begin_session(request: Request, data: dict[str, object]) -> Response:
    request.session.clear()
    request.session.update(data)
    return RedirectResponse("/", 303)
