"""Data sets that the server fetches by itself, from https:// and s3:// addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from labctl.events import Note, Progress, Reporter
from labctl.model import Value
from labctl.servers.agent import Remote


class Fetched(Value, frozen=True):
    """One data set on the server. `unchanged` means that nothing had to be fetched."""

    name: str
    files: int
    bytes: int
    unchanged: bool = False


def fetch_data(
    remote: Remote,
    lab_name: str,
    lab_id: str,
    sources: Mapping[str, str],
    reporter: Reporter,
    *,
    s3_endpoint: str = "",
) -> tuple[Fetched, ...]:
    """Have the server fetch each of `sources` (name -> address) to its data directory.

    No credentials are sent: the server uses its own, or none. `s3_endpoint` is another store's
    address. UsageError for an address of another kind, NotFoundError, DiskFullError, TransferError
    (what arrived is kept there and used the next time).
    """
    if not sources:
        return ()
    request = {
        "lab": lab_name,
        "lab_id": lab_id,
        "sources": dict(sources),
        "s3_endpoint": s3_endpoint,
    }
    told = _Told(reporter)
    reply = remote.stream("fetch", request, on_reply=_nothing, on_bytes=told.feed)
    found = [Fetched(name=name, **what) for name, what in sorted(reply["sets"].items())]
    return tuple(found)


def _nothing(_: dict[str, Any]) -> None:
    pass


class _Told:
    """Reads the server's lines: [name, done, total] in bytes, or [name, text]."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.rest = b""

    def feed(self, block: bytes) -> None:
        *found, self.rest = (self.rest + block).split(b"\n")
        for line in found:
            name, *what = json.loads(line)
            if len(what) == 2:
                event = Progress(name=f"fetch {name}", done=what[0], total=what[1], unit="bytes")
                self.reporter.emit(event)
            else:
                self.reporter.emit(Note(text=f"data {name}: {what[0]}", level="warning"))
