"""What a caller is told when a request is refused, and what a served model's owner is told."""

from __future__ import annotations


class RefusedError(Exception):
    """A request that is not answered. `status` is HTTP's, `reason` one word for programs.

    `image` is the number of the image that it is about, from 0; None where it is about no one.
    """

    def __init__(self, status: int, reason: str, message: str, *, image: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.message = message
        self.image = image


class ModelError(Exception):
    """The model cannot be served; the message says why and what to do."""
