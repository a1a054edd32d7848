"""The errors of the server: refused requests, and models that cannot be served."""

from __future__ import annotations


class RefusedError(Exception):
    """A refused request. `status` is HTTP's, `reason` a word for programs.

    `image` is the number of the image that caused it, from 0; None if it is not about one image.
    """

    def __init__(self, status: int, reason: str, message: str, *, image: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.image = image


class ModelError(Exception):
    """The model cannot be served; the message says why and what to do."""
