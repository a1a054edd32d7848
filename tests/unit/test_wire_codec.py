"""Messages as JSON and back."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

import pytest
from wire_messages import Address, Outcome, Parcel, Point, Polygon, Route

from labctl import wire
from labctl.agent import entrypoint
from labctl.wire.codec import MessageError, decode, encode, from_json, from_json_values, to_json
from labctl.wire.verbs import StreamingVerb, Verb

FULL = Parcel(
    name="a",
    to=Address("b", 5),
    weight_kg=2.5,
    route=(Address("c"), Address("d", 7)),
    notes={"x": Address("e")},
    span=(1, "two"),
    fragile=True,
)


def test_a_message_comes_back_as_it_was() -> None:
    assert decode(Parcel, encode(FULL)) == FULL


def test_missing_fields_have_their_defaults_and_unknown_ones_are_ignored() -> None:
    body = {"name": "a", "to": {"street": "b", "planet": "earth"}, "colour": "red"}
    assert from_json(Parcel, body) == Parcel("a", Address("b"))


def test_fields_with_their_defaults_can_be_left_out() -> None:
    short = to_json(Parcel("a", Address("b")), drop_defaults=True)
    assert short == {"name": "a", "to": {"street": "b"}}


def test_a_whole_number_is_a_float_and_nothing_else_changes_its_type() -> None:
    assert from_json(Parcel, {"name": "a", "to": {"street": "b"}, "weight_kg": 3}).weight_kg == 3.0


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ([], "the message: expected dict, got list"),
        ({"name": "a"}, "to is missing"),
        ({"name": 5, "to": {"street": "b"}}, "name: expected str, got int"),
        ({"name": "a", "to": {"street": "b", "number": True}}, "to.number: expected int, got bool"),
        ({"name": "a", "to": {"street": "b"}, "weight_kg": "2"}, "weight_kg: expected float"),
        ({"name": "a", "to": {"street": "b"}, "route": [{}]}, "route[0].street is missing"),
        ({"name": "a", "to": {"street": "b"}, "notes": {"x": 1}}, "notes.x: expected dict"),
        ({"name": "a", "to": {"street": "b"}, "span": [1]}, "span: expected 2 values, got 1"),
        ({"name": None, "to": {"street": "b"}}, "name: expected str, got NoneType"),
    ],
)
def test_a_problem_names_its_field(body: Any, problem: str) -> None:
    with pytest.raises(MessageError) as caught:
        from_json(Parcel, body)
    assert problem in str(caught.value)


def test_a_message_can_be_an_array_of_its_fields() -> None:
    polygon = Polygon((Point("a", 1.5, is_dry=True), Point("b", 2.0, is_dry=False)))
    assert to_json(polygon) == {"points": [["a", 1.5, True], ["b", 2.0, False]]}
    assert decode(Polygon, encode(polygon)) == polygon
    assert from_json(Polygon, {"points": [["a", 1, True]]}).points[0].height_m == 1.0


@pytest.mark.parametrize(
    ("point", "problem"),
    [
        ({"name": "a"}, "points[0]: expected list, got dict"),
        (["a", 1.0], "points[0]: expected 3 values, got 2"),
        (["a", 1.0, 1], "points[0][2]: expected bool, got int"),
        (["a", True, True], "points[0][1]: expected float, got bool"),
    ],
)
def test_a_problem_in_an_array_names_its_place(point: Any, problem: str) -> None:
    with pytest.raises(MessageError) as caught:
        from_json(Polygon, {"points": [point]})
    assert problem in str(caught.value)


def test_an_object_of_messages_names_the_wrong_one() -> None:
    assert from_json_values(Point, {"x": ["a", 1.5, True]}) == {"x": Point("a", 1.5, is_dry=True)}
    with pytest.raises(MessageError, match=r"y\[0\]: expected str, got int"):
        from_json_values(Point, {"x": ["a", 1.5, True], "y": [1, 1.5, True]})
    with pytest.raises(MessageError, match="expected dict, got list"):
        from_json_values(Point, [])


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000])
def test_text_that_is_not_json_is_a_message_error(text: str) -> None:
    with pytest.raises(MessageError):
        decode(Route, text)


# Messages of keepers and of a receiver of submissions, which are not agents.
OTHERS = ("keeper", "kept_labs", "receiver")


def list_verbs() -> list[Verb[Any, Any] | StreamingVerb[Any, Any, Any]]:
    names = [each.name for each in iter_modules(wire.__path__) if each.name not in OTHERS]
    modules = [import_module(f"labctl.wire.{name}") for name in names]
    values = [value for module in modules for value in vars(module).values()]
    return [value for value in values if isinstance(value, Verb | StreamingVerb)]


@pytest.mark.parametrize("verb", list_verbs(), ids=lambda verb: verb.name)
def test_the_handler_of_a_verb_takes_and_returns_its_messages(verb: Any) -> None:
    path = (entrypoint.VERBS | entrypoint.STREAMING_VERBS)[verb.name]
    module, _, function = path.rpartition(".")
    loaded = import_module(f"labctl.agent.{module}")
    hints = getattr(loaded, function).__annotations__
    assert vars(loaded)[hints["request"]] is verb.request
    if isinstance(verb, Verb):
        assert vars(loaded)[hints["return"]] is verb.reply


def test_messages_load_without_slow_modules() -> None:
    """A server starts the agent anew for each call."""
    names = [f"labctl.wire.{each.name}" for each in iter_modules(wire.__path__)]
    line = (
        f"import sys, {', '.join(names)}; print(*{{'dataclasses', 'inspect'}} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r}); {line}"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == ""


ROOT = Path(wire.__path__[0]).parents[1]


def test_a_field_can_have_another_key_in_json() -> None:
    outcome = Outcome(code=3, summary="failed")
    assert to_json(outcome) == {"code": 3, "told": "failed"}
    assert from_json(Outcome, {"code": 3, "told": "failed", "summary": "ignored"}) == outcome
    assert to_json(Outcome(code=0), drop_defaults=True) == {"code": 0}
    with pytest.raises(MessageError, match="told: expected str, got int"):
        from_json(Outcome, {"code": 3, "told": 5})
