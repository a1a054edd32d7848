"""Data sets that the server fetches by itself, from https:// and s3:// addresses."""

from __future__ import annotations

import json
from collections.abc import Mapping

from labctl.events import Note, Progress, Reporter
from labctl.servers.agent import AgentClient
from labctl.wire.files import FETCH, FetchedSet, FetchRequest


def fetch_data(
    remote: AgentClient,
    lab_name: str,
    lab_id: str,
    sources: Mapping[str, str],
    reporter: Reporter,
    *,
    s3_endpoint: str = "",
) -> Mapping[str, FetchedSet]:
    """Have the server fetch each of `sources` (name -> address) to its data directory.

    Returns what is there now, by name.

    No credentials are sent: the server uses its own, or none. `s3_endpoint` is another store's
    address. UsageError for an address of another kind, NotFoundError, DiskFullError, TransferError
    (what arrived is kept there and used the next time).
    """
    if not sources:
        return {}
    request = FetchRequest(lab_name, lab_id, dict(sources), s3_endpoint)
    progress = _FetchProgress(reporter)
    reply = remote.stream(FETCH, request, on_reply=lambda reply: None, on_bytes=progress.feed)
    return reply.sets


class _FetchProgress:
    """Reports the server's lines: [name, done, total] in bytes, or [name, text]."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter
        self.rest = b""

    def feed(self, block: bytes) -> None:
        *lines, self.rest = (self.rest + block).split(b"\n")
        for line in lines:
            name, *values = json.loads(line)
            if len(values) == 2:
                event = Progress(
                    name=f"fetch {name}", done=values[0], total=values[1], unit="bytes"
                )
                self.reporter.emit(event)
            else:
                self.reporter.emit(Note(text=f"data {name}: {values[0]}", level="warning"))
