"""`labctl cp` as it is typed: what it refuses before it connects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    "words",
    [("a", "b"), ("digits:a", "digits:b"), ("a", "other:b"), ("other:a", ".")],
)
def test_one_side_is_the_labs_server(labctl: Callable[..., Any], words: tuple[str, str]) -> None:
    done = labctl("cp", *words)
    assert done.code == 2
    assert "has to begin with digits:" in done.err
    assert "labctl cp FILE digits:PATH" in done.err


def test_without_a_server_the_next_command_is_up(home: Path, labctl: Callable[..., Any]) -> None:
    (home / "digits" / "a").write_text("a")
    done = labctl("cp", "a", "digits:")
    assert (done.code, "labctl up" in done.err) == (4, True)
