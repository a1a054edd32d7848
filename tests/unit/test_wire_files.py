"""The JSON of files, mirrors and stores, which servers and stores of other versions have too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from labctl.agent.files.records import merge_records, read_records
from labctl.wire.codec import encode, from_json, to_json
from labctl.wire.files import (
    BucketRecord,
    DownloadRecord,
    HashRecord,
    ObjectRecord,
    PlanRequest,
    PushedFile,
    PushedRecord,
)
from labctl.wire.mirrors import (
    GatewayReply,
    GetPartRequest,
    IndexRecord,
    PutFileRequest,
    RunObjectRecord,
    SentRecord,
    StoreConfigRecord,
    StoredCode,
    StoredFile,
)

FILE, FILE_JSON = StoredFile(3, "abc"), [3, "abc"]
ABOUT = RunObjectRecord({"id": "r1"}, StoredCode(5, "def"), {"state": "exited"}, ({"boot": "x"},))
ABOUT_JSON = {
    "spec": {"id": "r1"},
    "code": {"size": 5, "sha256": "def"},
    "record": {"state": "exited"},
    "attempts": [{"boot": "x"}],
}


@pytest.mark.parametrize(
    ("record", "body"),
    [
        (HashRecord(3, 9, "abc"), [3, 9, "abc"]),
        (PushedRecord("abc", 3, 9), ["abc", 3, 9]),
        (FILE, FILE_JSON),
        (ABOUT, ABOUT_JSON),
        (
            SentRecord(
                "s3://b", {"x": FILE}, {"x": FILE}, StoredCode(5, "def"), ABOUT, {"id": "r"}
            ),
            {
                "url": "s3://b",
                "files": {"x": FILE_JSON},
                "index": {"x": FILE_JSON},
                "code": {"size": 5, "sha256": "def"},
                "about": ABOUT_JSON,
                "final": {"id": "r"},
            },
        ),
        (SentRecord("s3://b", {}, {}), {"url": "s3://b", "files": {}, "index": {}}),
        (
            IndexRecord({"x": FILE}, {"y": FILE}, 2.5),
            {"files": {"x": FILE_JSON}, "pending": {"y": FILE_JSON}, "at": 2.5},
        ),
        (StoreConfigRecord("s3://b", 60.0), {"url": "s3://b", "mirror_s": 60.0}),
        (
            StoreConfigRecord("ssh://h", 60.0, "h", 22, "u", "lab-1"),
            {
                "url": "ssh://h",
                "mirror_s": 60.0,
                "host": "h",
                "port": 22,
                "user": "u",
                "directory": "lab-1",
            },
        ),
        (
            DownloadRecord("https://h/x", "e", "m", "e", 5, 1),
            {
                "address": "https://h/x",
                "etag": "e",
                "modified": "m",
                "validator": "e",
                "size": 5,
                "files": 1,
            },
        ),
        (
            BucketRecord("s3://b", {"x": ObjectRecord("e", 5)}),
            {"address": "s3://b", "objects": {"x": ["e", 5]}},
        ),
    ],
)
def test_stored_records_keep_their_form(record: NamedTuple, body: Any) -> None:
    assert to_json(record, drop_defaults=True) == body
    assert from_json(type(record), body) == record


def test_a_pushed_file_is_an_array() -> None:
    request = PlanRequest("digits", "1", "code", (PushedFile("a", 1, "abc", 0o644, 9),))
    assert json.loads(encode(request))["files"] == [["a", 1, "abc", 0o644, 9]]


@pytest.mark.parametrize(
    ("request_", "body"),
    [
        (
            PutFileRequest("k", 3, "abc", length=0),
            {
                **{"do": "put", "key": "k", "size": 3, "sha256": "abc", "offset": 0, "length": 0},
                "expected": None,
            },
        ),
        (GetPartRequest("k", 1, 2), {"do": "get", "key": "k", "offset": 1, "length": 2}),
    ],
)
def test_what_a_gateway_of_another_version_reads(request_: NamedTuple, body: Any) -> None:
    assert to_json(request_) == body


def test_a_gateway_of_an_earlier_version_says_nothing_about_rsync() -> None:
    assert from_json(GatewayReply, {"done": False}).rsync is None
    assert from_json(GatewayReply, {"done": False, "rsync": False}).rsync is False


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 5}', '{"a": [1]}', '{"a": ["1", "b"]}'])
def test_damaged_records_count_as_none_and_are_replaced(tmp_path: Path, text: str) -> None:
    path = tmp_path / "pulled.json"
    path.write_text(text)
    assert read_records(StoredFile, path) == {}
    merge_records(StoredFile, path, {"x": FILE})
    merge_records(StoredFile, path, {"y": FILE})
    assert read_records(StoredFile, path) == {"x": FILE, "y": FILE}
