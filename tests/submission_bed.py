"""Bundles, hostile ones too, and a receiver with a clock that tests set."""

from __future__ import annotations

import hashlib
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labctl.config.times import parse_moment
from labctl.submissions import bundle, manifest
from labctl.submissions.bundle import BundleSource
from labctl.submissions.manifest import BundleFile, BundleManifest, CodeCommit
from labctl.submissions.receive import write_assignment
from labctl.submissions.receiver import Receiver

DUE = "2026-11-28T23:59:00+01:00"
DUE_AT = parse_moment(DUE).at
HOST_KEY = "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIHost"
FILES = {
    "model/step-00000080/model.safetensors": b"\x10\0\0\0\0\0\0\0{}" + bytes(3000),
    "logs/run.log": b"epoch 1\nepoch 2\n",
    "report.html": b"<!doctype html><title>digits</title>",
    "run.json": b'{"id":"r1"}\n',
    "code/train.py": b"print('hello')\n",
}


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def sources_of(files: Mapping[str, bytes]) -> list[BundleSource]:
    return [
        BundleSource(
            file=BundleFile(path=path, size=len(content), sha256=sha256(content)), content=content
        )
        for path, content in files.items()
    ]


def manifest_of(files: Mapping[str, bytes], **other: Any) -> BundleManifest:
    fields: dict[str, Any] = {
        "kind": manifest.KIND,
        "version": 1,
        "assignment": "hw3",
        "course": "ml",
        "student": "alice",
        "lab": "digits",
        "run": "r1",
        "checkpoint": "step-00000080",
        "record": {"id": "r1", "exit_code": 0},
        "code": CodeCommit(),
        "files": tuple(source.file for source in sources_of(files)),
    }
    return BundleManifest(**{**fields, **other})


def packed(files: Mapping[str, bytes] | None = None, **other: Any) -> bytes:
    """A whole bundle of these files; `other` goes over the manifest."""
    chosen = FILES if files is None else files
    out = io.BytesIO()
    bundle.write_bundle(manifest_of(chosen, **other), sources_of(chosen), out)
    return out.getvalue()


class Tar:
    """A tar made by hand, member by member, behind a manifest that may promise anything."""

    def __init__(self, promised: Mapping[str, bytes]) -> None:
        self.out = io.BytesIO()
        self.add(manifest.NAME, manifest.encode(manifest_of(promised)))

    def add(self, name: str, content: bytes = b"", **fields: Any) -> Tar:
        info = tarfile.TarInfo(name)
        info.size = len(content)
        form = fields.pop("format", tarfile.PAX_FORMAT)
        for key, value in fields.items():
            setattr(info, key, value)
        return self.raw(info.tobuf(form, "utf-8", "surrogateescape"), content)

    def raw(self, header: bytes, content: bytes = b"") -> Tar:
        self.out.write(header + content + bytes(-len(content) % 512))
        return self

    def end(self, tail: bytes = b"") -> io.BytesIO:
        self.out.write(bytes(1024) + tail)
        return self.out


def pax_header(**records: str) -> bytes:
    """A pax header with these records, and what it stands for."""
    body = b""
    for key, value in records.items():
        line = f" {key.replace('_', '.')}={value}\n".encode()
        length = len(line) + 2
        length = len(line) + len(str(length))
        body += str(length).encode() + line
    info = tarfile.TarInfo("pax")
    info.type, info.size = b"x", len(body)
    return info.tobuf(tarfile.USTAR_FORMAT, "utf-8", "strict") + body + bytes(-len(body) % 512)


class Clock:
    """The receiver's clock."""

    def __init__(self, at: float) -> None:
        self.at = at

    def __call__(self) -> float:
        return self.at


def make_receiver(folder: Path, **given: str) -> tuple[Receiver, Clock]:
    """A receiver with the assignment hw3, a day before it is due."""
    clock = Clock(DUE_AT - 86400)
    receiver = Receiver(folder / "drop", clock)
    receiver.init()
    asked = {"due": DUE, "course": "ml", "host_key": HOST_KEY, "max_size": "1MB", **given}
    write_assignment(receiver, "hw3", "ssh://drop@course.example", asked)
    return receiver, clock


def handed_in(receiver: Receiver, data: bytes, student: str = "alice", part: int = 1000) -> Any:
    """Hand in a bundle as the service does, in parts."""
    about = ("hw3", student, sha256(data), len(data))
    begun = receiver.begin(*about)
    if not isinstance(begun, int):
        return begun
    offset = begun
    while offset < len(data):
        offset = receiver.write(*about, offset, data[offset : offset + part])
    return receiver.finish(*about)


def bomb(size: int = 3 * 1024**3) -> bytes:
    """A zip whose one file unpacks to `size` zeros, as its headers say."""
    import zipfile

    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(1000))
    data = bytearray(out.getvalue())
    for mark, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        struct.pack_into("<L", data, data.index(mark) + offset, size)
    return bytes(data)
