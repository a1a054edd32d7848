"""The metadata service of a machine at Azure: the Scheduled Events, which the watchdog asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from email.utils import format_datetime
from urllib.parse import parse_qs
from wsgiref.types import StartResponse, WSGIEnvironment

PATH = "/metadata/scheduledevents"
HEADER = "HTTP_METADATA"


class AzureMetadataApp:
    """A WSGI application. Like Azure's, it refuses requests without its header or a version.

    `find_eviction` returns when the machine is evicted (Unix seconds), None if it is not.
    """

    def __init__(self, name: str, find_eviction: Callable[[], float | None]) -> None:
        self._name = name
        self._find_eviction = find_eviction

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        query = parse_qs(environ.get("QUERY_STRING", ""))
        if environ.get(HEADER, "").lower() != "true" or "api-version" not in query:
            status, body = "400 Bad Request", b"{}"
        elif environ["PATH_INFO"] != PATH:
            status, body = "404 Not Found", b"{}"
        else:
            status, body = "200 OK", json.dumps(self._list_events()).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
        start_response(status, headers)
        return [body]

    def _list_events(self) -> dict[str, object]:
        at = self._find_eviction()
        if at is None:
            return {"DocumentIncarnation": 1, "Events": []}
        event = {
            "EventId": f"evict-{self._name}",
            "EventType": "Preempt",
            "ResourceType": "VirtualMachine",
            "Resources": [self._name],
            "EventStatus": "Scheduled",
            "NotBefore": format_datetime(datetime.fromtimestamp(at, UTC), usegmt=True),
            "Description": "",
            "EventSource": "Platform",
            "DurationInSeconds": -1,
        }
        return {"DocumentIncarnation": 2, "Events": [event]}
