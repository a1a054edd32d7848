"""Turn nodes into typed values, by the types of msgspec Structs, and report all problems at once.

A type may be a Struct, `dict[str, T]`, `tuple[T, ...]`, `list[T]`, a union of those with scalars, a
Literal, anything that msgspec makes from a string, or `Annotated[T, Parsed(parse)]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, Union, get_args, get_origin

import msgspec

from labctl.config.document import Node, escape, quote
from labctl.decoding import convert_value
from labctl.errors import Problem
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import difflib

LAB_FILE = "lab.yaml"
# A part of a file without positions and without a type.
PlainYaml: TypeAlias = "dict[str, PlainYaml] | list[PlainYaml] | str | None"
S = TypeVar("S", bound=msgspec.Struct)

_SCALAR_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
}


class Parsed:
    """Marks a type whose values are parsed from the typed string; ValueError says what is wrong."""

    def __init__(self, parse: Callable[[str], Any]) -> None:
        self.parse = parse


class _Unreadable(Exception):
    """A value cannot be read; its problem was already reported."""


def make_problem(node: Node, path: str, message: str, near: str = "") -> Problem:
    """Return a Problem at `node`; for a node that is not from lab.yaml it names the origin.

    `near` is the name that was probably meant by the node's value.
    """
    if node.origin == LAB_FILE or not node.origin:
        return Problem(path, node.line, message)
    typed = str(node.value) if near else ""
    message = f"{message} (from {escape(node.location)})"
    return Problem(path, 0, message, escape(node.origin), typed, near)


def find_nearest(word: str, known: Iterable[str]) -> str:
    """Return the known word that is most similar to `word`, or "" if none is."""
    return next(iter(difflib.get_close_matches(word.lower(), list(known), n=1, cutoff=0.6)), "")


def make_unknown_key_problem(
    node: Node, path: str, known: Iterable[str], elsewhere: str = ""
) -> Problem:
    """Return the problem of an unknown key. `elsewhere` is the dotted path where it belongs."""
    keys = sorted(known)
    key = path.rpartition(".")[2]
    near = find_nearest(key, keys)
    if elsewhere:
        return make_problem(node, path, f"unknown key; it belongs at {elsewhere}")
    if near:
        return make_problem(node, path, f"unknown key; did you mean {near}?")
    return make_problem(node, path, f"unknown key; known keys: {', '.join(keys)}")


def read(node: Node, kind: Any, path: str, problems: list[Problem]) -> Any:
    """Read `node` as a `kind`; add to `problems` and return None if that fails."""
    try:
        return _read(node, kind, path, problems)
    except _Unreadable:
        return None


def read_struct(node: Node, kind: type[S], path: str, problems: list[Problem]) -> S | None:
    """Read a `kind` from the mapping `node`; None if a required field cannot be read.

    Other fields that cannot be read are reported, and have their defaults.
    """
    fields = list_keys(kind)
    values = {}
    for key, item in node.value.items() if isinstance(node.value, dict) else ():
        key_path = f"{path}.{escape(key)}" if path else escape(key)
        if key not in fields:
            problems.append(make_unknown_key_problem(item, key_path, fields))
        elif item.value is not None:
            before = len(problems)
            value = read(item, fields[key].type, key_path, problems)
            if len(problems) == before:
                values[fields[key].name] = value
    for key, field in fields.items():
        if field.required and (not isinstance(node.value, dict) or _is_missing(node.value, key)):
            problems.append(make_problem(node, f"{path}.{key}" if path else key, "is required"))
    if any(field.required and field.name not in values for field in fields.values()):
        return None
    return kind(**values)


def as_plain(node: Node) -> PlainYaml:
    """Return the node as plain dicts, lists and strings."""
    if isinstance(node.value, dict):
        return {key: as_plain(value) for key, value in node.value.items()}
    if isinstance(node.value, list):
        return [as_plain(item) for item in node.value]
    return node.value


@cache
def list_keys(kind: type[msgspec.Struct]) -> dict[str, msgspec.structs.FieldInfo]:
    """Return the keys that a mapping of this kind may have, with their fields."""
    return {field.encode_name: field for field in msgspec.structs.fields(kind)}


def _read(node: Node, kind: Any, path: str, problems: list[Problem]) -> Any:
    origin = get_origin(kind)
    if kind is Any or kind is object:
        return as_plain(node)
    if origin in (Union, UnionType):
        return _read_union(node, get_args(kind), path, problems)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return _read_struct(node, kind, path, problems)
    if origin is dict or kind is dict:
        key_kind, value_kind = get_args(kind) or (str, Any)
        return _read_mapping(node, key_kind, value_kind, path, problems)
    if origin in (tuple, list) or kind in (tuple, list):
        items = _read_list(node, next(iter(get_args(kind)), Any), path, problems)
        return items if (origin or kind) is list else tuple(items)
    return _read_scalar(node, kind, path, problems)


def _report_problem(node: Node, path: str, message: str, problems: list[Problem]) -> _Unreadable:
    problems.append(make_problem(node, path, message))
    return _Unreadable()


def _describe_value(node: Node) -> str:
    if isinstance(node.value, dict):
        return "a mapping"
    if isinstance(node.value, list):
        return "a list"
    return "nothing" if node.value is None else quote(node.value)


def _read_union(node: Node, kinds: tuple[Any, ...], path: str, problems: list[Problem]) -> Any:
    if node.value is None and NoneType in kinds:
        return None
    kinds = tuple(kind for kind in kinds if kind is not NoneType)
    fitting = [kind for kind in kinds if _shape(kind) is type(node.value)]
    for kind in fitting[:-1]:
        attempt: list[Problem] = []
        value = read(node, kind, path, attempt)
        if not attempt:
            return value
    if fitting:
        return _read(node, fitting[-1], path, problems)
    if len(kinds) == 1:
        return _read(node, kinds[0], path, problems)
    words: dict[Any, str] = {dict: "a mapping", list: "a list", str: "a text"}
    allowed = " or ".join(dict.fromkeys(words[_shape(kind)] for kind in kinds))
    raise _report_problem(node, path, f"expected {allowed}, got {_describe_value(node)}", problems)


def _shape(kind: Any) -> type:
    """Return the type of a node's value for a value of this kind: str, list or dict."""
    base = get_origin(kind) or kind
    if base is Annotated:
        parsed = any(isinstance(extra, Parsed) for extra in kind.__metadata__)
        return str if parsed else _shape(kind.__origin__)
    if base is dict or (isinstance(base, type) and issubclass(base, msgspec.Struct)):
        return dict
    return list if base in (list, tuple) else str


