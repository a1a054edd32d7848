"""What reads a stranger's bundle can reach nothing, even where the bundle has taken it over."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from submission_bed import FILES, handed_in, make_receiver, packed

from labctl.errors import TransferError
from labctl.submissions import examination
from labctl.submissions.confinement import has_filter
from labctl.submissions.receiver import Receiver

needs_filter = pytest.mark.skipif(not has_filter(), reason="this system has no seccomp filter")

TAKEN_OVER = """
import ctypes, json, os, signal, socket, subprocess
from pathlib import Path
import labctl.submissions.bundle as bundle

def find_hazards(file, members):
{body}

bundle.find_hazards = find_hazards
"""
ATTEMPTS = """
found = {{"environment": sorted(os.environ)}}

def attempt(name, call):
    try:
        found[name] = repr(call())
    except BaseException as error:
        found[name] = type(error).__name__

def connect(family, address):
    with socket.socket(family) as wire:
        wire.connect(address)

def system_call():
    libc = ctypes.CDLL(None, use_errno=True)
    path = str({home!r} + "/.aws/credentials").encode()
    descriptor = libc.open(path, os.O_RDONLY)
    if descriptor < 0:
        raise OSError(ctypes.get_errno(), "open")
    return os.read(descriptor, 100)

attempt("credentials", lambda: Path({home!r}, ".aws", "credentials").read_text())
attempt("credentials through libc", system_call)
attempt("signing key", lambda: Path({drop!r}, "signing-key").read_text())
attempt("another process", lambda: Path(f"/proc/{{os.getppid()}}/environ").read_bytes())
attempt("writing", lambda: Path({home!r}, "written").write_text("x"))
attempt("removing", lambda: os.unlink({home!r} + "/.aws/credentials"))
attempt("metadata service", lambda: connect(socket.AF_INET, ("127.0.0.1", {port})))
attempt("keeper's socket", lambda: connect(socket.AF_UNIX, {home!r} + "/socket"))
attempt("fork", os.fork)
attempt("program", lambda: subprocess.run(["/bin/true"]))
attempt("becoming a program", lambda: os.execv("/bin/true", ["true"]))
attempt("signal", lambda: os.kill(os.getppid(), signal.SIGTERM))
return [json.dumps(found)]
"""


@pytest.fixture
def take_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Run this code in place of what looks for hazards, in the confined process alone."""

    def take(body: str) -> None:
        folder = tmp_path / "taken"
        folder.mkdir(exist_ok=True)
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (folder / "sitecustomize.py").write_text(TAKEN_OVER.format(body=lines))
        monkeypatch.setattr(sys, "path", [str(folder), *sys.path])

    return take


def refusal(receiver: Receiver) -> str:
    with pytest.raises(TransferError, match="the bundle is refused") as refused:
        handed_in(receiver, packed())
    return refused.value.why


@needs_filter
def test_a_bundle_that_takes_over_its_reader_has_nothing(
    tmp_path: Path, take_over: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    home = tmp_path / "keeper"
    (home / ".aws").mkdir(parents=True)
    (home / ".aws" / "credentials").write_text("[default]\naws_secret_access_key = secret\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    receiver, _ = make_receiver(tmp_path)
    with (
        socket.create_server(("127.0.0.1", 0)) as metadata,
        socket.socket(socket.AF_UNIX) as listener,
    ):
        monkeypatch.chdir(home)
        listener.bind("socket")
        listener.listen()
        port = metadata.getsockname()[1]
        attempts = ATTEMPTS.format(home=str(home), drop=str(receiver.directory), port=port)
        take_over(attempts)
        found: dict[str, Any] = json.loads(refusal(receiver))
    assert set(found.pop("environment")) <= {"PYTHONPATH", "LC_CTYPE"}
    assert found == dict.fromkeys(found, "PermissionError")
    assert len(found) == 12
    assert (home / ".aws" / "credentials").exists()
    assert not (home / "written").exists()


BROKEN = {
    "memory": "bytearray(8 * 1024**3)\nreturn []",
    "time": "while True:\n    pass",
    "a crash": "return ctypes.string_at(0)",
    "an answer without end": "return ['x' * 10**8]",
    "an answer that is none": "os.write(1, b'{\"examined\": 1}')\nos._exit(0)",
    "an error of its own": "raise KeyError('x')",
}


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=pytest.mark.long if kind == "time" else ()) for kind in BROKEN],
)
def test_what_breaks_the_reader_is_refused_and_the_receiver_goes_on(
    tmp_path: Path,
    take_over: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    receiver, _ = make_receiver(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr(examination, "CPU_S", 3)
        take_over(BROKEN[kind])
        assert "exceeded the memory or time limit" in refusal(receiver)
    assert receiver.students("hw3") == []
    (tmp_path / "taken" / "sitecustomize.py").unlink()
    assert handed_in(receiver, packed()).receipt.number == 1


def test_the_reader_is_believed_in_nothing_that_the_receiver_knows(
    tmp_path: Path, take_over: Callable[[str], None]
) -> None:
    receiver, _ = make_receiver(tmp_path)
    answer = {
        "examined": {"run": "r9", "manifest_sha256": "0" * 64, "student": "bob"},
        "student": "bob",
    }
    text = json.dumps(answer).encode()
    take_over(f"os.write(1, {text!r})\nos._exit(0)")
    signed = handed_in(receiver, packed()).receipt
    assert (signed.student, signed.assignment, signed.run) == ("alice", "hw3", "r9")
    assert signed.bundle_bytes == len(packed())


def test_every_kind_of_file_is_read_there(tmp_path: Path) -> None:
    """Python imports some of what reads them only when it meets them."""
    import gzip
    import io
    import zipfile

    receiver, _ = make_receiver(tmp_path)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as made:
        made.writestr("m/data.pkl", b"\x80\x02V\\u00e4\n.")
        made.writestr("größe", b"1" * 1000)
    # A name that is not said to be UTF-8.
    old = archive.getvalue().replace("größe".encode(), b"gr\x94\xe1e12")
    head = b"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }\n"
    files = {
        "model/a.pt": archive.getvalue(),
        "model/a.npy": b"\x93NUMPY\x01\0" + len(head).to_bytes(2, "little") + head + bytes(4),
        "model/a.pkl": b"\x80\x02S'\\x41'\n.",
        "model/b.pkl": b"S'a'\nV\\u00e4\n\x85.",
        "logs/a.gz": gzip.compress(b"1" * 10_000),
        "logs/a.json": b'{"a": 1}',
    }
    assert len(old) == len(archive.getvalue())
    signed = handed_in(receiver, packed({**FILES, **files}), part=10_000)
    assert signed.receipt.number == 1


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="there is no /proc here")
@needs_filter
def test_the_kernel_says_that_it_is_confined(
    tmp_path: Path, take_over: Callable[[str], None]
) -> None:
    """Read through a descriptor that was opened before."""
    receiver, _ = make_receiver(tmp_path)
    take_over("return [status.read(), limits.read()]")
    place = tmp_path / "taken" / "sitecustomize.py"
    opened = "status, limits = (open(f'/proc/self/{name}') for name in ('status', 'limits'))\n"
    place.write_text(opened + place.read_text())
    why = refusal(receiver)
    assert "Seccomp:\t2" in why
    assert "NoNewPrivs:\t1" in why
    rows = {line[:25].strip(): line[25:].split()[:2] for line in why.splitlines()}
    assert rows["Max address space"][0] == str(examination.MEMORY_BYTES)
    assert rows["Max file size"] == ["0", "0"]
    assert rows["Max core file size"] == ["0", "0"]
    assert os.environ["PATH"] not in why
