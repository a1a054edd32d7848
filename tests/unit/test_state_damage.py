"""A database that was cut, damaged or written by a newer labctl is put aside, never trusted."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from labctl.errors import LabError
from labctl.state import State
from labctl.state.database import SCHEMA_VERSION


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database with something in it, its log folded in."""
    path = tmp_path_factory.mktemp("whole") / "labctl.db"
    with State(path) as state:
        for number in range(30):
            state.record("made", lab_id="aa", detail={"n": number, "text": "x" * 200})
    return path


@pytest.fixture
def whole(whole_file: Path) -> bytes:
    return whole_file.read_bytes()


def put(directory: Path, data: bytes) -> Path:
    for leftover in directory.glob("labctl.db*"):
        leftover.unlink()
    path = directory / "labctl.db"
    path.write_bytes(data)
    return path


def broken_files(path: Path) -> list[Path]:
    found = path.parent.glob("labctl.db.broken-*")
    return [each for each in found if not each.name.endswith(("-wal", "-shm"))]


def test_a_whole_one_is_used(tmp_path: Path, whole: bytes) -> None:
    path = put(tmp_path, whole)
    with State(path) as state:
        assert state.was_rebuilt == ""
        assert len(state.list_events()) == 30
    assert broken_files(path) == []


PAGE = 4096


def test_a_cut_at_any_byte_is_noticed(tmp_path: Path, whole: bytes) -> None:
    """At every byte of the header and near the ends of pages, and at every 61st between them."""
    lengths = [
        length
        for length in range(len(whole))
        if length < 120 or length % 61 == 0 or (length + 2) % PAGE < 5
    ]
    for length in lengths:
        path = put(tmp_path, whole[:length])
        with State(path, read_only=True) as reader:
            assert reader.was_rebuilt, length
            assert reader.list_events() == []
        assert path.stat().st_size == length
    assert len(lengths) > 1000


def test_one_that_was_cut_is_put_aside_and_begun_anew(tmp_path: Path, whole: bytes) -> None:
    lengths = {0, 1, 50, 99, 100, len(whole) - 1, len(whole) - PAGE}
    lengths |= {PAGE * pages + more for pages in range(1, 6) for more in (-1, 0, 1, 2000)}
    for length in sorted(lengths):
        path = put(tmp_path, whole[:length])
        with State(path, read_only=True) as reader:
            assert reader.was_rebuilt, length
            assert reader.list_events() == []
        assert path.read_bytes() == whole[:length]
        with State(path) as state:
            assert state.was_rebuilt, length
            assert state.list_events() == []
            state.record("works")
        (aside,) = broken_files(path)
        assert str(aside) in state.was_rebuilt
        assert aside.read_bytes() == whole[:length]
        with State(path) as again:
            assert again.was_rebuilt == ""
            assert [each.kind for each in again.list_events()] == ["works"]


@given(data=st.binary(min_size=0, max_size=5000))
@hypothesis_settings(deadline=None, max_examples=50)
def test_any_bytes_are_put_aside(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = put(tmp_path_factory.mktemp("any"), data)
    with State(path) as state:
        assert state.was_rebuilt
        state.record("works")
        assert len(state.list_events()) == 1


@given(
    start=st.integers(0, 100_000),
    patch=st.one_of(st.binary(min_size=1, max_size=600), st.just(b"\0" * 4096)),
)
@hypothesis_settings(deadline=None, max_examples=60)
def test_overwritten_pages_never_raise_anything_but_our_own(
    tmp_path_factory: pytest.TempPathFactory, whole_file: Path, start: int, patch: bytes
) -> None:
    whole = whole_file.read_bytes()
    start %= len(whole)
    data = (whole[:start] + patch + whole[start + len(patch) :])[: len(whole)]
    path = put(tmp_path_factory.mktemp("bent"), data)
    hint = "none needed"
    try:
        with State(path) as state:
            state.record("works")
            state.list_events()
    except LabError as error:
        hint = error.hint
    assert hint


@pytest.mark.parametrize(
    ("version", "words"),
    [(SCHEMA_VERSION + 1, "newer labctl"), (999, "newer labctl"), (0, "not labctl's")],
)
def test_one_of_another_version_is_put_aside(
    tmp_path: Path, whole: bytes, version: int, words: str
) -> None:
    path = put(tmp_path, whole)
    outside = sqlite3.connect(path)
    outside.execute(f"PRAGMA user_version = {version}")
    outside.close()
    with State(path, read_only=True) as reader:
        assert words in reader.was_rebuilt
    assert broken_files(path) == []
    with State(path) as state:
        assert words in state.was_rebuilt
        assert state.list_events() == []
    (aside,) = broken_files(path)
    kept = sqlite3.connect(aside)
    assert kept.execute("SELECT count(*) FROM events").fetchone() == (30,)
    kept.close()


def test_a_database_with_a_torn_log_keeps_what_was_whole(tmp_path: Path, whole: bytes) -> None:
    source = put(tmp_path, whole)
    with State(source) as state:
        state.record("late")
        log = Path(f"{source}-wal").read_bytes()
    for length in range(0, len(log), 997):
        path = put(tmp_path, whole)
        Path(f"{path}-wal").write_bytes(log[:length])
        with State(path) as state:
            assert state.was_rebuilt == ""
            assert len(state.list_events()) in (30, 31)


def test_what_is_no_file_is_told(tmp_path: Path) -> None:
    path = tmp_path / "labctl.db"
    path.mkdir()
    with pytest.raises(LabError, match="is not a file"):
        State(path)


def test_two_processes_that_find_it_broken_make_one_new_one(tmp_path: Path, whole: bytes) -> None:
    path = put(tmp_path, whole[:-100])
    line = (
        "import sys; from pathlib import Path; from labctl.state import State;"
        "sys.stdin.readline(); state = State(Path(sys.argv[1])); state.record('here');"
        "print(bool(state.was_rebuilt)); state.close()"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", line, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(5)
    ]
    said = [each.communicate("\n", timeout=240)[0].strip() for each in started]
    assert [each.returncode for each in started] == [0] * 5
    assert said.count("True") == 1
    assert len(broken_files(path)) == 1
    with State(path) as state:
        assert len(state.list_events()) == 5
