"""What `labctl run` says of a command that is probably a mistake, before the run starts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from lab_world import Labctl, RunMachine, World

from labctl.agent import reply
from labctl.transports import Result
from labctl.wire.verbs import ErrorReply, make_error


class TakenNameMachine(RunMachine):
    """A server that has another run with every name."""

    def _run(self, request: dict[str, Any]) -> Result:
        text = f'A run named "{request["spec"]["id"]}" already exists on this server.'
        error = make_error("taken", text, "its settings differ", "labctl logs -f long")
        return Result(code=1, stdout="", stderr=reply.encode_line(ErrorReply(error)).decode())


def test_a_path_without_its_data_directory_is_noticed(run_lab: World, labctl: Labctl) -> None:
    lab = run_lab.home / "lab"
    (lab / "photos").mkdir()
    (lab / "lab.yaml").write_text("lab: digits\nimage: small:1\ndata: {birds: ./photos}\n")
    output = labctl(run_lab, "run", "--", "ls", "/birds")
    assert output.code == 0
    text = output.err.replace("\n", " ")
    assert "runs have their data at /lab/data, and the command reads /birds." in text
    assert "labctl run -- ls /lab/data/birds " in text
    assert "/lab/data" not in labctl(run_lab, "run", "--", "ls", "/lab/data/birds").err


def test_code_that_reads_its_data_where_no_run_has_them_is_noticed(
    run_lab: World, labctl: Labctl
) -> None:
    lab = run_lab.home / "lab"
    (lab / "photos").mkdir()
    (lab / "photos" / "1.png").write_bytes(b"x")
    (lab / "lab.yaml").write_text('lab: digits\nimage: small:1\ndata: {birds: "./photos"}\n')
    (lab / "train.py").write_text("print(len(glob('photos/*.png')))\n")
    text = labctl(run_lab, "run", "--", "python", "train.py").err.replace("\n", " ")
    assert text.count("the code names photos/, which is under data: in lab.yaml") == 1
    assert "A run has it at /lab/data/birds, which is $LABCTL_DATA_DIR/birds" in text
    (lab / "train.py").write_text("root = environ.get('LABCTL_DATA_DIR', '.')\nglob('photos')\n")
    text = labctl(run_lab, "run", "--", "python", "train.py").err
    assert "the code names" not in text


def test_a_script_without_its_interpreter_is_noticed(run_lab: World, labctl: Labctl) -> None:
    lab = run_lab.home / "lab"
    (lab / "train.py").write_text("print(1)\n")
    text = labctl(run_lab, "run", "--", "train.py", "--lr", "0.1").err.replace("\n", " ")
    assert "train.py is a file of this lab and no program; did you mean: " in text
    assert "labctl run -- python train.py --lr 0.1" in text
    for command in (["python", "train.py"], ["./train.py"], ["test.py"]):
        assert "no program" not in labctl(run_lab, "run", "--", *command).err
    (lab / "Dockerfile").write_text('FROM small:1\nENTRYPOINT ["python"]\n')
    (lab / "lab.yaml").write_text("lab: digits\nimage: {build: .}\n")
    assert "no program" not in labctl(run_lab, "run", "--", "train.py").err


def test_a_taken_name_is_answered_with_the_command_and_a_free_name(
    run_lab: World, labctl: Labctl
) -> None:
    assert labctl(run_lab, "run", "--id", "long-2").code == 0
    taken = replace(run_lab, machine=TakenNameMachine(run_lab.machine.home))
    output = labctl(taken, "run", "--id", "long", "--", "echo", "a b")
    assert output.code == 255
    assert "next: labctl run --id long-3 -- echo 'a b'\n" in output.err
    assert output.err.endswith("labctl logs -f long\n")


def test_a_secret_without_a_value_is_noticed_before_the_question(
    run_lab: World, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "lab: digits\nrun: 'true'\nimage: small:1\nsecrets: [NO_SUCH_TOKEN]\n"
    (run_lab.home / "lab" / "lab.yaml").write_text(text)
    for options in ([], ["--up", "--down"]):
        output = labctl(run_lab, "run", *options)
        assert output.err.startswith("labctl: no value for NO_SUCH_TOKEN\n")
        assert output.err.endswith("  next: labctl secret set NO_SUCH_TOKEN\n")
    monkeypatch.setenv("NO_SUCH_TOKEN", "x")
    assert "no value" not in labctl(run_lab, "run").err
