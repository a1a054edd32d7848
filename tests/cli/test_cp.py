"""`labctl cp` as it is typed: what it refuses before it connects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.errors import NotFoundError
from labctl.events import SilentReporter
from labctl.sync.single_file import upload_file


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        ("a b", "digits:a b"),
        ("lab.yaml b", "lab.yaml digits:b"),
        ("digits:a digits:b", "digits:a ."),
        ("a digit:b", "a digits:b"),
        ("lab.yaml digit:", "lab.yaml digits:"),
        ("digit:a .", "digits:a ."),
    ],
)
def test_one_side_is_the_labs_server(labctl: Callable[..., Any], words: str, meant: str) -> None:
    done = labctl("cp", *words.split())
    assert done.code == 2
    assert "has to begin with digits:" in done.err
    assert done.err.endswith(f"next: labctl cp {meant}\n")


def test_without_a_server_the_next_command_is_up(home: Path, labctl: Callable[..., Any]) -> None:
    (home / "digits" / "a").write_text("a")
    done = labctl("cp", "a", "digits:")
    assert (done.code, "labctl up" in done.err) == (4, True)


def test_a_missing_file_is_named_with_a_command_that_shows_what_exists(
    home: Path,
) -> None:
    transport: Any = None  # neither file is looked for on the server
    with pytest.raises(NotFoundError, match="there is no file notes/a") as caught:
        upload_file(transport, Path("notes/a"), ".", SilentReporter())
    assert caught.value.hint.startswith("ls . ")
    (home / "digits" / "notes").mkdir()
    with pytest.raises(NotFoundError) as caught:
        upload_file(transport, Path("notes"), ".", SilentReporter())
    assert "copies one file" in caught.value.why
    assert caught.value.hint.startswith("labctl push ")
