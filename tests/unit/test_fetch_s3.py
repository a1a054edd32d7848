"""Data sets from S3, as the program on the server fetches them: moto's S3 behind S3's own rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from post_guard import ACCESS, REGION, SECRET, Guard, guarded_s3

from labctl.agent.files import fetch as fetch_verb
from labctl.agent.files import fetch_s3
from labctl.agent.files.fetch import DataSetFetch
from labctl.agent.mirror import boto3_python
from labctl.agent.reply import Failure
from labctl.servers.agent import build_program
from labctl.wire.files import FetchedSet, FetchRequest

OBJECTS = {
    "sets/digits/a.png": b"first",
    "sets/digits/b.png": b"second" * 1000,
    "sets/digits/c/d.png": b"third",
    "sets/digits/": b"",
    "sets/digits-other/x": b"not asked for",
    "single.bin": b"alone",
}
KEYS = {"AWS_ACCESS_KEY_ID": ACCESS, "AWS_SECRET_ACCESS_KEY": SECRET}


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Guard, str]]:
    with guarded_s3() as found:
        yield found


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A server's home; it has no credentials of its own, and no machine that would give it some."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", REGION)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def cloud(running: tuple[Guard, str], server: Path) -> Iterator[tuple[Guard, str]]:
    """A bucket `sets` that anybody may read."""
    guard, url = running
    resource = boto3.resource(
        "s3", endpoint_url=url, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET
    )
    resource.create_bucket(Bucket="bucket")
    bucket = resource.Bucket("bucket")
    for key, content in OBJECTS.items():
        bucket.put_object(Key=key, Body=content, ACL="public-read")
    guard.public = "bucket"
    yield guard, url
    guard.public = ""
    bucket.objects.all().delete()
    bucket.delete()


def fetch(server: Path, url: str, address: str) -> tuple[FetchedSet, dict[str, bytes]]:
    """The reply, and the data set as it is then."""
    lab = server / "labctl" / "digits"
    (lab / ".labctl").mkdir(parents=True, exist_ok=True)
    place = DataSetFetch(lab, "set", address)
    reply = fetch_s3.fetch_bucket(place, url)
    files = (path for path in place.root.rglob("*") if path.is_file())
    return reply, {str(path.relative_to(place.root)): path.read_bytes() for path in files}


@pytest.mark.parametrize("keys", [{}, KEYS], ids=["no keys", "keys that it refuses"])
def test_a_public_bucket_is_fetched_unsigned_and_only_once(
    keys: dict[str, str],
    cloud: tuple[Guard, str],
    server: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in keys.items():
        monkeypatch.setenv(name, value)
    guard, url = cloud
    reply, files = fetch(server, url, "s3://bucket/sets/digits")
    assert (reply.files, reply.bytes, reply.unchanged) == (3, 6010, False)
    assert files == {
        "a.png": b"first",
        "b.png": OBJECTS["sets/digits/b.png"],
        "c/d.png": b"third",
    }
    guard.reads.clear()
    assert fetch(server, url, "s3://bucket/sets/digits")[0].unchanged
    assert [path for path in guard.reads if "png" in path] == []


def test_what_changed_in_the_bucket_is_brought_and_what_went_goes(
    cloud: tuple[Guard, str], server: Path
) -> None:
    guard, url = cloud
    fetch(server, url, "s3://bucket/sets/digits")
    bucket = boto3.resource(
        "s3", endpoint_url=url, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET
    ).Bucket("bucket")
    bucket.put_object(Key="sets/digits/a.png", Body=b"newer", ACL="public-read")
    bucket.Object("sets/digits/c/d.png").delete()
    guard.reads.clear()
    _, files = fetch(server, url, "s3://bucket/sets/digits")
    assert files == {"a.png": b"newer", "b.png": OBJECTS["sets/digits/b.png"]}
    assert [path for path in guard.reads if "png" in path] == ["/bucket/sets/digits/a.png"]


def test_one_object_is_a_data_set_too(cloud: tuple[Guard, str], server: Path) -> None:
    assert fetch(server, cloud[1], "s3://bucket/single.bin")[1] == {"single.bin": b"alone"}
    with pytest.raises(Failure) as raised:
        fetch(server, cloud[1], "s3://bucket/nosuch")
    assert raised.value.report.kind == "missing"
    cloud[0].public = "no-such-bucket"
    with pytest.raises(Failure) as raised:
        fetch(server, cloud[1], "s3://no-such-bucket/x")
    assert raised.value.report.kind == "missing"


def test_a_download_goes_on_where_it_was_cut(cloud: tuple[Guard, str], server: Path) -> None:
    guard, url = cloud
    place = DataSetFetch(server / "labctl" / "digits", "set", "s3://bucket/sets/digits")
    bucket = fetch_s3.S3(place.address, credentials=fetch_s3.Credentials.NONE, endpoint=url)
    (listed,) = (one for one in bucket.list_objects() if one.key == "b.png")
    staged = fetch_s3._staged(place, "b.png", listed)
    staged.parent.mkdir(parents=True)
    staged.write_bytes(OBJECTS["sets/digits/b.png"][:4000])
    guard.reads.clear()
    _, files = fetch(server, url, "s3://bucket/sets/digits")
    assert files["b.png"] == OBJECTS["sets/digits/b.png"]
    assert guard.ranges["/bucket/sets/digits/b.png"] == "bytes=4000-"


def test_a_private_bucket_is_read_with_the_servers_own_keys(
    cloud: tuple[Guard, str], server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, url = cloud
    guard.public = ""
    with pytest.raises(Failure) as raised:
        fetch(server, url, "s3://bucket/sets/digits")
    assert raised.value.report.kind == "policy"
    assert "no AWS credentials" in raised.value.report.why
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    assert fetch(server, url, "s3://bucket/sets/digits")[0].files == 3


def test_a_bucket_of_google_is_read_only_if_it_is_public(
    cloud: tuple[Guard, str], server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, url = cloud
    assert fetch(server, url, "gs://bucket/sets/digits")[0].files == 3
    assert fetch(server, url, "gs://bucket/sets/digits")[0].unchanged
    guard.public = ""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)  # AWS's, which are not sent to Google
    with pytest.raises(Failure) as raised:
        fetch(server, url, "gs://bucket/single.bin")
    assert raised.value.report.kind == "policy"
    assert "only public buckets" in raised.value.report.why


@pytest.mark.parametrize("key", ["../../x", "/x", "./x", "a\x1b"])
def test_keys_that_lead_elsewhere_are_refused(key: str) -> None:
    with pytest.raises(Failure):
        fetch_s3._check_name(key)


REQUEST = {"lab": "digits", "lab_id": "0f1e2d3c4b5a"}


def call_program(
    archive: Path, python: list[str], address: str, endpoint: str
) -> subprocess.CompletedProcess[str]:
    """The program's verb `fetch`, in a Python that sees no packages."""
    request = {**REQUEST, "sources": {"set": address}, "s3_endpoint": endpoint}
    return subprocess.run(
        [*python, str(archive), "fetch"],
        input=json.dumps(request) + "\n",
        capture_output=True,
        text=True,
        timeout=240,
    )


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    path = tmp_path / "program.zip"
    path.write_bytes(build_program())
    return path


