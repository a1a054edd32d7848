"""What the doorkeeper has put beside a request."""

from __future__ import annotations

from fastapi import Request

from labctl.dashboard.doorkeeper import Session
from labctl.dashboard.lens import Lens


def session_of(request: Request) -> Session:
    found: Session = request.scope["state"]["session"]
    return found


def lens_of(request: Request) -> Lens:
    return Lens(hidden=session_of(request).hidden)


def form_of(request: Request) -> dict[str, str]:
    """What the doorkeeper has read and found to be of this session."""
    found: dict[str, str] = request.scope["state"]["form"]
    return found


def own_path(text: str) -> str:
    """`text` where it is a path of this dashboard's; never another site."""
    good = text.startswith("/") and not text.startswith("//") and "\\" not in text
    return text if good and text.isprintable() else "/"
