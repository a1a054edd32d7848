"""Data sets from S3: unsigned where the bucket is public, else with the server's credentials."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ...wire.s3 import S3, Credentials, Listed, Problem, S3Error
from ..host.paths import inside, write_json
from ..reply import Failure
from .curl import check_address
from .fetch import Place, check_room

THREADS = 8


def fetch_bucket(place: Place, endpoint: str) -> dict[str, Any]:
    """All objects below s3://bucket/prefix; those that are here unchanged are not fetched again."""
    if endpoint:
        check_address(endpoint)
    bucket = S3(place.address, credentials=Credentials.NONE, endpoint=endpoint)
    try:
        try:
            return _bring(place, bucket, _list_objects(bucket))
        except S3Error as error:
            if error.problem is not Problem.DENIED:
                raise
            bucket = S3(place.address, endpoint=endpoint)
            return _bring(place, bucket, _list_objects(bucket))
    except S3Error as error:
        raise _describe(place.address, error) from None


def _describe(address: str, error: S3Error) -> Failure:
    """What S3's refusal means for the person."""
    if error.problem in (Problem.MISSING, Problem.NO_BUCKET):
        return Failure(
            "missing", f"there is nothing at {address}", error.why, "mend data: in lab.yaml"
        )
    if error.problem is Problem.NO_CREDENTIALS:
        return Failure(
            "policy",
            f"{address} may not be read from the server",
            "the bucket is not public, and the server has no AWS credentials",
            "fetch it yourself and name its directory under data:, or push it to a public place",
        )
    if error.problem is Problem.DENIED:
        what = f"{address} may not be read with the server's credentials"
        return Failure("policy", what, error.why, "labctl ssh -- aws sts get-caller-identity")
    what = f"{address} could not be fetched"
    return Failure("link", what, error.why, "labctl push  (what has arrived is kept and used)")


def _list_objects(bucket: S3) -> dict[str, Listed]:
    """By their names in the data set."""
    found = [each for each in bucket.list_objects() if not each.key.endswith("/")]
    objects = {_check_name(each.key): each for each in found if each.key}
    alone = None if objects else bucket.find()
    if alone:
        objects = {_check_name(bucket.folder.rpartition("/")[2]): alone}
    if not objects:
        raise S3Error(Problem.MISSING, "")
    return objects


def _check_name(name: str) -> str:
    if any(p in ("", ".", "..") for p in name.split("/")) or any(ord(c) < 32 for c in name):
        raise Failure("policy", f"the bucket holds the key {name!r}, which leaves its directory")
    return name


def _bring(place: Place, bucket: S3, keys: dict[str, Listed]) -> dict[str, Any]:
    known = place.record().get("objects", {})
    total = sum(key.size for key in keys.values())
    result = {"files": len(keys), "bytes": total, "unchanged": True}
    due = {n: k for n, k in keys.items() if not _is_here(place, n, k, known)}
    gone = sorted(set(known) - set(keys))
    if not due and not gone:
        return result
    left = sum(k.size - _have(_staged(place, n, k), k) for n, k in due.items())
    check_room(left, place.staging, place.address)
    done = total - left
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(_download, bucket, key, _staged(place, n, key)) for n, key in due.items()
        ]
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


def _exchange(place: Place, due: dict[str, Listed], gone: list[str]) -> None:
    for name in gone:
        old = inside(place.root, name)
        if old.is_file():
            old.unlink()
    for name, key in due.items():
        target = inside(place.root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        _staged(place, name, key).replace(target)


def _is_here(place: Place, name: str, key: Listed, known: dict[str, Any]) -> bool:
    target = inside(place.root, name)
    same = known.get(name) == [key.etag, key.size]
    return same and target.is_file() and target.stat().st_size == key.size


def _staged(place: Place, name: str, key: Listed) -> Path:
    """Where an object lands: one place for each ETag, so that a changed one begins anew."""
    version = "".join(c for c in key.etag if c.isalnum() or c == "-")[:64] or "none"
    return inside(place.staging, f"objects/{version}/{name}")


def _have(staged: Path, key: Listed) -> int:
    return min(key.size, staged.stat().st_size) if staged.is_file() else 0


def _download(bucket: S3, key: Listed, target: Path) -> None:
    """Bring one object, from where an earlier try stopped; it must still be the listed one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    have = _have(target, key)
    if have == key.size and target.is_file():
        os.truncate(str(target), key.size)
        return
    with target.open("r+b" if have else "wb") as file:
        file.seek(have)
        for block in bucket.read_blocks(key.key, start=have, etag=key.etag):
            file.write(block)
    if target.stat().st_size != key.size:
        raise S3Error(Problem.UNREACHABLE, f"{key.key} broke off")
