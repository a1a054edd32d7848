"""Data sets from S3: through the aws program where the server has it, else anonymously."""

from __future__ import annotations

import os
import shutil
import subprocess
import urllib.parse
import xml.etree.ElementTree
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Iterator

from .curl import Answer, BrokenError, StatusError, check_address, open_address
from .fetch import Place, check_room
from .fetch_https import describe_refusal
from .files import walk
from .place import inside, write_json
from .reply import Failure

THREADS = 8
LARGEST_LISTING_BYTES = 16 * 1024 * 1024


class Key:
    """One object: its key, size and ETag."""

    def __init__(self, key: str, size: int, etag: str) -> None:
        self.key = key
        self.size = size
        self.etag = etag


def fetch_bucket(place: Place, endpoint: str) -> dict[str, Any]:
    """All objects below s3://bucket/prefix; those that are here unchanged are not fetched again.

    With the aws program the server's own credentials count; where it has none, or no program,
    the bucket must be public.
    """
    if endpoint:
        check_address(endpoint)
    if shutil.which("aws"):
        done = _with_aws(place, endpoint)
        if done is not None:
            return done
    parts = urllib.parse.urlsplit(place.address)
    bucket = _Bucket(parts.netloc, endpoint)
    prefix = parts.path.strip("/")
    keys = {_relative(key.key, prefix): key for key in bucket.keys(prefix)}
    if not keys:
        raise Failure(
            "missing", f"there is nothing at {place.address}", "", "mend data: in lab.yaml"
        )
    return _bring(place, bucket, keys)


