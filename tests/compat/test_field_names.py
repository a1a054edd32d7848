"""Fields whose names in Python changed keep the names under which files and replies have them."""

from __future__ import annotations

import msgspec
import pytest

from labctl.courses.grading.record import GradeRecord
from labctl.insight.explain.evidence import Evidence
from labctl.lifecycle.lab_archive import LabExport
from labctl.lifecycle.recover import Recovery
from labctl.model import Run, Value
from labctl.runs.evaluation import ClassMetrics, Mistake


@pytest.mark.parametrize(
    ("kind", "field", "name"),
    [
        (Run, "summary", "told"),
        (Recovery, "reason", "told"),
        (GradeRecord, "message", "told"),
        (GradeRecord, "has_output", "said"),
        (Evidence, "text", "said"),
        (Evidence, "source", "of"),
        (Mistake, "predicted", "said"),
        (ClassMetrics, "predicted", "said"),
        (LabExport, "kept_lab", "ward"),
    ],
)
def test_a_renamed_field_keeps_its_name_in_json(kind: type[Value], field: str, name: str) -> None:
    names = {each.name: each.encode_name for each in msgspec.structs.fields(kind)}
    assert names[field] == name


def test_a_run_is_stored_as_before() -> None:
    run = Run(id="r1", lab_id="l", server_id="s", state="exited", summary="done")
    assert msgspec.to_builtins(run)["told"] == "done"
    stored = b'{"id":"r1","lab_id":"l","server_id":"s","state":"exited","told":"done"}'
    assert msgspec.json.decode(stored, type=Run) == run
