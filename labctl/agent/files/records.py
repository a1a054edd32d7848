"""Stored JSON objects whose keys are paths: what labctl knows of each file."""

from __future__ import annotations

from pathlib import Path
from typing import Mapping, NamedTuple, Union

from ...wire.codec import Message, MessageError, from_json_values, to_json
from ..host.paths import read_json, write_json

# A record of a file, or only its hash.
Record = Union[NamedTuple, str]


def read_records(kind: type[Message], path: Path) -> dict[str, Message]:
    """Return the records by path; {} if the file does not exist or is damaged."""
    try:
        return from_json_values(kind, read_json(path))
    except MessageError:
        return {}


def read_hashes(path: Path) -> dict[str, str]:
    """Return the hashes by path, without what is not text."""
    return {name: sha256 for name, sha256 in read_json(path).items() if isinstance(sha256, str)}


def write_records(path: Path, records: Mapping[str, Record]) -> None:
    write_json(path, to_json(records))


def merge_records(kind: type[Message], path: Path, more: Mapping[str, Message]) -> None:
    """Add records to those in the file, and replace those of the same paths."""
    write_records(path, {**read_records(kind, path), **more})


def merge_hashes(path: Path, more: Mapping[str, str]) -> None:
    """Add hashes to those in the file, and replace those of the same paths."""
    write_records(path, {**read_hashes(path), **more})
