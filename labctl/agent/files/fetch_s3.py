"""Data sets from buckets: S3, and Google Cloud Storage through its endpoint for S3 clients.

A public bucket is read unsigned. For S3, the server's own credentials are tried then; Google
does not know those.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ...wire.codec import to_json
from ...wire.containment import is_contained
from ...wire.files import BucketRecord, FetchedSet, ObjectRecord
from ...wire.s3 import S3, Credentials, ListedObject
from ...wire.s3_errors import S3Error, S3Problem
from ...wire.verbs import CONFIG_FILE, HintPart
from ..host.paths import resolve_inside, write_json
from ..reply import Failure
from .curl import RESUME, check_address
from .fetch import DataSetFetch, check_room

THREADS = 8
GOOGLE = "https://storage.googleapis.com"
GOOGLE_SCHEME = "gs://"


def fetch_bucket(dataset: DataSetFetch, endpoint: str) -> FetchedSet:
    """Fetch all objects below s3:// or gs://bucket/prefix, except those that are here unchanged."""
    is_google = dataset.address.startswith(GOOGLE_SCHEME)
    url = "s3://" + dataset.address.partition("://")[2]
    if endpoint:
        check_address(endpoint)
    elif is_google:
        endpoint = GOOGLE
    bucket = S3(url, credentials=Credentials.NONE, endpoint=endpoint)
    try:
        try:
            return _fetch_objects(dataset, bucket, _list_objects(bucket))
        except S3Error as error:
            if error.problem is not S3Problem.DENIED or is_google:
                raise
            bucket = S3(url, endpoint=endpoint)
            return _fetch_objects(dataset, bucket, _list_objects(bucket))
    except S3Error as error:
        raise _describe(dataset.address, error) from None


def _describe(address: str, error: S3Error) -> Failure:
    """Turn an S3 error into a Failure."""
    if error.problem in (S3Problem.MISSING, S3Problem.NO_BUCKET):
        hint = ("correct data: in ", CONFIG_FILE)
        return Failure("missing", f"{address} does not exist", error.why, hint)
    if error.problem is S3Problem.DENIED and address.startswith(GOOGLE_SCHEME):
        return Failure(
            "policy",
            f"{address} cannot be read without an account",
            "labctl reads only public buckets of Google Cloud Storage",
            "download the data and put its directory under data:, or make it public",
        )
    if error.problem is S3Problem.NO_CREDENTIALS:
        return Failure(
            "policy",
            f"the server is not allowed to read {address}",
            "the bucket is not public, and the server has no AWS credentials",
            "download the data and put its directory under data:, or make it public",
        )
    if error.problem is S3Problem.DENIED:
        what = f"the server's credentials do not allow it to read {address}"
        return Failure("policy", what, error.why, HintPart("ssh", "aws sts get-caller-identity"))
    what = f"could not fetch {address}"
    return Failure("link", what, error.why, RESUME)


def _list_objects(bucket: S3) -> dict[str, ListedObject]:
    """Return the objects by their names in the data set."""
    listed = [entry for entry in bucket.list_objects() if not entry.key.endswith("/")]
    objects = {_check_name(entry.key): entry for entry in listed if entry.key}
    single_object = None if objects else bucket.find()
    if single_object:
        objects = {_check_name(bucket.folder.rpartition("/")[2]): single_object}
    if not objects:
        raise S3Error(S3Problem.MISSING, "")
    return objects


def _check_name(name: str) -> str:
    if not is_contained(name) or any(ord(c) < 32 for c in name):
        raise Failure("policy", f"the bucket has the key {name!r}, which leaves its directory")
    return name


def _fetch_objects(dataset: DataSetFetch, bucket: S3, keys: dict[str, ListedObject]) -> FetchedSet:
    record = dataset.read_record(BucketRecord)
    recorded = record.objects if record else {}
    total_bytes = sum(key.size for key in keys.values())
    result = FetchedSet(len(keys), total_bytes, unchanged=True)
    due = {n: k for n, k in keys.items() if not _is_here(dataset, n, k, recorded)}
    removed = sorted(set(recorded) - set(keys))
    if not due and not removed:
        return result
    missing_bytes = sum(k.size - _staged_bytes(_staged(dataset, n, k), k) for n, k in due.items())
    check_room(missing_bytes, dataset.staging, dataset.address)
    done_bytes = total_bytes - missing_bytes
    with ThreadPoolExecutor(THREADS) as pool:
        jobs = [
            pool.submit(_download, bucket, key, _staged(dataset, n, key)) for n, key in due.items()
        ]
        for job, key in zip(jobs, due.values()):
            job.result()
            done_bytes = min(total_bytes, done_bytes + key.size)
            dataset.report_progress(done_bytes, total_bytes)
    if recorded:
        _exchange(dataset, due, removed)
    else:
        # The directory may hold other data, for example the files of an earlier address.
        tree = dataset.staging / "tree"
        shutil.rmtree(tree, ignore_errors=True)
        for name, key in due.items():
            target = resolve_inside(tree, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            _staged(dataset, name, key).rename(target)
        dataset.replace_tree(tree, BucketRecord(dataset.address, {}))
    objects = {name: ObjectRecord(key.etag, key.size) for name, key in keys.items()}
    write_json(dataset.record_path, to_json(BucketRecord(dataset.address, objects)))
    shutil.rmtree(dataset.staging, ignore_errors=True)
    return result._replace(unchanged=False)


def _exchange(dataset: DataSetFetch, due: dict[str, ListedObject], removed: list[str]) -> None:
    for name in removed:
        old = resolve_inside(dataset.root, name)
        if old.is_file():
            old.unlink()
    for name, key in due.items():
        target = resolve_inside(dataset.root, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        _staged(dataset, name, key).replace(target)


def _is_here(
    dataset: DataSetFetch, name: str, key: ListedObject, recorded: dict[str, ObjectRecord]
) -> bool:
    target = resolve_inside(dataset.root, name)
    same = recorded.get(name) == (key.etag, key.size)
    return same and target.is_file() and target.stat().st_size == key.size


def _staged(dataset: DataSetFetch, name: str, key: ListedObject) -> Path:
    """Return where an object is staged: a path for each ETag, so that a changed one starts anew."""
    version = "".join(c for c in key.etag if c.isalnum() or c == "-")[:64] or "none"
    return resolve_inside(dataset.staging, f"objects/{version}/{name}")


def _staged_bytes(staged: Path, key: ListedObject) -> int:
    return min(key.size, staged.stat().st_size) if staged.is_file() else 0


def _download(bucket: S3, key: ListedObject, target: Path) -> None:
    """Download one object from where an earlier try stopped; it must still be the listed one."""
    target.parent.mkdir(parents=True, exist_ok=True)
    offset = _staged_bytes(target, key)
    if offset == key.size and target.is_file():
        os.truncate(str(target), key.size)
        return
    with target.open("r+b" if offset else "wb") as file:
        file.seek(offset)
        for block in bucket.read_blocks(key.key, start=offset, etag=key.etag):
            file.write(block)
    if target.stat().st_size != key.size:
        raise S3Error(S3Problem.UNREACHABLE, f"the download of {key.key} broke off")
