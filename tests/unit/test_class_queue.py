"""What a class gets although Slurm refuses a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from labctl.commands import slurm_nodes
from labctl.courses import class_queue
from labctl.courses.class_queue import ClassQueue
from labctl.errors import BusyError, LabError
from labctl.events import Note

COURSE = SimpleNamespace(config=None, list_seats=list)
NOBODY = SimpleNamespace(list_all=list)


def update(monkeypatch: pytest.MonkeyPatch, error: LabError) -> tuple[int, list[Any]]:
    """Give a class its accounts while its hours cannot be reserved; also return what was said."""

    def refuse(*_: object) -> int:
        raise error

    said: list[Any] = []
    monkeypatch.setattr(class_queue, "update_accounting", lambda *_: 3)
    monkeypatch.setattr(ClassQueue, "reserve_hours", refuse)
    queue = ClassQueue(COURSE, NOBODY)  # type: ignore[arg-type]
    context = SimpleNamespace(reporter=SimpleNamespace(emit=said.append))
    return queue.update(context, None), said  # type: ignore[arg-type]


def test_students_get_in_although_their_hours_cannot_be_reserved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    changes, said = update(monkeypatch, LabError("Slurm refused it", why="nodes are reserved"))
    assert changes == 3
    (note,) = said
    assert isinstance(note, Note)
    assert note.level == "warning"
    assert note.text.startswith("class hours are not reserved in Slurm: ")


def test_slurm_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BusyError):
        update(monkeypatch, BusyError("no answer"))


def test_a_machine_without_jobs_is_named_with_the_reason_that_slurm_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = ["gpu2|drain|root|disk full", "gpu3|unk*|Unknown|none", "gpu4|down*|Unknown|rebooted"]
    output = "\n".join(["--- states", "gpu1|idle|Unknown|none", *states])
    monkeypatch.setattr(class_queue, "_run", lambda *_: output)
    notes: list[Any] = []
    context: Any = SimpleNamespace(reporter=SimpleNamespace(emit=notes.append))
    server: Any = SimpleNamespace(endpoint=SimpleNamespace(host="gpu1.lab.example"))
    ClassQueue(COURSE, NOBODY).report_unavailable(context, server)  # type: ignore[arg-type]
    assert [note.text.splitlines()[0] for note in notes] == [
        "Slurm starts no jobs on gpu2 (drain): disk full, by root",
        "Slurm starts no jobs on gpu3 (unk*)",
        "Slurm starts no jobs on gpu4 (down*): rebooted",
    ]
    assert slurm_nodes.build_resume("gpu3") in notes[1].text
