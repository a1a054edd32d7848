"""The results of a run in one JSON file, which is complete after every figure."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Self

import msgspec

from benchmarks.circumstances import Circumstances, read_load
from benchmarks.measure import Comparison
from benchmarks.report import ResultRow, read_rows
from benchmarks.settings import Sizes

FOLDER = Path(__file__).parent / "results"
VERSION = 3


class ResultRecord(msgspec.Struct):
    """What a file has. Quick figures come from few rounds and small data."""

    version: int
    at: str
    quick: bool
    sizes: Sizes
    circumstances: Circumstances
    rows: list[ResultRow] = []
    # groups whose last comparison has been measured
    done: list[str] = []
    # groups that their time with --quick ended
    cut_short: list[str] = []
    # the error of each failed group
    errors: dict[str, str] = {}
    load_after: list[float] = []


class UnreadableResultsError(Exception):
    """A file cannot be resumed."""


class Results:
    """A record and its file. Each change replaces the file, so that an interrupt loses nothing."""

    def __init__(self, path: Path, record: ResultRecord) -> None:
        self.path = path
        self.record = record

    @classmethod
    def create(
        cls, folder: Path, sizes: Sizes, circumstances: Circumstances, *, quick: bool
    ) -> Self:
        folder.mkdir(parents=True, exist_ok=True)
        at = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        name = at[:19].replace(":", "") + ("-quick" if quick else "")
        record = ResultRecord(VERSION, at, quick, sizes, circumstances)
        return cls(folder / f"{name}.json", record)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return the results of an earlier run, to add the missing ones.

        Raises:
            UnreadableResultsError: the file is missing, damaged or of another version.
        """
        try:
            record = msgspec.json.decode(path.read_bytes(), type=ResultRecord)
        except (OSError, msgspec.DecodeError) as error:
            raise UnreadableResultsError(f"{path} cannot be read: {error}") from error
        if record.version != VERSION:
            reason = f"{path} has format {record.version}, and this version writes {VERSION}"
            raise UnreadableResultsError(reason)
        return cls(path, record)

    def begin_group(self, group: str) -> None:
        """Forget how an earlier attempt at this group ended."""
        self.record.errors.pop(group, None)
        self.record.cut_short = [name for name in self.record.cut_short if name != group]

    def end_group(self, group: str, *, cut_short: bool) -> None:
        (self.record.cut_short if cut_short else self.record.done).append(group)
        self._write()

    def fail_group(self, group: str, error: Exception) -> None:
        self.record.errors[group] = f"{type(error).__name__}: {error}"
        self._write()

    def has_measured(self, group: str, comparison: Comparison) -> bool:
        """Return whether the file has every row of this comparison, with all rounds."""
        known = {row.name for row in self._find_rows(group, comparison) if row.complete}
        return known >= {row.name for row in comparison.rows}

    def save_rows(
        self, group: str, comparison: Comparison, *, complete: bool = False
    ) -> list[ResultRow]:
        """Write the rows in place of earlier ones of this comparison, and return them."""
        rows = read_rows(group, comparison, complete=complete)
        replaced = self._find_rows(group, comparison)
        self.record.rows = [row for row in self.record.rows if row not in replaced] + rows
        self._write()
        return rows

    def _find_rows(self, group: str, comparison: Comparison) -> list[ResultRow]:
        wanted = (group, comparison.title)
        return [row for row in self.record.rows if (row.group, row.comparison) == wanted]

    def _write(self) -> None:
        self.record.load_after = read_load()
        text = msgspec.json.format(msgspec.json.encode(self.record), indent=1)
        draft = self.path.with_suffix(".tmp")
        # without fsync, which would wait for the data that the last row wrote
        draft.write_bytes(text + b"\n")
        draft.replace(self.path)
