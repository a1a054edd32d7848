"""The last lines of `labctl down`."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl import Lab
from labctl.cli import course_results
from labctl.cli.down_output import print_down
from labctl.courses.server_contents import SavedSeat
from labctl.courses.teardown import SeatEnding
from labctl.lifecycle.down import DownResult
from labctl.model import Endpoint, Offer, Server


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (1, "downloaded 1 file to runs/, 1 edited file to server-edits/\n"),
        (1200, "downloaded 1,200 files to runs/, 1,200 edited files to server-edits/\n"),
    ],
)
def test_one_file_is_no_plural(
    home: Path, count: int, shown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    result = DownResult(
        removed="box", pulled_files=count, saved_edits=count, home_files=1,
        home_directories=("server-home/20261129T0143Z",),
    )  # fmt: skip
    print_down(lab, result)
    out = capsys.readouterr().out
    assert out.startswith(shown)
    assert "downloaded 1 file from the home directory to server-home/20261129T0143Z/\n" in out
    lab.context.state.close()


def test_edits_alone_are_not_zero_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    print_down(lab, DownResult(removed="box", saved_edits=2))
    assert capsys.readouterr().out.startswith("downloaded 2 edited files to server-edits/\n")
    lab.context.state.close()


def test_a_static_machine_stays_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "digits" / "lab.yaml").write_text(
        "lab: digits\nrun: [python, train.py]\n"
        "server: {provider: static, static: {hosts: [gpu1.lab.example]}}\n"
    )
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    print_down(lab, DownResult(removed="static-gpu1"))
    assert capsys.readouterr().out.splitlines() == [
        "ended the lease of static-gpu1; the machine stays on",
        "Nothing is left running or billing.",
    ]
    lab.context.state.close()


def test_servers_of_other_labs_are_not_forgotten(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    other = Server(
        id="box-2", provider="aws", lab="faces", lab_id="b" * 16, alias="faces", created_at=1.0,
        endpoint=Endpoint(host="h", port=22, user="u"), offer=Offer(provider="aws", type="t3"),
    )  # fmt: skip
    lab.context.state.save_server(other)
    print_down(lab, DownResult(removed="box"))
    assert capsys.readouterr().out.splitlines()[-1] == (
        "Nothing of digits is left running or billing. Other labs have 1 server: labctl cost --all"
    )
    lab.context.state.close()


@pytest.mark.parametrize(("edits", "more"), [(0, ""), (2, ", and 2 files edited on the servers")])
def test_the_end_of_a_class_counts_what_students_edited(
    capsys: pytest.CaptureFixture[str], edits: int, more: str
) -> None:
    """Students who use the browser have no runs: their work is on the server alone."""
    saved = SavedSeat(files=3, edits=edits)
    ending = SeatEnding(seat="ada", students=("ada",), ended=True, saved=saved)
    course_results.print_down([ending])
    text = f"Removed 1 of 1 server; downloaded 3 files of runs{more}.\n"
    assert capsys.readouterr().out == text


def test_the_end_of_a_class_says_where_the_files_of_home_directories_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    ending = SeatEnding(
        seat="ada", students=("ada",), ended=True, saved=SavedSeat(files=3, home_files=2)
    )
    course_results.print_down([ending])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("Downloaded 2 files from home directories to .course/seats/NAME/server-home/.")


def test_a_machine_that_could_not_be_reached_is_not_called_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    print_down(lab, DownResult(dropped="static-gpu1"))
    assert capsys.readouterr().out.splitlines() == [
        "static-gpu1 could not be reached, so nothing was sent to it.",
        "Removed on your computer: its record.",
        "NOT removed: your files and runs on it. If your lease still exists, it ends by itself.",
        "To use another machine: labctl up",
    ]
    lab.context.state.close()


def test_a_machine_with_another_host_key_is_not_called_removed(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    print_down(lab, DownResult(dropped="static-gpu1", has_other_key=True))
    assert capsys.readouterr().out.splitlines() == [
        "static-gpu1 has another host key, so nothing was sent to it.",
        "Removed on your computer: its record, and the host key that you confirmed.",
        "NOT removed: your files and runs on it. If your lease still exists, it ends by itself.",
        "To use the machine again: labctl up   (shows the new fingerprint)",
    ]
    lab.context.state.close()
