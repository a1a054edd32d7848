"""Messages for the tests of the codec; annotations are types at run time, as in labctl/wire."""

from typing import Dict, NamedTuple, Optional, Tuple  # noqa: UP035

from labctl.wire.codec import as_array, with_keys


class Address(NamedTuple):
    street: str
    number: int = 0


class Parcel(NamedTuple):
    name: str
    to: Address
    weight_kg: Optional[float] = None  # noqa: UP045
    route: Tuple[Address, ...] = ()  # noqa: UP006
    notes: Dict[str, Address] = {}  # noqa: UP006, RUF012
    span: Tuple[int, str] = (0, "")  # noqa: UP006
    fragile: bool = False


@as_array
class Point(NamedTuple):
    name: str
    height_m: float
    is_dry: bool


class Polygon(NamedTuple):
    points: Tuple[Point, ...] = ()  # noqa: UP006


class Route(NamedTuple):
    stops: Tuple[Address, ...] = ()  # noqa: UP006


@with_keys(summary="told")
class Outcome(NamedTuple):
    code: int
    summary: str = ""
