"""The specification of a run, as its directory stores it."""

from __future__ import annotations

from pathlib import Path

from ...wire.codec import MessageError, from_json
from ...wire.runs import RunSpec
from ..host.paths import read_json
from ..reply import Failure


def read_spec(directory: Path) -> RunSpec:
    """Read a run's specification, with empty fields where a damaged file lacks them."""
    empty = {"id": directory.name, "lab": "", "lab_id": "", "command": [], "image": "", "env": {}}
    try:
        return from_json(RunSpec, {**empty, **read_json(directory / ".labctl" / "spec.json")})
    except MessageError as error:
        what = f"the specification of run {directory.name} on this server is damaged"
        raise Failure("server", what, str(error), "labctl doctor") from None
