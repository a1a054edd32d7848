"""One file over HTTPS, resumed where it was cut; archives are unpacked."""

from __future__ import annotations

import http.client
import ipaddress
import posixpath
import shutil
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from .fetch import Place, check_room
from .place import CHUNK, read_json, write_json
from .reply import Failure
from .unpack import is_archive, unpack

TRIES = 5
IDLE_S = 30.0
NO_NAME = "data"


def check_address(address: str, *, allow_plain: bool = True) -> None:
    """https:// alone, but for http:// to this very machine."""
    parts = urllib.parse.urlsplit(address)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and allow_plain and _is_loopback(parts.hostname or ""):
        return
    raise Failure(
        "usage",
        f"data cannot be fetched from {address!r}",
        "only https:// and s3:// are safe from being changed on the way",
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to safe addresses only, and never from https:// to http://."""

    def redirect_request(
        self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> Any:
        check_address(newurl, allow_plain=req.full_url.startswith("http:"))
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def open_address(address: str, headers: dict[str, str]) -> Any:
    """The open answer. HTTP errors as urllib's HTTPError, all else that fails as a Failure."""
    check_address(address)
    opener = urllib.request.build_opener(_Redirects())
    request = urllib.request.Request(address, headers={"User-Agent": "labctl", **headers})
    try:
        return opener.open(request, timeout=IDLE_S)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        host = urllib.parse.urlsplit(address).hostname
        if isinstance(error.reason, socket.gaierror):
            raise Failure(
                "link",
                f"the server cannot resolve the name {host}",
                str(error.reason),
                f"check the address; labctl ssh -- getent hosts {host}",
            ) from None
        raise Failure(
            "link", f"the server cannot reach {host}", str(error.reason), "labctl push"
        ) from None


def refused(address: str, error: urllib.error.HTTPError) -> Failure:
    """What an HTTP error means for the person."""
    if error.code in (401, 403):
        return Failure(
            "policy",
            f"{address} may not be read from the server ({error.code})",
            "it needs a login, and labctl sends none",
            "fetch it yourself and name its directory under data:, or push it to a public place",
        )
    if error.code in (404, 410):
        what = f"there is nothing at {address} ({error.code})"
        return Failure("missing", what, "", "mend data: in lab.yaml")
    return Failure("link", f"{address} answered {error.code} {error.reason}", "", "labctl push")


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
    said = "it ended early"
    for attempt in range(TRIES):
        if attempt:
            time.sleep(2.0 ** (attempt - 1))
        try:
            state = _attempt(place, record)
        except urllib.error.HTTPError as error:
            if error.code == 304:
                return None
            if error.code == 416:
                _forget(place)
                continue
            if error.code < 500 or attempt == TRIES - 1:
                raise refused(place.address, error) from None
            said = f"{error.code} {error.reason}"
            continue
        except (http.client.HTTPException, ConnectionError, socket.timeout) as error:
            said = str(error) or type(error).__name__
            continue
        if state is None or state["size"] == (place.staging / "body").stat().st_size:
            return state
    raise Failure(
        "link",
        f"{place.address} broke off {TRIES} times",
        said,
        "labctl push  (what has arrived is kept and used)",
    )


def _attempt(place: Place, record: dict[str, Any]) -> dict[str, Any] | None:
    body = place.staging / "body"
    partial = read_json(place.staging / "state.json")
    have = body.stat().st_size if body.exists() and _resumable(place, partial) else 0
    with open_address(place.address, _conditions(partial, record, have)) as answered:
        if answered.status != 206:
            have = 0
        state = _state(place, answered, have)
        if not have and _same(state, record):
            return None
        if have and state["validator"] != partial["validator"]:
            _forget(place)
            raise http.client.HTTPException("it changed meanwhile")
        if state["size"] is not None:
            check_room(state["size"] - have, place.staging, place.address)
        write_json(place.staging / "state.json", state)
        _copy(place, answered, have, state)
    return state


def _resumable(place: Place, partial: dict[str, Any]) -> bool:
    return partial.get("address") == place.address and bool(partial.get("validator"))


def _conditions(partial: dict[str, Any], record: dict[str, Any], have: int) -> dict[str, str]:
    if have:
        return {"Range": f"bytes={have}-", "If-Range": partial["validator"]}
    if record.get("etag"):
        return {"If-None-Match": record["etag"]}
    if record.get("modified"):
        return {"If-Modified-Since": record["modified"]}
    return {}


def _state(place: Place, answered: Any, have: int) -> dict[str, Any]:
    """What the answer's headers say; `size` is None where they do not tell."""
    etag = answered.headers.get("ETag") or ""
    modified = answered.headers.get("Last-Modified") or ""
    length = answered.headers.get("Content-Length")
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


def _copy(place: Place, answered: Any, have: int, state: dict[str, Any]) -> None:
    total = state["size"] or 0
    done = have
    with (place.staging / "body").open("r+b" if have else "wb") as file:
        file.seek(have)
        while True:
            block = answered.read(CHUNK)
            if not block:
                break
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
