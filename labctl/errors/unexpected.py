"""Errors that nobody expected, in a worker whose failure must stop nothing else."""

from __future__ import annotations

import traceback
from collections.abc import Callable

from labctl.errors import LabError


def as_lab_error(error: Exception, log: Callable[[str], None]) -> LabError:
    """The error itself where it is labctl's own. Of any other the log gets the traceback, and
    whoever waits for the worker a LabError that names its kind and no path of this machine."""
    if isinstance(error, LabError):
        return error
    log("unexpected error:\n" + "".join(traceback.format_exception(error)).rstrip())
    return LabError(
        "an unexpected error ended this step",
        why=f"a bug or a fault of this machine: {type(error).__name__}",
        hint="try again; if it stays, the log where this ran has the details",
    )
