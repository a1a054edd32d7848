"""The pages: each is drawn as parts, pieces of HTML by their id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection
from pathlib import Path
from types import CodeType
from typing import Any

from jinja2 import BytecodeCache, DictLoader, Environment, StrictUndefined
from jinja2.bccache import Bucket
from markupsafe import Markup

from labctl.config.scalars import limit_text
from labctl.text import price_text
from labctl.web import formatting
from labctl.web.listing import (
    PERSON_MARKS,
    SEAT_MARKS,
    ListView,
    arrange,
    count_seats,
    person_marks,
    person_sort_keys,
    seat_sort_keys,
)
from labctl.web.live_updates import Draw, Parts
from labctl.web.pseudonyms import Pseudonyms
from labctl.web.submission_list import parse_received_at
from labctl.web.view import AssignmentView, PersonView, SeatView, Snapshot

STATIC = {
    "dashboard.css": "text/css",
    "vendored/htmx.min.js": "text/javascript",
    "vendored/sse.min.js": "text/javascript",
    "vendored/xterm.js": "text/javascript",
    "vendored/xterm.css": "text/css",
    "vendored/addon-fit.js": "text/javascript",
    "terminal.js": "text/javascript",
    "dashboard.js": "text/javascript",
    "marking.js": "text/javascript",
    "student_sign_in.js": "text/javascript",
}
# templates of live parts, each a macro
PARTS = (
    "board_parts",
    "seat_parts",
    "assignment_parts",
    "costs_parts",
    "regrade_parts",
    "student_parts",
)

# htmx must not run scripts, add styles, or store pages in the browser. If a page no longer exists,
# the message replaces its content.
HTMX_CONFIG = {
    "allowEval": False,
    "allowNestedOobSwaps": False,
    "allowScriptTags": False,
    # A new link is htmx's at once: a quick click would leave the page.
    "defaultSettleDelay": 0,
    "historyCacheSize": 0,
    "includeIndicatorStyles": False,
    "scrollIntoViewOnBoost": False,
    "responseHandling": [
        {"code": "204", "swap": False},
        {"code": "[23]..", "swap": True},
        {
            "code": "404",
            "swap": True,
            "select": "#main",
            "target": "#main",
            "swapOverride": "outerHTML",
        },
        # a form that was refused, with what was typed
        {"code": "409", "swap": True},
        {"code": "[45]..", "swap": False, "error": True},
    ],
}


class CompiledTemplates(BytecodeCache):
    """The compiled templates of this process: its sites share most of them."""

    def __init__(self) -> None:
        self._code: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._code.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        if bucket.code is not None:
            self._code[bucket.key, bucket.checksum] = bucket.code


_COMPILED = CompiledTemplates()


class Pages:
    """Templates in `folder`, all read and compiled at once, so that no first request waits.

    Texts are escaped, and control characters visible.

    An upgrade of labctl while this process runs changes nothing here: its code would not match the
    new templates.
    """

    def __init__(self, folder: Path) -> None:
        templates = {path.name: path.read_text("utf-8") for path in folder.glob("*.j2")}
        self._environment = Environment(
            loader=DictLoader(templates),
            autoescape=True,
            undefined=StrictUndefined,
            finalize=formatting.clean_text,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            bytecode_cache=_COMPILED,
        )
        self._environment.filters.update(
            price=price_text,
            usd=formatting.usd,
            percent=formatting.percent,
            span=formatting.span,
            extension=formatting.extension,
            clock=formatting.format_time,
            moment=formatting.moment,
            size=formatting.size,
            limit=limit_text,
            received=parse_received_at,
        )
        # path -> (content, type); the path has the content's hash, so browsers cache it forever
        self.static = {
            f"/static/{hashlib.sha256(data).hexdigest()[:12]}/{Path(name).name}": (data, kind)
            for name, kind in STATIC.items()
            for data in ((folder / name).read_bytes(),)
        }
        self._paths = {path.rpartition("/")[2]: path for path in self.static}
        self._environment.globals.update(
            static=self._paths, htmx_config=json.dumps(HTMX_CONFIG, separators=(",", ":"))
        )
        self._parts: dict[str, Any] = {
            name: self._environment.get_template(f"{name}.html.j2").module for name in PARTS
        }
        for name in templates:
            self._environment.get_template(name)
        # (list, whether names are hidden) -> rows; all views of a list share them
        self._rows: dict[tuple[str, bool], _RowCache] = {}

    def render(self, template: str, **values: Any) -> str:
        return self._environment.get_template(f"{template}.html.j2").render(**values)

    def render_part(self, template: str, part: str, *values: object) -> str:
        """Render one of the macros of PARTS."""
        return str(getattr(self._parts[template], part)(*values))

    def board(self, pseudonyms: Pseudonyms, view: ListView) -> Draw:
        """Return the function that draws the board: tiles with totals, and a row per seat."""
        part = self._parts["board_parts"]
        rows = self._rows_of("", part.row, pseudonyms)

        def draw(snapshot: Snapshot) -> Parts:
            due = find_next_due(snapshot)
            parts = {
                "notes": str(part.notes(snapshot, pseudonyms)),
                "tiles": str(part.tiles(snapshot, SEAT_MARKS, view)),
            }
            columns = seat_sort_keys(lambda seat: pseudonyms.seat(snapshot, seat))
            for seat in arrange(snapshot.seats, view, lambda seat: seat.marks, columns):
                people = tuple(_members(snapshot, seat))
                name, details = pseudonyms.seat(snapshot, seat), pseudonyms.seat_details(seat)
                html = rows.render(seat.key, seat, people, name, details, due, pseudonyms)
                parts[f"s-{seat.key}"] = html
            rows.forget_all_but(snapshot.seat_by_key)
            return parts

        return draw

    def seat(self, key: str, pseudonyms: Pseudonyms) -> Draw:
        """Return the function that draws a seat: server, runs, cost, submissions and history.

        A seat that no longer exists has only the part `gone`.
        """
        part = self._parts["seat_parts"]

        def draw(snapshot: Snapshot) -> Parts:
            seat = snapshot.seat_by_key.get(key)
            if seat is None:
                return {"gone": str(part.gone())}
            people = list(_members(snapshot, seat))
            history = [event for event in snapshot.happenings if event.seat == key][:40]
            return {
                "facts": str(part.facts(seat, people, pseudonyms)),
                "runs": str(part.runs(seat, pseudonyms)),
                "handed": str(part.handed(seat, people, snapshot.assignments, pseudonyms)),
                "history": str(part.history(history, pseudonyms)),
            }

        return draw

    def assignment(self, name: str, pseudonyms: Pseudonyms, view: ListView) -> Draw:
        """Return the function that draws an assignment: its submissions and grades."""
        part = self._parts["assignment_parts"]
        rows = self._rows_of(name, part.row, pseudonyms)

        def draw(snapshot: Snapshot) -> Parts:
            due = next((one for one in snapshot.assignments if one.name == name), None)
            if due is None:
                return {"gone": str(part.gone())}
            people = [
                person
                for person in snapshot.people
                if person.active or person.find_submission(name)
            ]
            parts = {"sums": str(part.sums(due, count_seats(people, name), PERSON_MARKS, view))}
            columns = person_sort_keys(name, pseudonyms.person)
            for person in arrange(people, view, lambda one: person_marks(one, name), columns):
                parts[f"p-{person.key}"] = rows.render(person.key, person, due, pseudonyms)
            rows.forget_all_but(snapshot.person_by_key)
            return parts

        return draw

    def costs(self, pseudonyms: Pseudonyms) -> Draw:
        """Return the function that draws the costs."""
        part = self._parts["costs_parts"]

        def draw(snapshot: Snapshot) -> Parts:
            return {"costs": str(part.costs(snapshot, pseudonyms))}

        return draw

    def regrades(self, pseudonyms: Pseudonyms) -> Draw:
        """Return the function that draws the regrade requests without an answer."""
        part = self._parts["regrade_parts"]

        def draw(snapshot: Snapshot) -> Parts:
            return {"regrades": str(part.regrades(snapshot.open_regrades, pseudonyms))}

        return draw

    def _rows_of(
        self, name: str, macro: Callable[..., Markup], pseudonyms: Pseudonyms
    ) -> _RowCache:
        return self._rows.setdefault((name, pseudonyms.hidden), _RowCache(macro))


class _RowCache:
    """A cache of drawn rows; a row is drawn again only if its values change."""

    def __init__(self, macro: Callable[..., Markup]) -> None:
        self._macro = macro
        self._rows: dict[str, tuple[tuple[object, ...], str]] = {}

    def render(self, key: str, *values: object) -> str:
        row = self._rows.get(key)
        if row is None or row[0] != values:
            row = self._rows[key] = (values, str(self._macro(*values)))
        return row[1]

    def forget_all_but(self, keys: Collection[str]) -> None:
        for key in self._rows.keys() - keys:
            del self._rows[key]


def find_next_due(snapshot: Snapshot) -> AssignmentView | None:
    """Return the assignment that is due next, or else the one that was due last."""
    dated = sorted((due for due in snapshot.assignments if due.due_at), key=lambda d: d.due_at or 0)
    future = [due for due in dated if (due.due_at or 0) > snapshot.at]
    latest = dated[-1] if dated else next(iter(snapshot.assignments), None)
    return future[0] if future else latest


def _members(snapshot: Snapshot, seat: SeatView) -> list[PersonView]:
    people = [snapshot.person_by_id.get(student) for student in seat.students]
    return [person for person in people if person is not None]
