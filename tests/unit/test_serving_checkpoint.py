"""Checkpoints that hold more than data are refused; the whole server as its container runs it."""

from __future__ import annotations

import http.client
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from serving_bed import picture, safetensors

from labctl.services.model_server.checkpoint import check
from labctl.services.model_server.project import load
from labctl.services.model_server.refusals import ModelError

DEADLINE_S = 60.0
PROJECT = """
from pathlib import Path

class Predictor:
    classes = ("only",)
    reference = [7]

    def predict(self, images):
        {predict}
        return [[1.0] for _ in images]

def load(checkpoints):
    {load}
    return Predictor()
"""


class Evil:
    """Leaves a file where it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def evil(tmp_path: Path, protocol: int = 4) -> bytes:
    return pickle.dumps(Evil(tmp_path / "ran"), protocol)


def archive(tmp_path: Path) -> bytes:
    path = tmp_path / "archive"
    with zipfile.ZipFile(path, "w") as made:
        made.writestr("archive/data.pkl", evil(tmp_path))
    return path.read_bytes()


def array_of_objects(tmp_path: Path) -> bytes:
    head = b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117) + b"\n"
    return b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + evil(tmp_path)


BAD: dict[str, tuple[str, Callable[[Path], bytes], str]] = {
    "a pickle": ("model.pt", evil, "is a pickle"),
    "a pickle of protocol 2": ("model.bin", lambda at: evil(at, 2), "is a pickle"),
    "a pickle with good manners": ("model.safetensors", evil, "is a pickle"),
    "a pickle as JSON": ("state.json", evil, "is a pickle"),
    "torch.save": ("pytorch_model.bin", archive, "archive of pickles"),
    "torch.save by another name": ("model.safetensors", archive, "archive of pickles"),
    "NumPy with objects": ("weights.npy", array_of_objects, "pickle in it"),
    "joblib": ("model.joblib", lambda _: b"x\x9c" + bytes(50), "called .joblib"),
    "an old pickle": ("model.pkl", lambda at: evil(at, 0), "called .pkl"),
    "an old pickle as JSON": ("a.json", lambda at: evil(at, 0), "is not JSON"),
    "bytes as text": ("notes.txt", lambda _: b"\xff\xfe\x00", "is not text"),
    "cut off": ("a.safetensors", lambda _: safetensors()[:-1], "truncated"),
    "more behind it": ("a.safetensors", lambda _: safetensors() + b"more", "more than"),
    "a header without end": ("a.safetensors", lambda _: b"\xff" * 16, "truncated"),
    "no header": ("a.safetensors", lambda _: b"\x02" + bytes(7) + b"[]", "damaged header"),
    "deep JSON": ("a.json", lambda _: b"[" * 100_000, "is not JSON"),
}


@pytest.mark.parametrize("what", BAD)
def test_a_checkpoint_that_is_more_than_data_is_refused_with_the_reason(
    tmp_path: Path, what: str
) -> None:
    name, content, reason = BAD[what]
    home = tmp_path / "checkpoints" / "step-00000001"
    home.mkdir(parents=True)
    (home / "good.safetensors").write_bytes(safetensors())
    (home / name).write_bytes(content(tmp_path))
    with pytest.raises(ModelError, match=reason) as refused:
        check(tmp_path / "checkpoints")
    assert f"step-00000001/{name}" in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_data_alone_is_taken_whatever_its_first_bytes_look_like(tmp_path: Path) -> None:
    home = tmp_path / "step-00000001"
    home.mkdir()
    (home / "state.json").write_text('{"classes": ["a"]}')
    (home / "README.md").write_text("what it is")
    (home / "model.safetensors").write_bytes(safetensors())
    # The length 640 at its head reads like the beginning of a pickle.
    (home / "long.safetensors").write_bytes(safetensors(640))
    # A run that still trains is at its next one.
    half = tmp_path / ".step-00000002.partial-1a2b3c4d"
    half.mkdir()
    (half / "model.safetensors").write_bytes(safetensors()[:9])
    names = ("long.safetensors", "model.safetensors")
    assert check(home) == names
    assert check(tmp_path) == tuple(f"step-00000001/{name}" for name in names)
    assert check(home / "model.safetensors") == ("model.safetensors",)


def test_an_empty_one_a_missing_one_and_a_link_outwards_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "step-00000001"
    with pytest.raises(ModelError, match="there is no checkpoint"):
        check(home)
    home.mkdir()
    with pytest.raises(ModelError, match="no safetensors"):
        check(home)
    (tmp_path / "other.safetensors").write_bytes(safetensors())
    (home / "model.safetensors").symlink_to(tmp_path / "other.safetensors")
    with pytest.raises(ModelError, match="leads out"):
        check(home)


def test_a_project_that_does_not_keep_to_the_contract_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.safetensors").write_bytes(safetensors())
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModelError, match=r"no no_such_project\.py; load\(checkpoints\) returns"):
        load(tmp_path / "model.safetensors", "no_such_project")
    for number, (text, said) in enumerate(
        [
            ("x = 1", r"has no load\(\)"),
            ("def load(path): return 1", "no classes"),
            (PROJECT.format(predict="", load="Predictor.classes = ()"), "no classes"),
            (PROJECT.format(predict="", load="Predictor.reference = [1, 2]"), "a count for each"),
        ]
    ):
        (tmp_path / f"project_{number}.py").write_text(text)
        with pytest.raises(ModelError, match=said):
            load(tmp_path / "model.safetensors", f"project_{number}")


def project(folder: Path, predict: str = "pass", load: str = "pass") -> None:
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "model.safetensors").write_bytes(safetensors())
    (folder / "predict.py").write_text(PROJECT.format(predict=predict, load=load))


def free_port() -> int:
    """Below those that the system gives out, so that nobody is given it in between."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


