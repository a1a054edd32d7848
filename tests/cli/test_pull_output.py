"""`labctl pull`: what it says of files that it leaves on the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.cli.runs import print_new_files
from labctl.lab import Lab
from labctl.model import Run
from labctl.sync.local_results import MissingFile
from labctl.sync.pull import PulledRun

Labctl = Callable[..., Any]


@pytest.fixture
def pulled(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`pulled("code/model.pth", ...)`: a pull leaves these files on the server."""

    def leave(*names: str) -> None:
        left = tuple(MissingFile(run="r1", path=name, size=81 * 1024**2) for name in names)
        result = PulledRun(run="r1", directory="runs/r1", files=2, complete=True, left=left)
        monkeypatch.setattr(Lab, "pull", lambda *_, **__: [result])

    return leave


def test_a_file_left_on_the_server_is_named_with_the_command_for_it(
    labctl: Labctl, pulled: Callable[..., None]
) -> None:
    pulled("code/model.pth")
    said = labctl("pull")
    assert said.out == "runs/r1: Downloaded 2 files (0 B); its outputs are up to date.\n"
    assert said.err == (
        "  left on the server: code/model.pth (81.0 MiB) was written outside outputs: "
        "labctl pull --all r1\n"
        "  to download such files of later runs too, in lab.yaml: "
        "outputs: [checkpoints, logs, code/model.pth]\n"
    )


def test_a_pull_without_news_says_so(labctl: Labctl, monkeypatch: pytest.MonkeyPatch) -> None:
    result = PulledRun(run="r1", directory="runs/r1", complete=True)
    monkeypatch.setattr(Lab, "pull", lambda *_, **__: [result])
    assert labctl("pull").out == "runs/r1: Nothing new; everything is up to date.\n"


def test_the_place_of_a_pull_can_be_typed_in_any_directory(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = PulledRun(run="r1", directory="runs/r1", complete=True)
    monkeypatch.setattr(Lab, "pull", lambda *_, **__: [result])
    (home / "digits" / "src").mkdir()
    for directory, place in (
        (home, "digits/runs/r1"),
        (home / "digits" / "src", str(home / "digits" / "runs" / "r1")),
    ):
        monkeypatch.chdir(directory)
        said = labctl("-C", str(home / "digits"), "pull")
        assert said.out == f"{place}: Nothing new; everything is up to date.\n"


def test_of_many_files_the_directories_are_suggested(
    labctl: Labctl, pulled: Callable[..., None], home: Path
) -> None:
    pulled(*(f"code/results/{number}.csv" for number in range(7)), "code/a b", "weights/w.pt")
    said = labctl("pull")
    assert "and 4 more were written outside outputs: labctl pull --all r1" in said.err
    assert "outputs: [checkpoints, logs, code/results, weights]" in said.err
    text = "lab: digits\noutputs: [checkpoints, logs, code/results, weights]\n"
    (home / "digits" / "lab.yaml").write_text(text)
    assert "in lab.yaml" not in labctl("pull").err


def test_without_such_files_everything_is_up_to_date(
    labctl: Labctl, pulled: Callable[..., None]
) -> None:
    pulled()
    said = labctl("pull")
    assert "everything is up to date." in said.out
    assert said.err == ""


def test_the_first_run_of_a_lab_suggests_the_line_of_lab_yaml(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab.load(home / "digits", record_only=True)
    crashed = Run(id="r0", lab_id=lab.id, server_id="s", state="exited", exit_code=1)
    run = Run(id="r1", lab_id=lab.id, server_id="s", state="exited", new_files=("code/model.pth",))
    for ended in (crashed, run):
        lab.context.state.save_run(ended)
    print_new_files(lab, run)
    assert "outputs: [checkpoints, logs, code/model.pth]" in capsys.readouterr().err
    second = msgspec.structs.replace(run, id="r2")
    lab.context.state.save_run(second)
    print_new_files(lab, second)
    assert capsys.readouterr().err == (
        "new files outside outputs: code/model.pth (labctl pull --all)\n"
    )


@pytest.mark.parametrize(("state", "continues"), [("running", True), ("exited", False)])
def test_a_file_that_is_still_being_written_comes_later(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch, state: str, continues: bool
) -> None:
    lab = Lab.load(home / "digits", record_only=True)
    lab.context.state.save_run(Run(id="r1", lab_id=lab.id, server_id="s", state=state))
    young = MissingFile(run="r1", path="checkpoints/a/model.pt", reason="written just now")
    result = PulledRun(run="r1", directory="runs/r1", skipped=(young,))
    monkeypatch.setattr(Lab, "pull", lambda *_, **__: [result])
    said = labctl("pull")
    first, *more = said.err.splitlines()
    assert first == "  skipped: checkpoints/a/model.pt: written just now"
    line = "  run r1 has not ended; to download each file once it is complete: "
    assert more == [f"{line}labctl pull --follow r1"] * continues
