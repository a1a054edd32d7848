"""Names that a server sends never lead out of the directory they belong to (faults 34, 35)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.agent.host.paths import resolve_inside
from labctl.agent.reply import Failure
from labctl.errors import PolicyError
from labctl.sync.containment import find_name_problem, require_contained

HOSTILE = ["../../x", "/etc/abs", "a/../../x", "a//b", "./a", "a/.", "", "a/", "..", "a\0b"]
ANY_PATH = st.lists(
    st.one_of(st.sampled_from(["..", ".", "", "a", "b.c", "\0", "~"]), st.text(max_size=4)),
    max_size=5,
).map("/".join)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_that_lead_elsewhere_are_refused_on_both_sides(name: str, tmp_path: Path) -> None:
    with pytest.raises(PolicyError):
        require_contained(name)
    with pytest.raises(PolicyError):
        find_name_problem(name)
    with pytest.raises(Failure):
        resolve_inside(tmp_path, name)


@given(ANY_PATH)
def test_what_passes_stays_below_its_root(name: str) -> None:
    root = "/some/root"
    try:
        path = os.path.normpath(f"{root}/{require_contained(name)}")
    except PolicyError:
        return
    assert path.startswith(root + "/")
    assert path == f"{root}/{name}"


@given(ANY_PATH)
def test_both_sides_agree(name: str) -> None:
    def passes(check: object) -> bool:
        try:
            require_contained(name) if check is require_contained else resolve_inside(
                Path("/nowhere/root"), name
            )
        except (PolicyError, Failure):
            return False
        return True

    assert passes(require_contained) == passes(resolve_inside)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("a\x1b[2Jb", "control character"),
        ("a\nb", "control character"),
        ("a\x9bb", "control character"),
        ("caf\udce9", "UTF-8"),
        (".labctl-partial/x", "reserved by labctl"),
        (".labctl/spec.json", "reserved by labctl"),
        ("run.json", "reserved by labctl"),
        ("x" * 256, "too long"),
        ("logs/run.log", ""),
    ],
)
def test_what_is_left_out_is_told_why(name: str, reason: str) -> None:
    assert reason in find_name_problem(name, reserved=("run.json",))
    assert bool(reason) == bool(find_name_problem(name, reserved=("run.json",)))


def test_the_server_writes_through_no_link(tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("/etc")
    with pytest.raises(Failure):
        resolve_inside(tmp_path, "out/passwd")
