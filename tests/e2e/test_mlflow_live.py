"""MLflow itself: a run that is tracked, lost and resumed, and the server that shows all runs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from labctl.agent.runs.known_services import build_mlflow

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from test_trackers import run_entry

pytestmark = pytest.mark.long
pytest.importorskip("mlflow")
TRAIN = """
import mlflow, os, sys
first, last = int(sys.argv[1]), int(sys.argv[2])
with mlflow.start_run() as run:
    mlflow.log_param("lr", 0.1)
    for step in range(first, last):
        mlflow.log_metric("loss", 1 / (1 + step), step=step)
    open("note.txt", "w").write("hello")
    mlflow.log_artifact("note.txt")
    print("mlflow run", run.info.run_id, flush=True)
"""


def train(run: Path, first: int, last: int) -> str:
    """Train some steps as one attempt of a run; return the id of the MLflow run."""
    run.mkdir(parents=True, exist_ok=True)
    (run / "train.py").write_text(TRAIN)
    env = {"LABCTL_TRACK_MLFLOW": "digits"}
    log = run_entry(run, env, f"cd {run} && python train.py {first} {last}")
    found = [line.split()[-1] for line in log.splitlines() if line.startswith("mlflow run")]
    assert found, log
    return found[-1]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """MLflow's server as the service starts it without a container; its address, and the runs."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    runs = tmp_path / "runs"
    script = build_mlflow(str(runs), str(tmp_path / "view"), "127.0.0.1")
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with (tmp_path / "server.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/sh", "-c", script, "mlflow", str(port)],
            env={"PATH": programs, "HOME": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        yield f"http://127.0.0.1:{port}", runs
        # As labctl stops a service: it may take a while to end, and is then killed.
        os.killpg(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)


def call(address: str, path: str, body: object = None, host: str = "") -> dict[str, object]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/{path}", data)
    request.add_header("Content-Type", "application/json")
    if host:
        request.add_header("Host", host)
    with urllib.request.urlopen(request, timeout=20) as reply:
        found: dict[str, object] = json.load(reply)
    return found


def wait_for_runs(address: str, count: int) -> list[dict[str, dict[str, object]]]:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        try:
            body = {"experiment_ids": ["1"], "max_results": 10}
            found = call(address, "runs/search", body).get("runs", [])
        except urllib.error.HTTPError as error:
            error.close()
            found = []
        except OSError:
            found = []
        assert isinstance(found, list)
        if len(found) >= count:
            return found
        time.sleep(0.5)
    raise AssertionError("the server does not show the runs")


def test_a_lost_run_goes_on_as_the_same_mlflow_run_and_the_server_shows_all(
    server: tuple[str, Path],
) -> None:
    address, runs = server
    first = train(runs / "one", 0, 5)
    # The server is lost; what the mirror had is a copy of the logs, which go to a new server.
    saved = runs.parent / "saved"
    shutil.copytree(runs / "one" / "logs", saved)
    shutil.rmtree(runs / "one")
    shutil.copytree(saved, runs / "one" / "logs")
    assert train(runs / "one", 5, 9) == first
    other = train(runs / "two", 0, 3)
    shown = {str(one["info"]["run_id"]): one for one in wait_for_runs(address, 2)}
    assert set(shown) == {first, other}
    assert shown[first]["info"]["run_name"] == "r1"
    history = call(address, f"metrics/get-history?run_id={first}&metric_key=loss")["metrics"]
    assert isinstance(history, list)
    assert [point["step"] for point in history] == list(range(9))
    files = call(address, f"artifacts/list?run_id={first}")["files"]
    assert files == [{"path": "note.txt", "is_dir": False, "file_size": 5}]
    with urllib.request.urlopen(
        f"{address}/get-artifact?path=note.txt&run_uuid={first}", timeout=20
    ) as reply:
        assert reply.read() == b"hello"
    # A forward leads to localhost, at any port; a page of a stranger's name is refused.
    assert call(address, "experiments/get?experiment_id=1", host="localhost:41234")
    with pytest.raises(urllib.error.HTTPError) as refused:
        call(address, "experiments/get?experiment_id=1", host="evil.example")
    assert refused.value.code == 403
    refused.value.close()
