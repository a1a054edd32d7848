"""`labctl serve` of a model that no predict.py loads, and what its hint leads to."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_world import LAB_ID, Labctl, Machine, World

from labctl.lifecycle import up
from labctl.model import Run
from labctl.transports import Result

sys.path.append(str(Path(__file__).parents[1] / "unit"))
from engine_socket import EngineSocket, engine_socket

PREDICT = "def load(checkpoints): ...\n"
IMAGE_ID = "sha256:" + "ab" * 32


class EngineMachine(Machine):
    """A server whose programs use the engine of this process."""

    def _answer(self, line: str, stdin: bytes) -> Result:
        host = os.environ["DOCKER_HOST"]
        return super()._answer(f"export DOCKER_HOST={host}; {line}", stdin)


@pytest.fixture
def engine() -> Iterator[EngineSocket]:
    """An engine that has the image small:1, and starts no container."""

    def answer(method: str, path: str, body: Any) -> tuple[int, Any] | None:
        if method == "GET" and "/images/small:1/" in path:
            return 200, {"Id": IMAGE_ID, "Config": {}}
        if method == "POST" and "/containers/create?" in path:
            return 500, {"message": "enough seen"}
        return None

    with engine_socket() as made:
        made.answers = answer
        yield made


@pytest.fixture
def trained(lab: World, engine: EngineSocket, monkeypatch: pytest.MonkeyPatch) -> World:
    """A lab with the run "night" on its server, whose code has no predict.py."""
    (lab.home / "lab" / "lab.yaml").write_text("lab: digits\nrun: 'true'\nimage: small:1\n")
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    lab.machine = EngineMachine(lab.machine.home)
    context = lab.context()
    server = up.up(context)
    lab.machine.run_with("night", **{"model.safetensors": "weights"})
    run = Run(id="night", lab_id=LAB_ID, server_id=server.id, state="exited", image="small:1")
    context.state.save_run(run)
    # What the agent has found in the image: a user of its own, and what serves a model.
    found = lab.machine.home / "labctl" / ".passwd"
    found.mkdir(parents=True)
    (found / f"passwd-{'ab' * 12}").touch()
    (found / f"programs-{'ab' * 12}.json").write_text('{"serve": true}')
    return lab


def test_a_missing_predict_py_is_noticed_before_the_image(
    trained: World, engine: EngineSocket, labctl: Labctl
) -> None:
    engine.asked.clear()
    refused = labctl(trained, "serve")
    assert refused.code == 4
    assert "labctl: the code of run night has no predict.py\n" in refused.err
    assert "it must define load(checkpoints)" in refused.err
    hint = "labctl serve --push\n        (once predict.py is beside lab.yaml)\n"
    assert refused.err.endswith(f"  next: {hint}")
    # It has looked for the service's container, and no further.
    assert list_calls(engine) == [("GET", "/containers/digits-svc-serve/json")]

    engine.asked.clear()
    refused = labctl(trained, "serve", "--push")
    assert refused.code == 4
    assert refused.err.startswith("labctl: the lab's code has no predict.py\n")
    assert list_calls(engine) == []


def test_the_hint_starts_a_container_with_the_new_predict_py(
    trained: World, engine: EngineSocket, labctl: Labctl
) -> None:
    (trained.home / "lab" / "predict.py").write_text(PREDICT)
    engine.asked.clear()
    refused = labctl(trained, "serve", "--push")
    assert "labctl: the service serve did not start\n  enough seen\n" in refused.err
    container, *_ = [body for _, path, body in engine.asked if "/containers/create?" in path]
    (code,) = [each for each in container["HostConfig"]["Mounts"] if each["Target"] == "/lab/code"]
    assert Path(code["Source"], "predict.py").read_text() == PREDICT


def test_a_model_in_another_directory_is_named_with_the_line_that_saves_it(
    trained: World, engine: EngineSocket, labctl: Labctl
) -> None:
    (trained.home / "lab" / "predict.py").write_text(PREDICT)
    directory = next(trained.machine.home.rglob("runs/night"))
    (directory / "checkpoints" / "model.safetensors").unlink()
    (directory / "code").mkdir(exist_ok=True)
    refused = labctl(trained, "serve")
    assert refused.code == 4
    assert refused.err.endswith("save the model there in your code, then:\n        labctl run\n")

    script = "import torch\n# model.pth\ntorch.save(model.state_dict(), 'model.pth')\n"
    (directory / "code" / "train.py").write_text(script)
    (directory / ".labctl").mkdir(exist_ok=True)
    (directory / ".labctl" / "code.json").write_text('["train.py"]')
    (directory / "code" / "model.pth").write_bytes(b"")
    refused = labctl(trained, "serve")
    assert refused.code == 4
    text = " ".join(refused.err.split())
    assert "in the directory $LABCTL_CHECKPOINT_DIR; this run wrote code/model.pth instead" in text
    assert "next: in train.py, line 3, save the model so, then run again:" in text
    target = 'os.environ["LABCTL_CHECKPOINT_DIR"] + "/model.safetensors"'
    assert f"save_file(model.state_dict(), {target})" in text
    assert "(import os; from safetensors.torch import save_file; safetensors in" in text
    assert text.endswith("labctl run")


def list_calls(engine: EngineSocket) -> list[tuple[str, str]]:
    """Return the method and path of each request to the engine, without its version."""
    return [(method, re.sub(r"^/v[\d.]+", "", path)) for method, path, _ in engine.asked]
