"""track sync as it is typed: what is uploaded, once, with which key, and from where."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from labctl.config import ensure_lab_id, find_paths, set_secret
from labctl.config.installation import install_command
from labctl.model import Run
from labctl.runs import tracker_upload
from labctl.state import State

# Stands for wandb's program, since an upload needs an account: it writes down what it is called
# with, and marks the files as wandb does.
PROGRAM = """#!/bin/sh
echo "$PWD $WANDB_API_KEY $WANDB_MODE $*" >>"$HOME/calls"
shift 2
for part; do touch "$part/run-x.wandb.synced"; done
"""


@pytest.fixture
def lab(home: Path) -> Path:
    root = home / "digits"
    own = ensure_lab_id(root)
    with State(find_paths().database) as state:
        for name in ("one", "two", "three"):
            command = ("python", "train.py")
            run = Run(id=name, lab_id=own, server_id="s1", state="exited", command=command)
            state.save_run(run)
            (root / "runs" / name).mkdir(parents=True)
    for name in ("one/logs/wandb/offline-run-1-one", "one/logs/wandb/offline-run-2-one"):
        (root / "runs" / name).mkdir(parents=True)
    (root / "runs" / "two" / "logs" / "wandb" / "offline-run-1-two").mkdir(parents=True)
    return root


@pytest.fixture
def calls(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a program wandb that is alone on PATH."""
    (home / "bin").mkdir()
    (home / "bin" / "wandb").write_text(PROGRAM)
    (home / "bin" / "wandb").chmod(0o755)
    monkeypatch.setenv("PATH", f"{home / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(tracker_upload.importlib.util, "find_spec", lambda name: None)
    return home / "calls"


def test_every_part_is_uploaded_once(labctl: Any, lab: Path, calls: Path) -> None:
    said = labctl("track", "sync")
    assert (said.code, said.out) == (0, "runs/one: 2 parts uploaded\nruns/two: 1 part uploaded\n")
    lines = calls.read_text().splitlines()
    parts = [str(lab / "runs" / "one" / "logs" / "wandb" / f"offline-run-{n}-one") for n in (1, 2)]
    assert lines[0].endswith(f"sync --yes {parts[0]} {parts[1]}")
    assert labctl("track", "sync").out == "runs/one: up to date\nruns/two: up to date\n"
    assert len(calls.read_text().splitlines()) == 2


def test_the_key_is_the_lab_s_secret_and_the_lab_is_not_the_working_directory(
    labctl: Any, lab: Path, calls: Path
) -> None:
    set_secret(find_paths(), ensure_lab_id(lab), "WANDB_API_KEY", "k" * 40)
    said = labctl("track", "sync", "two", "--json")
    assert json.loads(said.out)["runs"] == [{"run": "two", "parts": 1, "uploaded": 1}]
    directory, key, *_ = calls.read_text().split()
    assert key == "k" * 40
    # A starter project could have a file wandb/settings with another host.
    assert not Path(directory).is_relative_to(lab)
    assert "offline" not in calls.read_text().split()[2]
    assert "k" * 40 not in said.out + said.err


def test_a_key_that_the_program_prints_is_hidden(
    labctl: Any, lab: Path, calls: Path, home: Path
) -> None:
    paths = find_paths()
    set_secret(paths, ensure_lab_id(lab), "WANDB_API_KEY", "not-a-real-key")
    (home / "bin" / "wandb").write_text('#!/bin/sh\necho "bad key: $WANDB_API_KEY"\nexit 1\n')
    said = labctl("track", "sync")
    assert said.code == 1
    assert "bad key: (hidden)" in said.err
    assert "not-a-real-key" not in said.err + said.out


def test_what_is_missing_is_named(labctl: Any, lab: Path, calls: Path) -> None:
    said = labctl("track", "sync", "three")
    assert (said.code, "labctl pull three" in said.err) == (4, True)
    assert labctl("track", "sync", "../..").code == 4
    assert labctl("track", "sync", "nothing").code == 4
    assert labctl("track", "sync", "").code == 2
    (lab / "runs" / "three" / "logs").symlink_to(lab / "runs" / "two" / "logs")
    assert labctl("track", "sync", "three").code == 4
    calls.parent.joinpath("bin", "wandb").write_text("#!/bin/sh\necho no key; exit 1\n")
    said = labctl("track", "sync", "two")
    assert said.code == 1
    for part in ("run two was not uploaded", "no key", "labctl secret set WANDB_API_KEY"):
        assert part in said.err


def test_without_wandb_it_says_what_to_install(
    labctl: Any, lab: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(lab))
    said = labctl("track", "sync")
    assert said.code == 4
    assert install_command("wandb") in said.err


class _Refusal(BaseHTTPRequestHandler):
    """A host that refuses everything, as Weights & Biases does with a wrong key."""

    keys: list[str] = []  # noqa: RUF012

    def do_POST(self) -> None:
        self.keys.append(self.headers.get("Authorization", ""))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def host() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusal) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.long
def test_wandb_itself_writes_offline_and_tries_to_upload(
    labctl: Any, lab: Path, host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    run = lab / "runs" / "three"
    program = "import wandb; r = wandb.init(); r.log({'loss': 1}); r.finish(); print(r.id)"
    environ = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    environ |= {"WANDB_MODE": "offline", "WANDB_DIR": str(run / "logs"), "WANDB_RUN_ID": "three"}
    environ |= {"WANDB_RESUME": "allow", "WANDB_PROJECT": "digits"}
    (run / "logs").mkdir()
    for _ in range(2):
        words = [sys.executable, "-c", program]
        done = subprocess.run(words, env=environ, cwd=run, capture_output=True, text=True)
        assert done.stdout.splitlines()[-1] == "three", done.stderr
    set_secret(find_paths(), ensure_lab_id(lab), "WANDB_API_KEY", "k" * 40)
    monkeypatch.setenv("WANDB_BASE_URL", host)
    said = labctl("track", "sync", "three")
    assert said.code == 1
    assert "run three was not uploaded" in said.err
    assert any(_Refusal.keys), said.err
    assert "k" * 40 not in said.err
