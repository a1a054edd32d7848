"""Messages as JSON: NamedTuples to JSON objects and back.

Both sides of a connection may have different versions of labctl. So a key that a message does not
have is ignored, and a missing key takes its field's default. A missing key without a default, or a
value of another type, is a `MessageError`.

Messages are NamedTuples and not dataclasses: to import `dataclasses` takes 8 ms of the 50 ms that
a call of the agent takes. Modules with messages do not postpone annotations, so that these are
types at run time, and write `Optional[int]` and `Tuple[str, ...]` as Python 3.8 reads them.
"""

import json
from typing import Any, Dict, NamedTuple, Set, Tuple, Type, TypeVar, Union, get_args, get_origin

Message = TypeVar("Message", bound=NamedTuple)
_ARRAYS: Set[Any] = set()


class MessageError(ValueError):
    """A JSON value is not the message that was expected; the text names the field."""


def as_array(kind: Type[Message]) -> Type[Message]:
    """Make a class of messages an array of its fields in JSON, where there are thousands of them.

    A decorator. The fields must be text, numbers and booleans, and all of them must be there.
    """
    _ARRAYS.add(kind)
    return kind


def encode(message: NamedTuple) -> str:
    """Return the message as one line of JSON, without the line's end."""
    return json.dumps(to_json(message), separators=(",", ":"))


def decode(kind: Type[Message], text: Union[str, bytes]) -> Message:
    """Parse one JSON object. MessageError if it is not a message of this kind."""
    try:
        body = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"not JSON: {error}") from None
    return from_json(kind, body)


def to_json(value: Any, drop_defaults: bool = False) -> Any:
    """Convert a message, or a value inside one, to what `json.dumps` writes.

    `drop_defaults` leaves out the fields that have their defaults.
    """
    if hasattr(value, "_fields"):
        return list(value) if type(value) in _ARRAYS else _message_to_json(value, drop_defaults)
    if isinstance(value, (tuple, list)):
        return [to_json(each, drop_defaults) for each in value]
    if isinstance(value, dict):
        return {key: to_json(each, drop_defaults) for key, each in value.items()}
    return value


def _message_to_json(message: Any, drop_defaults: bool) -> Dict[str, Any]:
    defaults = message._field_defaults if drop_defaults else {}
    return {
        name: to_json(field, drop_defaults)
        for name, field in zip(message._fields, message)
        if name not in defaults or field != defaults[name]
    }


def from_json(kind: Type[Message], body: object) -> Message:
    """Convert a parsed JSON object to a message; see `decode`."""
    message: Message = _convert(kind, body, "")
    return message


def _convert(kind: Any, value: Any, path: str) -> Any:
    if kind is Any or kind is object:
        return value
    if hasattr(kind, "_fields"):
        return _convert_message(kind, value, path)
    origin = get_origin(kind)
    if origin is Union:
        return _convert_union(get_args(kind), value, path)
    if origin is tuple:
        return _convert_tuple(get_args(kind), value, path)
    if origin is dict:
        _require(value, dict, path)
        _, each = get_args(kind)
        return {key: _convert(each, item, f"{path}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        return _convert_int(value, path)
    return _require(value, kind, path)


def _convert_message(kind: Any, value: Any, path: str) -> Any:
    if kind in _ARRAYS:
        return _convert_array(kind, value, path)
    _require(value, dict, path)
    fields: Dict[str, Any] = {}
    for name, each in kind.__annotations__.items():
        if name in value:
            fields[name] = _convert(each, value[name], f"{path}.{name}")
        elif name not in kind._field_defaults:
            raise MessageError(f"{path}.{name}".lstrip(".") + " is missing")
    return kind(**fields)


def _convert_array(kind: Any, value: Any, path: str) -> Any:
    _require(value, list, path)
    kinds = tuple(kind.__annotations__.values())
    if tuple(map(type, value)) == kinds:  # the usual case, fast
        return kind(*value)
    return kind(*_convert_tuple(kinds, value, path))


def _convert_tuple(kinds: Tuple[Any, ...], value: Any, path: str) -> Any:
    _require(value, list, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(_convert(kinds[0], each, f"{path}[{i}]") for i, each in enumerate(value))
    if len(kinds) != len(value):
        raise MessageError(f"{path.lstrip('.')}: expected {len(kinds)} values, got {len(value)}")
    return tuple(_convert(k, each, f"{path}[{i}]") for i, (k, each) in enumerate(zip(kinds, value)))


def _convert_union(kinds: Tuple[Any, ...], value: Any, path: str) -> Any:
    if value is None and type(None) in kinds:
        return None
    problem = MessageError(f"{path.lstrip('.')}: no value")
    for kind in kinds:
        if kind is not type(None):
            try:
                return _convert(kind, value, path)
            except MessageError as error:
                problem = error
    raise problem


def _convert_int(value: int, path: str) -> float:
    try:
        return float(value)
    except OverflowError:
        raise MessageError(f"{path.lstrip('.')}: the number is too large") from None


def _require(value: Any, kind: Any, path: str) -> Any:
    """Return the value if its type is exactly this one: a bool is not an int."""
    if type(value) is not kind:
        expected, actual = getattr(kind, "__name__", str(kind)), type(value).__name__
        raise MessageError(
            f"{path.lstrip('.') or 'the message'}: expected {expected}, got {actual}"
        )
    return value