def test_a_python_without_boto3_hands_over_to_one_that_has_it(
    cloud: tuple[Guard, str], server: Path, archive: Path
) -> None:
    python = [sys.executable, "-I", "-S", "-B"]
    done = call_program(archive, python, "s3://bucket/sets/digits", cloud[1])
    assert done.returncode == 0, done.stderr
    assert '"files":3' in done.stderr
    assert (server / "labctl/digits/data/set/a.png").read_bytes() == b"first"


@pytest.mark.long
def test_a_server_without_root_gets_a_venv_of_its_own_or_is_told(
    server: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip finds boto3 in a directory, as it would find it in an index."""
    monkeypatch.setattr(boto3_python, "PYTHONS", ("no-such-python",))
    monkeypatch.setattr(boto3_python, "can_sudo", lambda: False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    assert boto3_python.provide_python() == ""
    monkeypatch.setattr(fetch_verb, "has_boto3", lambda: False)
    with pytest.raises(Failure, match="cannot fetch data from a bucket") as raised:
        fetch_verb.fetch_data_sets(FetchRequest(**REQUEST, sources={"set": "s3://bucket/x"}))
    assert raised.value.report.why == boto3_python.LACKING
    assert list((server / ".local/share/labctl").iterdir()) == []
    monkeypatch.setenv("PIP_FIND_LINKS", str(make_wheel(server)))
    python = boto3_python.provide_python()
    assert python == str(server / ".local/share/labctl/boto3/bin/python3")
    assert boto3_python.find_python() == python
    monkeypatch.setattr(boto3_python.os, "geteuid", lambda: os.getuid() + 1)
    assert boto3_python.find_python() == "", "root runs nobody else's venv"


def make_wheel(directory: Path) -> Path:
    """A boto3 with nothing in it; its botocore is beside it."""
    import zipfile

    with zipfile.ZipFile(directory / "boto3-1.40.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("boto3/__init__.py", "")
        wheel.writestr("botocore/__init__.py", "")
        wheel.writestr("botocore/httpchecksum.py", "")
        top = "boto3-1.40.0.dist-info"
        wheel.writestr(f"{top}/METADATA", "Metadata-Version: 2.1\nName: boto3\nVersion: 1.40.0\n")
        wheel.writestr(
            f"{top}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        wheel.writestr(f"{top}/RECORD", "")
    return directory
