"""What is to be marked in a seat's submission: items without a mark, or with an older one. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from labctl.courses.records.folder import Seat
from labctl.courses.records.gradebook import Grade, outdated_text, points_text
from labctl.courses.records.marks import ItemMark, RubricItem
from labctl.model import Value


class MarkingTask(Value, frozen=True):
    """A seat whose students need marks. `items` are those that any of them needs.

    `unmarked` are the students who need a mark for each item: they have none, or one for an older
    submission. `outdated` has such marks by item.
    """

    seat: str
    students: tuple[str, ...]
    number: int
    items: tuple[RubricItem, ...]
    unmarked: dict[str, tuple[str, ...]]
    outdated: dict[str, tuple[ItemMark, ...]] = msgspec.field(default_factory=dict)

    @property
    def outdated_text(self) -> str:
        """Name the items that were marked for an older submission; "" without any."""
        return outdated_text(self.number, self.outdated)

    def find_mark_to_keep(self, item: RubricItem) -> ItemMark | None:
        """Return an item's outdated mark if all who need a mark have the same one, else None."""
        marks = self.outdated.get(item.name, ())
        is_same = len({(mark.points, mark.note) for mark in marks}) == 1
        return marks[0] if is_same and len(marks) == len(self.unmarked[item.name]) else None

    def describe_item(self, item: RubricItem) -> str:
        """Return an item's name, and who needs a mark unless all of the seat's students do."""
        names = self.unmarked[item.name]
        return item.name if names == self.students else f"{item.name} of {', '.join(names)}"


def make_marking_task(seat: Seat, grades: Sequence[Grade]) -> MarkingTask | None:
    """Return what is to be marked in these grades of a seat; None if nothing is."""
    unmarked: dict[str, tuple[str, ...]] = {}
    outdated: dict[str, tuple[ItemMark, ...]] = {}
    for grade in grades:
        for name in grade.items_to_mark:
            unmarked[name] = (*unmarked.get(name, ()), grade.student)
        for name, mark in grade.outdated_marks.items():
            outdated[name] = (*outdated.get(name, ()), mark)
    if not unmarked:
        return None
    return MarkingTask(
        seat=seat.name,
        students=tuple(grade.student for grade in grades),
        number=max(grade.stamp.number for grade in grades),
        items=tuple(item for item in grades[0].items if item.name in unmarked),
        unmarked=unmarked,
        outdated=outdated,
    )


def describe_tasks(tasks: Sequence[MarkingTask]) -> Iterable[tuple[str, str, str, str]]:
    """Return the seat, the number of the submission, what to mark, and why again, for each task."""
    for task in tasks:
        items = [f"{task.describe_item(item)} ({points_text(item.points)})" for item in task.items]
        yield task.seat, str(task.number or ""), ", ".join(items), task.outdated_text
