"""run --up and --down: which options go together, before any server exists."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.lab import Lab


@pytest.mark.parametrize(
    ("words", "what", "next_command"),
    [
        (("--down", "--detach"), "--down cannot be combined with --detach", "labctl up --idle 30m"),
        (("--down", "-it"), "--down cannot be combined with -it", "labctl run --up -it"),
        (("--up", "--no-push"), "--up cannot be combined with --no-push", "labctl run --up"),
        (("--up", "-it"), "-it needs a terminal", "labctl run --up"),
        (("-it",), "-it needs a terminal", "labctl run"),
        (("-it", "-d"), "-it cannot be combined with --detach", "labctl run -it"),
        (("--up", "--gpu", "T4"), "labctl run has no option --gpu", "labctl run --up -- python"),
        (("--up", "--", "--lr", "1"), "--lr is not a program", "-- python train.py --lr 1"),
        (("--up", "--probe", "150%"), "--probe '150%' is not a valid amount", "--probe 1%"),
        (("--up", "--down", "--probe", "1%", "-it"), "--probe cannot be combined with -it", "run"),
        (("--up", "--down", "--recover", "--no-push"), "--recover cannot be combined", "--keeper"),
        (("--up", "--down", "--keeper", "host"), "--keeper needs --recover", "--recover --keeper"),
        (("--up", "--id", "BAD NAME"), "'BAD NAME' is not a valid run name", "--id bad-name"),
        (("--down",), "digits has no server", "labctl up"),
    ],
)
def test_options_that_conflict_are_refused_before_a_server_exists(
    labctl: Any, home: Path, words: tuple[str, ...], what: str, next_command: str
) -> None:
    refused = labctl("run", *words)
    assert refused.code == 255
    assert what in refused.err
    assert next_command in refused.err.split("next:")[1]
    assert Lab.load(".").context.state.list_open_attempts() == []
    assert "creating a server" not in refused.err


def test_a_command_without_a_program_is_completed_with_that_of_lab_yaml(
    labctl: Any, home: Path
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\nrun: python fit.py\n")
    refused = labctl("run", "--", "--lr", "1")
    assert "next: labctl run -- python fit.py --lr 1\n" in refused.err


@pytest.mark.parametrize(
    ("words", "what"),
    [(("run",), "nothing to run"), (("run", "--id", "A B", "--", "ls"), "is not a valid run name")],
)
def test_a_mistake_in_the_command_comes_before_a_missing_server(
    labctl: Any, home: Path, words: tuple[str, ...], what: str
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\n")
    refused = labctl(*words)
    assert what in refused.err
    assert "has no server" not in refused.err


def test_the_help_describes_up_and_down(labctl: Any) -> None:
    help_text = labctl("run", "--help").out
    assert "labctl run --up --down" in help_text
    assert "Start a server first if the lab has none." in help_text
