"""Values that the middlewares store with a request."""

from __future__ import annotations

from fastapi import Request

from labctl.web.auth import Session
from labctl.web.pseudonyms import Pseudonyms


def session_of(request: Request) -> Session:
    session: Session = request.scope["state"]["session"]
    return session


def pseudonyms_of(request: Request) -> Pseudonyms:
    return Pseudonyms(hidden=session_of(request).hidden)


def form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form whose token was checked."""
    form: dict[str, str] = request.scope["state"]["form"]
    return form


def sanitize_path(text: str) -> str:
    """Return `text` if it is a path of this dashboard, else "/"; never the address of a site."""
    is_path = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if is_path and text.isprintable() else "/"
