"""A mistyped script is noticed on this machine, without false alarms."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.runs.missing_script import describe_missing_script


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("train.py", "tools/prepare.py", "tools/deep/far.py", "go.sh"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "linked.py").symlink_to("nowhere.py")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "near"),
    [
        ("python trian.py", "train.py"),
        ("python3.11 -u trian.py --lr 1", "train.py"),
        ("/usr/bin/python3 ./trian.py", "train.py"),
        ("python prepare.py", "tools/prepare.py"),
        ("python tools/deep/fra.py", "tools/deep/far.py"),
        ("bash -eux gp.sh", "go.sh"),
    ],
)
def test_a_similar_script_is_suggested(root: Path, command: str, near: str) -> None:
    script = next(word for word in command.split() if word.endswith((".py", ".sh")))
    text = describe_missing_script(root, command.split())
    assert text == f"there is no {script.removeprefix('./')} in this lab; did you mean {near}?"


def test_without_a_similar_script_none_is_suggested(root: Path) -> None:
    text = describe_missing_script(root, ["python", "xyzzy-0815.py"])
    assert text == (
        "there is no xyzzy-0815.py in this lab; the run finds it only if it is on the server"
    )


@pytest.mark.parametrize(
    "command",
    [
        "python train.py trian.py",
        "python ./tools/../train.py",
        "python linked.py",
        "python -m trian.py",
        "python -W ignore trian.py",
        "python -c trian.py",
        "python /opt/trian.py",
        "python ../trian.py",
        "python trian",
        "python",
        "torchrun trian.py",
        "bash -c trian.sh",
        "make trian.py",
        "",
    ],
)
def test_what_may_be_right_is_no_warning(root: Path, command: str) -> None:
    assert describe_missing_script(root, command.split()) == ""
