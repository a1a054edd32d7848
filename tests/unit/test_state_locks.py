"""One deed at a time on one lab, across processes and threads, whatever end the holder finds."""

from __future__ import annotations

import fcntl
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from labctl.errors import BusyError, LabError
from labctl.state import State
from labctl.state.locks import hold_lock

HOLD = """
import sys
from pathlib import Path
from labctl.state import State
with State(Path(sys.argv[1])).lock("aa", "up"):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    with State(tmp_path / "labctl.db") as opened:
        yield opened


@contextmanager
def holder(state: State) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lab until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(state.path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=240)


def test_the_second_is_told_who_holds_it(state: State) -> None:
    with (
        holder(state) as process,
        pytest.raises(BusyError) as caught,
        state.lock("aa", "down", wait_s=0.1),
    ):
        pytest.fail("both hold it")
    assert f"pid {process.pid}" in caught.value.what
    assert "`up`" in caught.value.what
    assert "`down`" in caught.value.what
    assert caught.value.exit_code == 75


def test_who_waits_hears_once_for_whom(state: State) -> None:
    heard: list[str] = []
    file = state.path.parent / "locks" / "aa.lock"
    with holder(state) as process:

        def let_go(who: str) -> None:
            heard.append(who)
            process.kill()

        with hold_lock(file, "down", wait_s=60.0, on_wait=let_go):
            pass
    (who,) = heard
    assert f"pid {process.pid}" in who
    assert "`up`" in who


def test_a_process_that_waits_shows_each_step_of_the_holder_once(state: State) -> None:
    shown: queue.Queue[str] = queue.Queue()

    def wait() -> None:
        with state.lock("aa", "down", wait_s=120.0, on_progress=shown.put):
            pass

    waiting = threading.Thread(target=wait)
    with state.lock("aa", "up"):
        waiting.start()
        for step in ("step 1 of 2", "step 2 of 2"):
            state.note_progress("aa", step)
            state.note_progress("aa", step)
            assert shown.get(timeout=60) == step
        note = json.loads((state.path.parent / "locks" / "aa.lock").read_text())
    waiting.join()
    assert shown.empty()
    assert (note["what"], note["pid"]) == ("up", os.getpid())


def test_another_lab_is_free(state: State) -> None:
    with holder(state), state.lock("bb", "up", wait_s=0.0):
        pass


def test_a_killed_holder_lets_go(state: State) -> None:
    with holder(state) as process:
        os.kill(process.pid, signal.SIGKILL)
        with state.lock("aa", "down", wait_s=10.0):
            note = (state.path.parent / "locks" / "aa.lock").read_text()
            assert json.loads(note)["pid"] == os.getpid()


def test_who_waits_gets_it_when_the_holder_is_done(state: State) -> None:
    with holder(state) as process:
        got = threading.Event()

        def wait() -> None:
            with state.lock("aa", "down", wait_s=30.0):
                got.set()

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not got.wait(0.2)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert got.wait(120)
        waiting.join()


def test_threads_exclude_each_other(state: State) -> None:
    inside: list[int] = []
    most: list[int] = []

    def work() -> None:
        for _ in range(5):
            with state.lock("aa", "work", wait_s=60.0):
                inside.append(1)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert most == [1] * 20


def test_it_is_let_go_after_an_error(state: State) -> None:
    with pytest.raises(RuntimeError), state.lock("aa", "up"):
        raise RuntimeError
    with state.lock("aa", "up", wait_s=0.0):
        pass


def test_a_note_that_is_not_there_yet_is_no_problem(state: State) -> None:
    file = state.path.parent / "locks" / "aa.lock"
    with state.lock("aa", "up"):
        for text in ("", "{", "[]", '{"pid": 1}', '{"pid":1,"what":"x","since":"y"}'):
            file.write_text(text)
            with (
                pytest.raises(BusyError, match="another labctl is working"),
                state.lock("aa", "down", wait_s=0.0),
            ):
                pytest.fail("both hold it")


def test_waiting_takes_as_long_as_was_said(state: State) -> None:
    with state.lock("aa", "up"):
        start = time.monotonic()
        with pytest.raises(BusyError), state.lock("aa", "up", wait_s=0.3):
            pytest.fail("both hold it")
        assert 0.3 <= time.monotonic() - start < 60


@pytest.mark.parametrize("lab_id", ["../x", "", "a/b", "a\n", "-a"])
def test_a_lab_id_never_leads_out_of_the_directory(state: State, lab_id: str) -> None:
    with pytest.raises(ValueError, match="not a lab id"), state.lock(lab_id, "up"):
        pytest.fail("held")


def test_a_link_in_the_place_of_the_lock_is_not_followed(state: State, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("keep")
    (tmp_path / "locks" / "aa.lock").symlink_to(target)
    with pytest.raises(LabError, match="cannot lock"), state.lock("aa", "up"):
        pytest.fail("held")
    assert target.read_text() == "keep"


def test_an_earlier_labctl_holds_it_against_this_one(state: State) -> None:
    """Earlier versions call flock themselves, and write the same note."""
    file = state.path.parent / "locks" / "aa.lock"
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps({"pid": 4711, "what": "pull", "since": time.time()}))
    with file.open("r+") as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX)
        with (
            pytest.raises(BusyError, match=r"pid 4711.*`pull`"),
            state.lock("aa", "up", wait_s=0.1),
        ):
            pytest.fail("both hold it")
    with state.lock("aa", "up", wait_s=0.0):
        pass


def test_this_labctl_holds_it_against_an_earlier_one(state: State) -> None:
    file = state.path.parent / "locks" / "aa.lock"
    with state.lock("aa", "up"), file.open("r+") as earlier:
        with pytest.raises(BlockingIOError):
            fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)
        note = json.loads(earlier.read())
        assert (note["pid"], note["what"]) == (os.getpid(), "up")
        assert file.stat().st_mode & 0o7777 == 0o600
    with file.open("r+") as earlier:
        fcntl.flock(earlier, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_another_thread_may_let_go(state: State) -> None:
    holding = state.lock("aa", "up")
    holding.__enter__()
    releasing = threading.Thread(target=holding.__exit__, args=(None, None, None))
    releasing.start()
    releasing.join()
    with state.lock("aa", "down", wait_s=0.0):
        pass
