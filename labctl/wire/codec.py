"""Messages as JSON: NamedTuples to JSON objects and back.

Both sides of a connection may have different versions of labctl. So a key that a message does not
have is ignored, and a missing key takes its field's default. A missing key without a default, or a
value of another type, is a `MessageError`.

Messages are NamedTuples and not dataclasses: to import `dataclasses` takes 8 ms of the 50 ms that
a call of the agent takes. Modules with messages do not postpone annotations, so that these are
types at run time, and write `Optional[int]` and `Tuple[str, ...]` as Python 3.8 reads them.
"""

import json
from typing import (
    Any,
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Tuple,
    Type,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

Message = TypeVar("Message", bound=NamedTuple)
Value = TypeVar("Value")
# Each class that is an array in JSON, with the types of its fields.
_ARRAYS: Dict[Any, Tuple[Any, ...]] = {}
# Each class with fields whose keys in JSON are other names: the keys by field.
_KEYS: Dict[Any, Dict[str, str]] = {}


class MessageError(ValueError):
    """A JSON value is not the message that was expected; the text names the field."""


def as_array(kind: Type[Message]) -> Type[Message]:
    """Make a class of messages an array of its fields in JSON, where there are thousands of them.

    A decorator. The fields must be text, numbers and booleans, and all of them must be there.
    """
    _ARRAYS[kind] = tuple(kind.__annotations__.values())
    return kind


def with_keys(**keys: str) -> Callable[[Type[Message]], Type[Message]]:
    """Give fields of a class of messages other keys in JSON, those of earlier versions.

    A decorator.
    """

    def register(kind: Type[Message]) -> Type[Message]:
        _KEYS[kind] = keys
        return kind

    return register


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
    keys = _KEYS.get(type(message), {})
    return {
        keys.get(name, name): to_json(field, drop_defaults)
        for name, field in zip(message._fields, message)
        if name not in defaults or field != defaults[name]
    }


def from_json(kind: Type[Message], body: object) -> Message:
    """Convert a parsed JSON object to a message; see `decode`."""
    message: Message = _convert(kind, body, "")
    return message


def from_json_values(kind: Type[Value], body: object) -> Dict[str, Value]:
    """Convert a parsed JSON object whose values are of one kind; see `decode`."""
    return _convert_dict(kind, body, "")


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
        return _convert_dict(get_args(kind)[1], value, path)
    if kind is float and type(value) is int:
        return _convert_int(value, path)
    return _require(value, kind, path)


def _convert_message(kind: Any, value: Any, path: str) -> Any:
    if kind in _ARRAYS:
        return _convert_array(kind, value, path)
    _require(value, dict, path)
    fields: Dict[str, Any] = {}
    keys = _KEYS.get(kind, {})
    for name, each in kind.__annotations__.items():
        key = keys.get(name, name)
        if key in value:
            fields[name] = _convert(each, value[key], f"{path}.{key}")
        elif name not in kind._field_defaults:
            raise MessageError(f"{path}.{key}".lstrip(".") + " is missing")
    return kind(**fields)


def _convert_array(kind: Any, value: Any, path: str) -> Any:
    _require(value, list, path)
    return kind(*_convert_tuple(_ARRAYS[kind], value, path))


def _make_arrays(kind: Any, values: Iterable[Any]) -> Optional[List[Any]]:
    """Convert thousands of arrays fast; None if one needs more than a look at its types."""
    kinds = _ARRAYS.get(kind)
    if kinds and all(type(each) is list and tuple(map(type, each)) == kinds for each in values):
        return [kind._make(each) for each in values]
    return None


def _convert_dict(kind: Any, value: Any, path: str) -> Dict[str, Any]:
    _require(value, dict, path)
    arrays = _make_arrays(kind, value.values())
    if arrays is not None:
        return dict(zip(value, arrays))
    return {key: _convert(kind, item, f"{path}.{key}") for key, item in value.items()}


def _convert_tuple(kinds: Tuple[Any, ...], value: Any, path: str) -> Any:
    _require(value, list, path)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        arrays = _make_arrays(kinds[0], value)
        if arrays is not None:
            return tuple(arrays)
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
