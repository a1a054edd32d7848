"""A table: made here, or your own CSV file.

The built-in one describes deliveries of a parcel service, and asks whether the
parcel comes early, on time or late. It is generated, so its rules are known:
see `make_deliveries`. To use your own table, see `read_csv`.
"""

from __future__ import annotations

import csv
import hashlib
from pathlib import Path
from typing import Any

import numpy

from findings import Split
from run import Places

PARTS = ("train", "val", "test")
HELD_OUT_SHARE = 0.15  # for val and for test each
ROWS = 20_000
COLUMNS = ("distance_km", "hour", "rain_mm", "parcels", "driver_years", "is_city")
CLASSES = ("early", "late", "on time")

Array = numpy.ndarray[Any, Any]


class DataError(Exception):
    """The table cannot be read; the message says what to change."""


def find(places: Places) -> Path | None:
    """Return the first CSV file of `data: {table: ...}` in lab.yaml; None: the deliveries."""
    return min((places.data / "table").glob("*.csv"), default=None)


def load(part: str, source: Path | None = None, rows: int = ROWS) -> Split:
    """Return the rows of train, val or test; `source` is a CSV file, None the deliveries."""
    inputs, names, columns = read_csv(source) if source else make_deliveries(rows)
    classes = tuple(sorted(set(names)))
    if len(classes) < 2:
        raise DataError("the last column has the same value in each row: nothing to learn")
    # The order comes from a hash and not from a random generator: a row stays
    # in its part, whatever the others are.
    place = numpy.array([share_of(row) for row in inputs])
    low, high = {"train": (2 * HELD_OUT_SHARE, 1.0), "val": (0.0, HELD_OUT_SHARE)}.get(
        part, (HELD_OUT_SHARE, 2 * HELD_OUT_SHARE)
    )
    chosen = ((place >= low) & (place < high)).nonzero()[0]
    if not len(chosen):
        raise DataError(f"{len(inputs)} rows are too few: none is left for {part}")
    number = {name: index for index, name in enumerate(classes)}
    labels = numpy.array([number[names[row]] for row in chosen])

    # The first line of a CSV file has the columns' names.
    items = tuple(f"row {row + 2}" for row in chosen)

    def describe(item: int) -> dict[str, str]:
        values = zip(columns, inputs[chosen[item]], strict=True)
        return {"item": f"{items[item]}: " + ", ".join(f"{name} {x:g}" for name, x in values)}

    return Split(inputs[chosen], labels, classes, items, describe)


def columns_of(source: Path | None) -> tuple[str, ...]:
    """Return the names of the columns that a model gets."""
    return read_csv(source)[2] if source else COLUMNS


def share_of(row: Array) -> float:
    """Return a number from 0 to 1 that depends on the values of the row alone."""
    return int.from_bytes(hashlib.sha256(row.tobytes()).digest()[:7], "big") / 2**56


def make_deliveries(rows: int) -> tuple[Array, list[str], tuple[str, ...]]:
    """Generate deliveries; return (values, class of each row, names of the columns).

    The delay in minutes depends on products of columns: traffic only slows deliveries in a city and
    in the rush hours, and rain counts twice there. A linear model adds columns up, so it cannot
    learn that. A tree can.
    """
    # RandomState and not default_rng: its sequence never changes, so everybody
    # gets the same table.
    random = numpy.random.RandomState(0)
    distance = random.gamma(2.0, 6.0, rows)
    hour = random.randint(7, 21, rows)
    rain = numpy.where(random.uniform(size=rows) < 0.3, random.exponential(4.0, rows), 0.0)
    parcels = random.poisson(40, rows)
    years = random.uniform(0, 20, rows)
    is_city = random.uniform(size=rows) < 0.5
    is_rush = (abs(hour - 8) < 2) | (abs(hour - 17) < 2)
    delay = 0.5 * (distance - 12) + 0.3 * (parcels - 40) - 0.4 * numpy.minimum(years, 5)
    delay += is_city * is_rush * (14 + 2 * rain) + rain - 3 * (hour > 18)
    delay += random.normal(0, 3, rows)
    names = numpy.select([delay < -5, delay < 5], ["early", "on time"], "late").tolist()
    values = numpy.stack([distance, hour, rain, parcels, years, is_city], axis=1)
    return values.astype("float32"), names, COLUMNS


def read_csv(source: Path) -> tuple[Array, list[str], tuple[str, ...]]:
    """Read a CSV file: a line with names, then numbers, with the class in the last column.

    An empty cell is a missing value (NaN).
    """
    try:
        with source.open(newline="", encoding="utf-8-sig") as file:
            lines = list(csv.reader(file))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{source} cannot be read as a table ({error})") from error
    head, lines = (lines[0], lines[1:]) if lines else ([], [])
    if len(head) < 2 or not lines:
        raise DataError(f"{source} needs a line of names, a class column, and rows")
    values = numpy.empty((len(lines), len(head) - 1), "float32")
    for row, line in enumerate(lines):
        if len(line) != len(head):
            raise DataError(f"{source}, line {row + 2}: {len(line)} cells, not {len(head)}")
        for column, cell in enumerate(line[:-1]):
            try:
                values[row, column] = float(cell or "nan")
            except ValueError:
                where = f"{source}, line {row + 2}, {head[column]}"
                raise DataError(f"{where}: {cell!r} is not a number") from None
    return values, [line[-1] for line in lines], tuple(head[:-1])
