"""The command that is suggested where a typed name of a run is taken."""

from __future__ import annotations

import pytest

from labctl.cli.name_options import choose_free_name, replace_name


@pytest.mark.parametrize(
    ("typed", "suggested"),
    [
        ("run --id long -- python a.py --id long", "run --id long-2 -- python a.py --id long"),
        ("run --id=long --detach", "run --id=long-2 --detach"),
        ("run --detach", ""),
    ],
)
def test_only_labctls_own_option_changes(typed: str, suggested: str) -> None:
    command = replace_name(typed.split(), "long", "long-2")
    assert command == (f"labctl {suggested}" if suggested else "")


def test_a_free_name_is_valid_and_new() -> None:
    assert choose_free_name("a", {"a", "a-2"}) == "a-3"
    assert choose_free_name("x" * 39, set()) == "x" * 37 + "-2"
