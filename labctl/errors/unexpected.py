"""Unexpected errors in a worker whose failure must not stop anything else."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from labctl.errors import LabError


def as_lab_error(error: Exception, log: Callable[[str], None]) -> LabError:
    """Return a LabError as it is; turn any other error into one.

    The traceback of an unexpected error goes to `log`. The returned error, which may be shown to
    users on other machines, names its kind and no path of this machine.
    """
    if isinstance(error, LabError):
        return error
    log("unexpected error:\n" + "".join(traceback.format_exception(error)).rstrip())
    return LabError(
        "an unexpected error ended this step",
        why=f"a bug or a fault of this machine: {type(error).__name__}",
        hint="try again; if it happens again, see the log on the machine where this ran",
    )
