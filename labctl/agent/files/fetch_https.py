"""One file over HTTPS, resumed where it was cut; archives are unpacked."""

from __future__ import annotations

import posixpath
import shutil
import time
import urllib.parse
from typing import Any

from ..host.paths import read_json, write_json
from ..reply import Failure
from .curl import Answer, BrokenError, StatusError, open_address
from .fetch import Place, check_room
from .unpack import is_archive, unpack

TRIES = 5
NO_NAME = "data"


def describe_refusal(address: str, error: StatusError) -> Failure:
    """What an HTTP error means for the person."""
    if error.status in (401, 403):
        return Failure(
            "policy",
            f"{address} may not be read from the server ({error.status})",
            "it needs a login, and labctl sends none",
            "fetch it yourself and name its directory under data:, or push it to a public place",
        )
    if error.status in (404, 410):
        what = f"there is nothing at {address} ({error.status})"
        return Failure("missing", what, "", "mend data: in lab.yaml")
    return Failure("link", f"{address} answered {error}", "", "labctl push")


def fetch_address(place: Place) -> dict[str, Any]:
    """One file over HTTPS; an archive is unpacked. Skipped where the server says: the same."""
    record = place.record()
    state = _download(place, record)
    if state is None:
        return {"files": record["files"], "bytes": record["size"], "unchanged": True}
    name = _file_name(place.address)
    body = place.staging / "body"
    tree = place.staging / "tree"
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    files = 1
    if is_archive(name):
        files, left_out = unpack(body, name, tree)
        body.unlink()
        if left_out:
            place.note(f"{left_out} links and devices in {name} were left out")
    else:
        body.rename(tree / name)
    place.put(tree, {**state, "files": files})
    return {"files": files, "bytes": state["size"], "unchanged": False}


def _file_name(address: str) -> str:
    path = urllib.parse.unquote(urllib.parse.urlsplit(address).path)
    name = posixpath.basename(path)
    bad = name in ("", ".", "..") or "\0" in name or any(ord(c) < 32 for c in name)
    return NO_NAME if bad else name


def _download(place: Place, record: dict[str, Any]) -> dict[str, Any] | None:
    """Bring the body to staging and say what it is; None where it is what is here already."""
    place.staging.mkdir(parents=True, exist_ok=True)
    message = "it ended early"
    for attempt in range(TRIES):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            state = _attempt(place, record)
        except StatusError as error:
            if error.status == 304:
                return None
            if error.status == 416:
                _forget(place)
                continue
            if error.status < 500 or attempt == TRIES - 1:
                raise describe_refusal(place.address, error) from None
            message = str(error)
            continue
        except BrokenError as error:
            message = str(error)
            continue
        if state is None or state["size"] == (place.staging / "body").stat().st_size:
            return state
    raise Failure(
        "link",
        f"{place.address} broke off {TRIES} times",
        message,
        "labctl push  (what has arrived is kept and used)",
    )


def _attempt(place: Place, record: dict[str, Any]) -> dict[str, Any] | None:
    body = place.staging / "body"
    partial = read_json(place.staging / "state.json")
    have = body.stat().st_size if body.exists() and _resumable(place, partial) else 0
    with open_address(place.address, _conditions(partial, record, have), have) as answer:
        state = _state(place, answer, have)
        if not have and _same(state, record):
            return None
        # Nothing is written before this: a resumed file is of one version.
        is_rest = answer.status == 206 and state["validator"] == partial["validator"]
        if not have or is_rest:
            if state["size"] is not None:
                check_room(state["size"] - have, place.staging, place.address)
            write_json(place.staging / "state.json", state)
            _copy(place, answer, have, state)
            return state
    _forget(place)
    return _attempt(place, record)


def _resumable(place: Place, partial: dict[str, Any]) -> bool:
    return partial.get("address") == place.address and bool(partial.get("validator"))


def _conditions(partial: dict[str, Any], record: dict[str, Any], have: int) -> dict[str, str]:
    if have:
        return {"If-Range": partial["validator"]}
    if record.get("etag"):
        return {"If-None-Match": record["etag"]}
    if record.get("modified"):
        return {"If-Modified-Since": record["modified"]}
    return {}


def _state(place: Place, answer: Answer, have: int) -> dict[str, Any]:
    """What the answer's headers say; `size` is None where they do not tell."""
    etag = answer.headers.get("etag", "")
    modified = answer.headers.get("last-modified", "")
    length = answer.headers.get("content-length")
    return {
        "address": place.address,
        "etag": etag,
        "modified": modified,
        # A weak ETag promises no equal bytes, so it cannot carry a resumed transfer.
        "validator": etag if etag and not etag.startswith("W/") else modified,
        "size": None if length is None else int(length) + have,
    }


def _same(state: dict[str, Any], record: dict[str, Any]) -> bool:
    if not record or state["size"] is None or state["size"] != record.get("size"):
        return False
    if state["etag"] or record.get("etag"):
        return bool(state["etag"] == record.get("etag"))
    return bool(state["modified"]) and state["modified"] == record.get("modified")


def _copy(place: Place, answer: Answer, have: int, state: dict[str, Any]) -> None:
    total = state["size"] or 0
    done = have
    with (place.staging / "body").open("r+b" if have else "wb") as file:
        file.seek(have)
        for block in iter(answer.read, b""):
            if not total:
                check_room(len(block), place.staging, place.address)
            file.write(block)
            done += len(block)
            place.tell(done, total)
    if state["size"] is None:
        state["size"] = done


def _forget(place: Place) -> None:
    shutil.rmtree(place.staging, ignore_errors=True)
    place.staging.mkdir(parents=True)
