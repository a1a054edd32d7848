"""What a class gets although Slurm refuses a part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

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
