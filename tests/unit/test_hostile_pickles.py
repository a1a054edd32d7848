"""Pickles that are known to run something: the judge and picklescan, written by others, agree."""

from __future__ import annotations

import io
import pickle
from pathlib import Path

import pytest
from forged_bed import Touch
from picklescan.scanner import scan_pickle_bytes

from labctl.wire.judge import judge_file

MODULES = {
    "posix": "system",
    "os": "popen",
    "subprocess": "Popen",
    "builtins": "eval",
    "__builtin__": "exec",
    "socket": "socket",
    "runpy": "run_path",
    "pip": "main",
    "webbrowser": "open",
    "shutil": "rmtree",
    "pty": "spawn",
    "bdb": "Bdb.run",
    "timeit": "timeit",
    "cProfile": "runctx",
}


def by_global(module: str, name: str) -> bytes:
    return b"\x80\x02c" + f"{module}\n{name}\n".encode() + b"X\1\0\0\0x\x85R."


def by_stack(module: str, name: str) -> bytes:
    words = b"".join(b"\x8c" + bytes([len(word)]) + word.encode() for word in (module, name))
    return b"\x80\x04" + words + b"\x93\x8c\1x\x85R."


def by_instance(module: str, name: str) -> bytes:
    return b"\x80\x02(X\1\0\0\0xi" + f"{module}\n{name}\n".encode() + b"."


FORMS = [by_global, by_stack, by_instance]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("module", MODULES)
def test_what_picklescan_refuses_is_refused(module: str, form: object) -> None:
    assert callable(form)
    data = form(module, MODULES[module])
    assert scan_pickle_bytes(io.BytesIO(data), "m.pt").issues_count > 0
    for path in ("m.pt", "m.bin", "m.safetensors"):
        verdict = judge_file(path, io.BytesIO(data), len(data))
        assert MODULES[module].split(".")[0] in verdict.hazard, path
        assert verdict.pickle


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol(protocol: int, tmp_path: Path) -> None:
    data = pickle.dumps([1, Touch(tmp_path / "marker")], protocol)
    assert scan_pickle_bytes(io.BytesIO(data), "m.pkl").issues_count > 0
    assert "system" in judge_file("m.pkl", io.BytesIO(data), len(data)).hazard
