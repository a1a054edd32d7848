"""What the middlewares have put beside a request."""

from __future__ import annotations

from fastapi import Request

from labctl.web.auth import Session
from labctl.web.pseudonyms import Lens


def session_of(request: Request) -> Session:
    session: Session = request.scope["state"]["session"]
    return session


def lens_of(request: Request) -> Lens:
    return Lens(hidden=session_of(request).hidden)


def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that bore its session's token."""
    form: dict[str, str] = request.scope["state"]["form"]
    return form


def own_path(text: str) -> str:
    """`text` where it is a path of this dashboard's; never another site."""
    good = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if good and text.isprintable() else "/"