def _read_struct(
    node: Node, kind: type[msgspec.Struct], path: str, problems: list[Problem]
) -> msgspec.Struct:
    if node.value is None:
        node = Node({}, node.line, node.origin)
    if not isinstance(node.value, dict):
        raise _report_problem(
            node, path, f"expected a mapping, got {_describe_value(node)}", problems
        )
    before = len(problems)
    try:
        value = read_struct(node, kind, path, problems)
    except ValueError as error:
        if len(problems) > before:
            raise _Unreadable from None
        raise _report_problem(node, path, str(error), problems) from None
    if value is None or len(problems) > before:
        raise _Unreadable
    return value


def _is_missing(entries: dict[str, Node], key: str) -> bool:
    return key not in entries or entries[key].value is None


def _read_mapping(
    node: Node, key_kind: Any, value_kind: Any, path: str, problems: list[Problem]
) -> dict[Any, Any]:
    if not isinstance(node.value, dict):
        raise _report_problem(
            node, path, f"expected a mapping, got {_describe_value(node)}", problems
        )
    before = len(problems)
    entries = {}
    for key, item in node.value.items():
        key_path = f"{path}.{escape(key)}"
        name = read(Node(key, item.line, item.origin), key_kind, key_path, problems)
        if item.value is None and _shape(value_kind) is not dict:
            problems.append(make_problem(item, key_path, 'has no value; write "" for an empty one'))
        else:
            entries[name] = read(item, value_kind, key_path, problems)
    if len(problems) > before:
        raise _Unreadable
    return entries


def _read_list(node: Node, kind: Any, path: str, problems: list[Problem]) -> list[Any]:
    if not isinstance(node.value, list):
        raise _report_problem(node, path, f"expected a list, got {_describe_value(node)}", problems)
    before = len(problems)
    items = []
    for position, item in enumerate(node.value):
        item_path = f"{path}[{position}]"
        if item.value is None:
            problems.append(make_problem(item, item_path, "has no value"))
        else:
            items.append(read(item, kind, item_path, problems))
    if len(problems) > before:
        raise _Unreadable
    return items


def _read_scalar(node: Node, kind: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(node.value, str):
        raise _report_problem(
            node, path, f"expected a single value, got {_describe_value(node)}", problems
        )
    text = node.value
    try:
        for extra in getattr(kind, "__metadata__", ()):
            if isinstance(extra, Parsed):
                return extra.parse(text)
        if get_origin(kind) is Literal:
            return _parse_choice(text, get_args(kind))
        value = convert_value(text, kind, strict=False)
        if isinstance(value, float) and not abs(value) < float("inf"):
            raise ValueError(f"{quote(text)} is not a finite number")
        return value
    except msgspec.ValidationError as error:
        expected = _SCALAR_WORDS.get(kind, "")
        message = f"expected {expected}, got {quote(text)}" if expected else str(error)
        raise _report_problem(node, path, message, problems) from None
    except ValueError as error:
        raise _report_problem(node, path, str(error), problems) from None


def _parse_choice(text: str, allowed: tuple[Any, ...]) -> Any:
    for choice in allowed:
        if text == str(choice):
            return choice
    # An empty choice is the default of a setting, which nobody writes.
    words = ", ".join(str(choice) for choice in allowed if choice != "")
    near = find_nearest(text, [str(choice) for choice in allowed])
    hint = f"; did you mean {near}?" if near else ""
    raise ValueError(f"{quote(text)} is not one of {words}{hint}")
