"""Pickles among checkpoints, whatever they are called. Loading one of these would run code."""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest

from labctl.errors import PolicyError
from labctl.runs.pickle_check import describe_pickle, refuse_pickles


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/a-pickle-was-loaded",)


def zipped(*names: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"content")
    return buffer.getvalue()


def safetensors(length: int = 0) -> bytes:
    """One number; the header is filled up to `length`, as the format allows."""
    head = json.dumps({"weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    head = head.ljust(length)
    return struct.pack("<Q", len(head)) + head + bytes(4)


def numpy_file(descr: str) -> bytes:
    head = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': (1,), }}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head + bytes(8)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *((f"protocol-{p}.bin", pickle.dumps(Evil(), protocol=p)) for p in (2, 3, 4, 5)),
        ("model.safetensors", pickle.dumps(Evil())),
        ("model.safetensors", zipped("archive/data.pkl", "archive/data/0")),
        ("model.safetensors", b"\x80\x02U\x05\x00\x00\x00\x00{" + pickle.dumps(Evil())),
        ("weights.bin", safetensors(0x80 + 256 * 2)),
        ("model.pth", zipped("archive/data.pkl")),
        ("old.pt", pickle.dumps(Evil(), protocol=0)),
        ("MODEL.CKPT", b"whatever"),
        ("pytorch_model.bin", pickle.dumps(Evil(), protocol=0)),
        ("archive.zip", b"PK\x03\x04 cut off"),
        ("objects.npy", numpy_file("|O")),
        ("arrays.npz", zipped("weights.pkl")),
        ("short.npy", b""),
    ],
)
def test_a_pickle_is_refused_with_the_reason(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints" / "step-1" / name).write_bytes(content)
    with pytest.raises(PolicyError) as caught:
        refuse_pickles(tmp_path / "checkpoints", hint="labctl eval --on-server")
    assert f"checkpoints/step-1/{name}" in caught.value.what
    assert "runs any code" in caught.value.why
    assert caught.value.hint == "labctl eval --on-server"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("model.safetensors", safetensors()),
        *(("model.safetensors", safetensors(0x80 + 256 * protocol)) for protocol in (2, 3, 4, 5)),
        ("state.json", b"{}"),
        ("numbers.npy", numpy_file("<f4")),
        ("weights.npz", zipped("weights.txt")),
        ("empty", b""),
    ],
)
def test_what_holds_no_code_passes(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    refuse_pickles(tmp_path, hint="")
    assert describe_pickle(tmp_path / name) == ""


def test_what_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert describe_pickle(tmp_path / "absent.pt") == ""