def _bring(place: Place, bucket: _Bucket, keys: dict[str, Key]) -> dict[str, Any]:
    known = place.record().get("objects", {})
    total = sum(key.size for key in keys.values())
    result = {"files": len(keys), "bytes": total, "unchanged": True}
    due = {n: k for n, k in keys.items() if not _is_here(place, n, k, known)}
    gone = sorted(set(known) - set(keys))
    if not due and not gone:
        return result
    left = sum(k.size - _have(place, n, k) for n, k in due.items())
    check_room(left, place.staging, place.address)
    done = total - left
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [pool.submit(bucket.fetch, key, _staged(place, n, key)) for n, key in due.items()]
        for job, key in zip(jobs, due.values()):
            job.result()
            done = min(total, done + key.size)
            place.tell(done, total)
    if known:
        _exchange(place, due, gone)
    else:
        # The place may hold something else, such as an earlier address's files.
        tree = place.staging / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        for name, key in due.items():
            target = inside(tree, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            _staged(place, name, key).rename(target)
        place.put(tree, {})
    objects = {name: [key.etag, key.size] for name, key in keys.items()}
    write_json(place.record_path, {"address": place.address, "objects": objects})
    shutil.rmtree(place.staging, ignore_errors=True)
    return {**result, "unchanged": False}


def _exchange(place: Place, due: dict[str, Key], gone: list[str]) -> None:
    for name in gone:
        old = inside(place.root, name)
        if old.is_file():
            old.unlink()
    for name, key in due.items():
        target = inside(place.root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        _staged(place, name, key).replace(target)


def _is_here(place: Place, name: str, key: Key, known: dict[str, Any]) -> bool:
    target = inside(place.root, name)
    same = known.get(name) == [key.etag, key.size]
    return same and target.is_file() and target.stat().st_size == key.size


def _staged(place: Place, name: str, key: Key) -> Path:
    """Where an object lands: one place for each ETag, so that a changed one begins anew."""
    version = "".join(c for c in key.etag if c.isalnum() or c == "-")[:64] or "none"
    return inside(place.staging, f"objects/{version}/{name}")


def _have(place: Place, name: str, key: Key) -> int:
    staged = _staged(place, name, key)
    return min(key.size, staged.stat().st_size) if staged.is_file() else 0


def _relative(key: str, prefix: str) -> str:
    below = key[len(prefix) + 1 :] if prefix else key
    name = key.rpartition("/")[2] if key == prefix else below
    if any(p in ("", ".", "..") for p in name.split("/")) or any(ord(c) < 32 for c in name):
        raise Failure("policy", f"the bucket holds the key {key!r}, which leaves its directory")
    return name


class _Bucket:
    """A public bucket over HTTPS."""

    def __init__(self, name: str, endpoint: str) -> None:
        self.name = name
        self.endpoint = endpoint.rstrip("/")
        self.region = ""

    def address(self, key: str, query: dict[str, str]) -> str:
        path = urllib.parse.quote(key)
        asked = "?" + urllib.parse.urlencode(query) if query else ""
        host = f"s3.{self.region}.amazonaws.com" if self.region else "s3.amazonaws.com"
        if self.endpoint:
            return f"{self.endpoint}/{self.name}/{path}{asked}"
        if "." in self.name:  # a wildcard certificate covers one label
            return f"https://{host}/{self.name}/{path}{asked}"
        return f"https://{self.name}.{host}/{path}{asked}"

    @contextmanager
    def open(
        self, key: str, query: dict[str, str], headers: dict[str, str], offset: int = 0
    ) -> Iterator[Answer]:
        try:
            with open_address(self.address(key, query), headers, offset) as answer:
                yield answer
            return
        except StatusError as error:
            region = error.headers.get("x-amz-bucket-region", "")
            moved = error.status in (301, 307, 400) and region and region != self.region
            if not moved:
                address = f"s3://{self.name}/{key or query.get('prefix', '')}"
                raise describe_refusal(address, error) from None
            self.region = region
        except BrokenError as error:
            what = f"s3://{self.name}/{key} broke off"
            hint = "labctl push  (what has arrived is kept and used)"
            raise Failure("link", what, str(error), hint) from None
        with self.open(key, query, headers, offset) as answer:
            yield answer

    def keys(self, prefix: str) -> Iterator[Key]:
        query = {"list-type": "2", "prefix": prefix}
        while True:
            text = bytearray()
            with self.open("", query, {}) as answer:
                for block in iter(answer.read, b""):
                    text += block
                    if len(text) > LARGEST_LISTING_BYTES:
                        raise Failure("policy", f"the listing of {self.name} is too large")
            tree = _parsed(bytes(text))
            for item in tree.iter("Contents"):
                key = item.findtext("Key", "")
                below = not prefix or key == prefix or key.startswith(prefix + "/")
                if below and not key.endswith("/"):
                    yield Key(key, int(item.findtext("Size", "0")), item.findtext("ETag", ""))
            token = tree.findtext("NextContinuationToken", "")
            if tree.findtext("IsTruncated") != "true" or not token:
                return
            query["continuation-token"] = token

    def fetch(self, key: Key, target: Path) -> None:
        """Bring one object, from where an earlier try stopped; it must still be the listed one."""
        target.parent.mkdir(parents=True, exist_ok=True)
        have = target.stat().st_size if target.exists() else 0
        if have >= key.size and target.exists():
            os.truncate(str(target), key.size)
            return
        headers = {"If-Match": key.etag} if key.etag else {}
        with self.open(key.key, {}, headers, have) as answer:
            is_rest = answer.status == 206
            if is_rest or not have:
                with target.open("ab" if is_rest else "wb") as file:
                    for block in iter(answer.read, b""):
                        file.write(block)
        if have and not is_rest:  # a store that gives whole objects alone
            target.unlink()
            self.fetch(key, target)
            return
        if target.stat().st_size != key.size:
            what = f"s3://{self.name}/{key.key} broke off"
            raise Failure("link", what, "", "labctl push  (what has arrived is kept and used)")


def _parsed(text: bytes) -> Any:
    """The listing without its namespace. A document type could hold an entity bomb: refused."""
    if b"<!DOCTYPE" in text or b"<!ENTITY" in text:
        raise Failure("policy", "the store's listing has a document type, which none has")
    try:
        tree = xml.etree.ElementTree.fromstring(text)
    except xml.etree.ElementTree.ParseError as error:
        raise Failure("link", "the store's listing cannot be read", str(error)) from None
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
    return tree


def _with_aws(place: Place, endpoint: str) -> dict[str, Any] | None:
    """`aws s3 sync` with the server's own credentials; None where it has none."""
    tree = place.staging / "aws"
    if place.record().get("aws"):
        shutil.rmtree(tree, ignore_errors=True)
        tree = place.root
    tree.mkdir(parents=True, exist_ok=True)
    more = ["--endpoint-url", endpoint] if endpoint else []
    line = ["aws", "s3", "sync", place.address, str(tree), "--delete", "--no-progress"]
    said, fetched = _run_aws(place, [*line, "--exact-timestamps", *more])
    if not said and not any(tree.iterdir()):  # not a prefix: one object
        said, fetched = _run_aws(
            place, ["aws", "s3", "cp", place.address, str(tree), "--no-progress", *more]
        )
    if "Unable to locate credentials" in said:
        return None
    if said:
        raise _aws_refused(place, said)
    sizes = [path.stat().st_size for path in walk(tree)]
    if tree != place.root:
        place.put(tree, {"aws": True})
    return {"files": len(sizes), "bytes": sum(sizes), "unchanged": fetched == 0}


def _run_aws(place: Place, line: list[str]) -> tuple[str, int]:
    """(what it complained of, "" if nothing; how many objects it changed)."""
    process = subprocess.Popen(
        line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    changed = 0
    last = ""
    with process:
        for text in process.stdout or ():
            last = text.strip() or last
            if text.startswith(("download:", "delete:")):
                changed += 1
                place.tell(changed, 0)
    return (last or "it gave no reason") if process.returncode else "", changed


def _aws_refused(place: Place, said: str) -> Failure:
    if "NoSuchBucket" in said or "(404)" in said:
        return Failure("missing", f"there is nothing at {place.address}", said)
    if "AccessDenied" in said or "(403)" in said:
        what = f"{place.address} may not be read with the server's credentials"
        return Failure("policy", what, said, "labctl ssh -- aws sts get-caller-identity")
    if "No space left" in said:
        return Failure("disk", "the server's disk is full", said, "labctl ssh -- df -h")
    return Failure("link", f"{place.address} could not be fetched", said, "labctl push")