@contextmanager
def started(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    environ = {**os.environ, "LABCTL_SERVE_PORT": str(port), "PYTHONWARNINGS": "error"}
    process = subprocess.Popen(
        [sys.executable, "-m", "labctl.services.model_server"],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_pickle_that_the_project_itself_loads_is_stopped(tmp_path: Path) -> None:
    (tmp_path / "hidden").write_bytes(evil(tmp_path, 0))
    project(tmp_path, load="import pickle; pickle.loads(Path('hidden').read_bytes())")
    with started(tmp_path, free_port()) as process:
        _, said = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 3
    assert "refused: a pickle that names posix.system was about to be loaded" in said
    assert not (tmp_path / "ran").exists()


def reached(port: int, process: subprocess.Popen[str]) -> http.client.HTTPConnection:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=DEADLINE_S)
        try:
            connection.connect()
            return connection
        except ConnectionRefusedError:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_was_begun_is_answered_before_the_server_stops(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "begun")
    os.mkfifo(tmp_path / "go-on")
    project(tmp_path, "Path('begun').write_text('x'); Path('go-on').read_text()")
    port, answers = free_port(), []
    with started(tmp_path, port) as process:
        connection = reached(port, process)

        def ask() -> None:
            connection.request("POST", "/predict", picture(), {"content-type": "image/png"})
            reply = connection.getresponse()
            answers.append((reply.status, json.loads(reply.read())))

        asking = threading.Thread(target=ask)
        asking.start()
        assert (tmp_path / "begun").read_text() == "x"
        process.send_signal(signal.SIGTERM)
        (tmp_path / "go-on").write_text("x")
        asking.join(DEADLINE_S)
        out, err = process.communicate(timeout=DEADLINE_S)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines() == ["serving model.safetensors, 1 classes", "stopped"]
    (status, body), *_ = answers
    assert (status, body["predictions"][0]["class"]) == (200, "only")
    connection.close()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.json", '{"learner": {"gradient_booster": {}}, "version": [3, 2, 0]}'),
        ("model.txt", "tree\nversion=v4\nnum_class=3\n"),
    ],
)
def test_trees_are_a_model_as_text(tmp_path: Path, name: str, text: str) -> None:
    home = tmp_path / "step-00000001"
    home.mkdir()
    (home / "state.json").write_text("{}")
    with pytest.raises(ModelError, match="no safetensors"):
        check(tmp_path)
    (home / name).write_text(text)
    assert check(tmp_path) == (f"step-00000001/{name}",)
