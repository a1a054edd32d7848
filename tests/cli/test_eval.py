"""`labctl eval` in a project of one's own: what it needs, and that its advice leads somewhere."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.cli.results import _print_evaluation
from labctl.cli.wrapping import wrap_lines
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Run, Server
from labctl.runs.evaluate import EvaluationResult
from labctl.runs.evaluation import Evaluation
from labctl.runs.missing_model import EXAMPLE, make_no_script_error

Labctl = Callable[..., Any]
TRAIN = """\
import torch
def build_model():
    return torch.nn.Identity()
def test_batches():
    yield torch.eye(4), [0, 1, 2, 0]
"""


@pytest.fixture
def run(home: Path) -> Run:
    """A run that ended, pulled to this machine, without checkpoints."""
    lab = Lab.load(home / "digits", record_only=True)
    ended = Run(id="r1", lab_id=lab.id, server_id="s", state="exited", exit_code=0)
    lab.context.state.save_run(ended)
    (home / "digits" / "runs" / "r1" / "logs").mkdir(parents=True)
    (home / "digits" / "evaluate.py").write_text("print('{\"accuracy\": 1}')\n")
    return ended


def save(home: Path, run: Run, **changes: Any) -> None:
    state = Lab.load(home / "digits", record_only=True).context.state
    state.save_run(msgspec.structs.replace(run, **changes))


@pytest.fixture
def server(home: Path, run: Run) -> Server:
    """The server of the run; it is stopped, so nothing connects to it."""
    lab = Lab.load(home / "digits", record_only=True)
    offer = Offer(provider="local", type="container", price_usd_per_hour=0.0)
    server = Server(
        id=run.server_id, provider="local", lab="digits", lab_id=lab.id, alias="digits",
        endpoint=Endpoint(host="127.0.0.1"), offer=offer, created_at=0.0, state="stopped",
    )  # fmt: skip
    lab.context.state.save_server(server)
    return server


def test_the_reason_is_prose_and_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    assert all(len(line) <= 78 for line in wrap_lines(make_no_script_error().why, 2))


def test_a_lab_without_evaluate_py_gets_one_to_start_from(
    labctl: Labctl, run: Run, home: Path
) -> None:
    (home / "digits" / "evaluate.py").unlink()
    said = labctl("eval")
    assert said.code == 4
    assert "this lab has no evaluate.py" in said.err
    for line in EXAMPLE.splitlines():
        assert line in said.err
        assert len(line) <= 80 - 6, "it is indented, and wrapped nowhere"
    assert "next: labctl eval --example > evaluate.py\n" in said.err
    assert labctl("eval", "--example").out == EXAMPLE


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: labctl[train]"
)
def test_the_example_evaluates(labctl: Labctl, run: Run, home: Path) -> None:
    from safetensors.torch import save_file

    (home / "digits" / "evaluate.py").write_text(labctl("eval", "--example").out)
    (home / "digits" / "train.py").write_text(TRAIN)
    folder = home / "digits" / "runs" / "r1" / "checkpoints"
    folder.mkdir()
    save_file({}, folder / "model.safetensors")
    said = labctl("eval", "--json")
    assert said.code == 0, said.err
    result = json.loads(said.out)["evaluation"]
    assert (result["accuracy_local"], result["total"]) == (0.75, 4)
    assert result["checkpoint"] == "model.safetensors"


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="PyTorch is not installed: labctl[train]"
)
@pytest.mark.long
def test_the_example_loads_a_pickle_without_running_its_code(tmp_path: Path) -> None:
    """`labctl eval` refuses the file here, so this is what the sandbox on the server does."""
    import torch

    for name, text in (("evaluate.py", EXAMPLE), ("train.py", TRAIN)):
        (tmp_path / name).write_text(text)
    words = [sys.executable, "evaluate.py", str(tmp_path)]
    torch.save({}, tmp_path / "model.pth")
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["accuracy"] == 0.75
    torch.save({"code": pytest.raises}, tmp_path / "model.pth")
    refused = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "Weights only load failed" in refused.stderr


ARGUMENTS = """\
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--lr")
"""


@pytest.mark.parametrize(
    "program",
    [
        f"{ARGUMENTS}options = parser.parse_args()\n",
        f"{ARGUMENTS}def main():\n    print(parser.parse_args())\nmain()\n",
    ],
)
def test_a_train_py_that_parses_arguments_at_import_is_named(
    labctl: Labctl, run: Run, home: Path, program: str
) -> None:
    folder = home / "digits" / "runs" / "r1" / "checkpoints"
    folder.mkdir()
    (folder / "weights.txt").touch()
    (home / "digits" / "evaluate.py").write_text("import train\n")
    (home / "digits" / "train.py").write_text(program)
    said = labctl("eval").err.replace("\n  ", " ")
    assert "evaluate.py imports train.py, which parses arguments as it is imported." in said
    assert 'below `if __name__ == "__main__":`' in said
    assert "evaluate.py: error: unrecognized arguments:" in said
    (home / "digits" / "evaluate.py").write_text(program)
    said = labctl("eval").err
    assert "unrecognized arguments:" in said
    assert "evaluate.py imports" not in said


@pytest.mark.parametrize("package", ["torch", "birds"])
def test_a_package_that_is_not_installed_here_is_named(
    labctl: Labctl, run: Run, home: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    folder = home / "digits" / "runs" / "r1" / "checkpoints"
    folder.mkdir()
    (folder / "weights.txt").touch()
    # An environment without PyTorch evaluates a project that needs none.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, package=None: None)
    assert json.loads(labctl("eval", "--json").out)["evaluation"]["accuracy_local"] == 1.0
    text = f"raise ModuleNotFoundError(\"No module named '{package}.nn'\")\n"
    (home / "digits" / "evaluate.py").write_text(text)
    said = labctl("eval")
    assert said.code == 1
    assert f"evaluate.py needs {package}, which labctl's Python environment lacks" in said.err
    assert "  next: labctl eval --on-server\n" in said.err
    assert ("[train]" in said.err) == (package == "torch")


def test_an_empty_directory_of_checkpoints_is_none(labctl: Labctl, run: Run, home: Path) -> None:
    (home / "digits" / "runs" / "r1" / "checkpoints").mkdir()
    said = labctl("eval")
    assert said.code == 4
    assert "run r1 has no checkpoints on this machine" in said.err


def test_a_run_that_was_canceled_before_its_first_checkpoint(
    labctl: Labctl, run: Run, home: Path
) -> None:
    save(home, run, state="cancelled", exit_code=143, summary="canceled (SIGTERM)")
    said = labctl("eval")
    assert said.code == 4
    why = "canceled (SIGTERM); no other run has any (last known)"
    assert f"  it ended before it saved one: {why}\n  next: labctl explain r1\n" in said.err
    assert "save the model there" not in said.err


def test_a_run_without_checkpoints_is_not_pulled_once_more(
    labctl: Labctl, run: Run, server: Server, home: Path
) -> None:
    said = labctl("eval")
    assert said.code == 4
    assert "run r1 has no checkpoints on this machine" in said.err
    assert "next: save the model there in your code, then:\n        labctl run" in said.err
    save(home, run, new_files=("code/out/w.safetensors", "extra.bin"))
    said = labctl("eval")
    assert "this run wrote code/out/w.safetensors instead" in said.err
    assert "next: labctl pull --all r1 && labctl eval runs/r1/code/out" in said.err
    save(home, run, new_files=("code/model.pth",))
    said = labctl("eval")
    assert "next: labctl pull --all r1 && labctl eval --on-server runs/r1/code" in said.err
    (home / "digits" / "runs" / "r1" / "code").mkdir()
    (home / "digits" / "runs" / "r1" / "code" / "model.pth").write_bytes(b"")
    said = labctl("eval")
    assert "this run wrote code/model.pth instead, which is on this machine" in said.err
    assert "next: labctl eval --on-server runs/r1/code\n" in said.err
    # lab.yaml lists the file under outputs:, so it is no new file any more.
    save(home, run, new_files=())
    assert "next: labctl eval --on-server runs/r1/code\n" in labctl("eval").err
    save(home, run, state="running", exit_code=None)
    assert "next: labctl pull --follow r1" in labctl("eval").err


def test_a_run_that_is_not_here_is_pulled(labctl: Labctl, run: Run, home: Path) -> None:
    (home / "digits" / "runs" / "r1" / "logs").rmdir()
    (home / "digits" / "runs" / "r1").rmdir()
    assert "no checkpoints on this machine" in labctl("eval").err, "there is nothing to pull"
    for state, has_checkpoints in (("exited", True), ("running", False), ("lost", False)):
        save(home, run, state=state, has_checkpoints=has_checkpoints or msgspec.UNSET)
        assert "next: labctl pull r1" in labctl("eval").err


def test_the_latest_run_with_checkpoints_is_named(labctl: Labctl, run: Run, home: Path) -> None:
    """The latest run was a shell, as of `labctl run -it -- bash`, which saves none."""
    for name, created_at in (("trained", 1.0), ("profile-x", 2.0), ("shell", 3.0)):
        save(home, run, id=name, created_at=created_at, has_checkpoints=name != "shell")
        (home / "digits" / "runs" / name / "checkpoints").mkdir(parents=True)
    (home / "digits" / "runs" / "trained" / "checkpoints" / "weights.txt").touch()
    hint = "{} trained\n        (the latest run with checkpoints)\n"
    said = labctl("eval")
    assert said.code == 4
    assert f"  next: {hint.format('labctl eval')}" in said.err
    assert labctl("eval", "trained").code == 0
    assert f"  next: {hint.format('labctl eval')}" in labctl("eval", "r1").err
    assert labctl("report", "trained").code == 0
    (home / "digits" / "runs" / "shell" / "checkpoints").rmdir()
    (home / "digits" / "runs" / "shell").rmdir()
    said = labctl("report")
    assert said.code == 4
    assert f"  it saved no checkpoints\n  next: {hint.format('labctl report')}" in said.err
    assert "next: labctl pull shell\n" in labctl("report", "shell").err


def test_a_pickle_whose_server_has_ended_is_saved_in_another_format(
    labctl: Labctl, run: Run, home: Path
) -> None:
    """No server is left that could load it in a sandbox."""
    save(home, run, new_files=("code/model.pth",))
    said = labctl("eval").err
    assert "this run wrote code/model.pth instead, a pickle, and its server has ended" in said
    assert "in your code, save the model so, then run again:\n" in said
    folder = home / "digits" / "runs" / "r1" / "code"
    folder.mkdir()
    (folder / "model.pth").write_bytes(b"\x80\x04cos\nsystem\n")
    refused = labctl("eval", "runs/r1/code")
    assert refused.code == 3
    assert "--on-server" not in said + refused.err


def test_a_pickle_is_evaluated_on_the_server_at_the_same_path(
    labctl: Labctl, run: Run, server: Server, home: Path
) -> None:
    folder = home / "digits" / "runs" / "r1" / "code"
    folder.mkdir()
    (folder / "model.pth").write_bytes(b"\x80\x04cos\nsystem\n")
    said = labctl("eval", "runs/r1/code")
    assert said.code == 3
    assert "next: labctl eval --on-server runs/r1/code\n" in said.err


@pytest.mark.parametrize(
    ("report", "line"),
    [("labctl report ", "labctl report"), ("labctl report r1", "labctl report r1")],
)
def test_the_next_command_names_the_run_that_was_named(
    capsys: pytest.CaptureFixture[str], report: str, line: str
) -> None:
    """It is not always the latest one."""
    evaluation = Evaluation("model", (), (), accuracy=0.75, items=4)
    result = EvaluationResult("r1", "model", 0.75, None, 4, False, evaluation)
    _print_evaluation(result, report)
    assert f"\n{line}    curves" in capsys.readouterr().out
