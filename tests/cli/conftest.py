"""The command line as its entry point runs it, in this process and in a home of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from labctl.cli.exit_codes import run_and_exit
from labctl.cli.groups import cli


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str


Labctl = Callable[..., Said]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh home with a lab in it, which is the working directory."""
    directories = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "LABCTL_STATE_DIR")
    for name in (*directories, "LABCTL_BASE_IMAGE", "LABCTL_CACHE_POOL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "lab.yaml").write_text("lab: digits\nrun: [python, train.py]\n")
    monkeypatch.chdir(tmp_path / "digits")
    return tmp_path


@pytest.fixture
def labctl(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Labctl:
    """`labctl("status", "--json", stdin="")`: the exit code, and what was said where."""

    def call(*words: str, stdin: str = "") -> Said:
        monkeypatch.setattr(sys, "argv", ["labctl", *words])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        capsys.readouterr()
        code = run_and_exit(cli)
        captured = capsys.readouterr()
        return Said(code, captured.out, captured.err)

    return call
