"""Data sets that the server downloads: https:// in fetch_https.py, s3:// and gs:// in fetch_s3.py.

Files are staged in `.labctl/.fetch-<name>` until the data set is complete, which is then renamed
to `data/<name>`. An interrupted download resumes where it stopped. labctl sends no credentials.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path

from ...wire.codec import Message, MessageError, encode, from_json, to_json
from ...wire.files import BucketRecord, DownloadRecord, FetchReply, FetchRequest
from ...wire.verbs import SHOW_DISK, Empty
from ..host.paths import count_free_bytes, lab_dir, read_json, require_name, write_json
from ..mirror.boto3_python import LACKING, become_boto3_python, has_boto3
from ..reply import Failure, send_closing_reply, send_reply
from .files import RESERVE_BYTES

BUCKETS = ("s3://", "gs://")
# seconds between two progress lines
TELL_EVERY_S = 0.5


def fetch_data_sets(request: FetchRequest) -> None:
    """Fetch data sets to the lab's data directory."""
    if any(address.startswith(BUCKETS) for address in request.sources.values()):
        _require_boto3(encode(request).encode() + b"\n")
    lab = lab_dir(request.lab, request.lab_id)
    send_reply(Empty())
    sets = {}
    for name, address in sorted(request.sources.items()):
        dataset = DataSetFetch(lab, require_name(name), address)
        # Imported here, to spare every other verb the HTTP libraries.
        if address.startswith(BUCKETS):
            from .fetch_s3 import fetch_bucket

            sets[name] = fetch_bucket(dataset, request.s3_endpoint)
        else:
            from .fetch_https import fetch_address

            sets[name] = fetch_address(dataset)
    send_closing_reply(FetchReply(sets))


def _require_boto3(request: bytes) -> None:
    """Continue in a Python that has boto3. Failure (missing) if the server has none."""
    if has_boto3():
        return
    become_boto3_python("fetch", request)
    raise Failure(
        "missing",
        "the server cannot fetch data from a bucket",
        LACKING,
        "download the data and put its directory under data:, or use an https:// address",
    )


class DataSetFetch:
    """One data set: its directories, its record, and how its progress is reported."""

    def __init__(self, lab: Path, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.root = lab / "data" / name
        self.staging = lab / ".labctl" / f".fetch-{name}"
        self.record_path = lab / ".labctl" / f".fetched-{name}.json"
        self.pushed_path = lab / ".labctl" / f".pushed-data-{name}.json"
        self.told_at = 0.0

    def read_record(self, kind: type[Message]) -> Message | None:
        """Return the record of the last fetch from this address, None if its data is not here."""
        record = read_json(self.record_path)
        if record.get("address") != self.address or not self.root.is_dir():
            return None
        try:
            return from_json(kind, record)
        except MessageError:
            return None

    def report_progress(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now - self.told_at >= TELL_EVERY_S or (total and done == total):
            self.told_at = now
            _write_line(self.name, done, total)

    def report_text(self, text: str) -> None:
        _write_line(self.name, text)

    def replace_tree(self, tree: Path, record: DownloadRecord | BucketRecord) -> None:
        """Replace the data set by `tree`; a run that has the old one open keeps it."""
        old = self.staging / "old"
        shutil.rmtree(old, ignore_errors=True)
        self.root.parent.mkdir(parents=True, exist_ok=True)
        if os.path.lexists(self.root):
            self.root.rename(old)
        tree.rename(self.root)
        if self.pushed_path.exists():
            self.pushed_path.unlink()
        write_json(self.record_path, to_json(record))
        shutil.rmtree(self.staging, ignore_errors=True)


def _write_line(*fields: str | int) -> None:
    sys.stdout.buffer.write(json.dumps(fields).encode() + b"\n")
    sys.stdout.buffer.flush()


def check_room(size: int, where: Path, what: str) -> None:
    free = count_free_bytes(where)
    if size + RESERVE_BYTES > free:
        mib = 1024 * 1024
        raise Failure(
            "disk",
            f"the server's disk has no room for {what}",
            f"it needs {size // mib + 1} MiB, {free // mib} MiB are free, and "
            f"{RESERVE_BYTES // mib} MiB stay reserved",
            SHOW_DISK,
        )
