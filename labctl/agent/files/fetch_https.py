"""Download of one file over HTTPS, resumed where it was cut; archives are unpacked."""

from __future__ import annotations

import posixpath
import shutil
import urllib.parse

from ...wire.codec import MessageError, from_json, to_json
from ...wire.containment import is_contained
from ...wire.files import DownloadRecord, FetchedSet
from ...wire.verbs import CONFIG_FILE, PUSH_COMMAND
from ..host.paths import read_json, write_json
from ..host.retry import retry_on
from ..reply import Failure
from .curl import RESUME, BrokenError, CurlResponse, StatusError, open_address
from .fetch import DataSetFetch, check_room
from .unpacking import is_archive, unpack

TRIES = 5
NO_NAME = "data"


def describe_refusal(address: str, error: StatusError) -> Failure:
    """Turn an HTTP error into a Failure."""
    if error.status in (401, 403):
        return Failure(
            "policy",
            f"the server is not allowed to read {address} ({error.status})",
            "it requires a login, and labctl sends no credentials",
            "download the data and put its directory under data:, or make it public",
        )
    if error.status in (404, 410):
        what = f"{address} does not exist ({error.status})"
        return Failure("missing", what, "", ("correct data: in ", CONFIG_FILE))
    return Failure("link", f"{address} returned {error}", "", PUSH_COMMAND)


def fetch_address(dataset: DataSetFetch) -> FetchedSet:
    """Fetch one file over HTTPS and unpack it if it is an archive.

    Skipped if the server says that it has not changed.
    """
    record = dataset.read_record(DownloadRecord)
    state = _download(dataset, record)
    if state is None:
        assert record
        return FetchedSet(record.files, record.size or 0, unchanged=True)
    name = _file_name(dataset.address)
    body = dataset.staging / "body"
    tree = dataset.staging / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    files = 1
    if is_archive(name):
        files, left_out = unpack(body, name, tree)
        body.unlink()
        if left_out:
            dataset.report_text(f"skipped {left_out} links and devices in {name}")
    else:
        body.rename(tree / name)
    dataset.replace_tree(tree, state._replace(files=files))
    return FetchedSet(files, state.size or 0, unchanged=False)


def _file_name(address: str) -> str:
    path = urllib.parse.unquote(urllib.parse.urlsplit(address).path)
    name = posixpath.basename(path)
    is_bad = not is_contained(name) or any(ord(c) < 32 for c in name)
    return NO_NAME if is_bad else name


def _download(dataset: DataSetFetch, record: DownloadRecord | None) -> DownloadRecord | None:
    """Download the body to staging and return its state; None if the data here is up to date."""
    dataset.staging.mkdir(parents=True, exist_ok=True)

    def download() -> DownloadRecord | None:
        try:
            state = _try_download(dataset, record)
        except StatusError as error:
            if error.status == 304:
                return None
            if error.status == 416:
                _reset_staging(dataset)
                raise BrokenError(str(error)) from None
            if error.status < 500:
                raise describe_refusal(dataset.address, error) from None
            raise
        if state is None or state.size == (dataset.staging / "body").stat().st_size:
            return state
        raise BrokenError("the response ended early")

    pauses_s = [2.0**number for number in range(TRIES - 1)]
    try:
        return retry_on((BrokenError, StatusError), download, pauses_s)
    except StatusError as error:
        raise describe_refusal(dataset.address, error) from None
    except BrokenError as error:
        what = f"the download of {dataset.address} broke off {TRIES} times"
        raise Failure("link", what, str(error), RESUME) from None


def _try_download(dataset: DataSetFetch, record: DownloadRecord | None) -> DownloadRecord | None:
    body = dataset.staging / "body"
    partial = _read_partial(dataset)
    offset = body.stat().st_size if body.exists() and _can_resume(dataset, partial) else 0
    with open_address(
        dataset.address, _conditional_headers(partial, record, offset), offset
    ) as response:
        state = _response_state(dataset, response, offset)
        if not offset and _is_unchanged(state, record):
            return None
        # Nothing is written before this check, so a resumed file has one version only.
        is_rest = response.status == 206 and state.validator == partial.validator
        if not offset or is_rest:
            if state.size is not None:
                check_room(state.size - offset, dataset.staging, dataset.address)
            write_json(dataset.staging / "state.json", to_json(state))
            done_bytes = _write_body(dataset, response, offset, state.size or 0)
            return state if state.size is not None else state._replace(size=done_bytes)
    _reset_staging(dataset)
    return _try_download(dataset, record)


def _read_partial(dataset: DataSetFetch) -> DownloadRecord:
    """Return the download that has begun, without an address if none has."""
    try:
        return from_json(DownloadRecord, read_json(dataset.staging / "state.json"))
    except MessageError:
        return DownloadRecord("")


def _can_resume(dataset: DataSetFetch, partial: DownloadRecord) -> bool:
    return partial.address == dataset.address and bool(partial.validator)


def _conditional_headers(
    partial: DownloadRecord, record: DownloadRecord | None, offset: int
) -> dict[str, str]:
    if offset:
        return {"If-Range": partial.validator}
    if record and record.etag:
        return {"If-None-Match": record.etag}
    if record and record.modified:
        return {"If-Modified-Since": record.modified}
    return {}


def _response_state(dataset: DataSetFetch, response: CurlResponse, offset: int) -> DownloadRecord:
    """Return the state that the response headers describe; `size` is None if they lack it."""
    etag = response.headers.get("etag", "")
    modified = response.headers.get("last-modified", "")
    length = response.headers.get("content-length")
    return DownloadRecord(
        address=dataset.address,
        etag=etag,
        modified=modified,
        # A weak ETag does not guarantee equal bytes, so it cannot validate a resumed transfer.
        validator=etag if etag and not etag.startswith("W/") else modified,
        size=None if length is None else int(length) + offset,
    )


def _is_unchanged(state: DownloadRecord, record: DownloadRecord | None) -> bool:
    if record is None or state.size is None or state.size != record.size:
        return False
    if state.etag or record.etag:
        return state.etag == record.etag
    return bool(state.modified) and state.modified == record.modified


def _write_body(
    dataset: DataSetFetch, response: CurlResponse, offset: int, total_bytes: int
) -> int:
    """Write the response from `offset` on; return the size of the file in bytes."""
    done_bytes = offset
    with (dataset.staging / "body").open("r+b" if offset else "wb") as file:
        file.seek(offset)
        for block in iter(response.read, b""):
            if not total_bytes:
                check_room(len(block), dataset.staging, dataset.address)
            file.write(block)
            done_bytes += len(block)
            dataset.report_progress(done_bytes, total_bytes)
    return done_bytes


def _reset_staging(dataset: DataSetFetch) -> None:
    shutil.rmtree(dataset.staging, ignore_errors=True)
    dataset.staging.mkdir(parents=True)
