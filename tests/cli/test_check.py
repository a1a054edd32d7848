"""`labctl check`: an assignment's public tests by real pytest, on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from labctl.errors import LabError
from labctl.lab import Lab
from labctl.model import Endpoint, Offer, Run, Server
from labctl.runs import public_tests
from labctl.runs.public_tests import run_tests
from labctl.sync.starter import Starter, StarterFile, StarterRecord, write_record
from labctl.sync.starter_update import update_files
from labctl.wire.sandbox import CheckReply, CheckRequest

Labctl = Callable[..., Any]
TESTS = """\
import pytest
from net import double

def test_double():
    assert double(2) == 4

@pytest.mark.parametrize("number", [1, 3])
def test_more(number):
    assert double(number) == 2 * number, "see \x1b[1m the notes"

def test_later():
    pytest.skip("needs a GPU")
"""


def hand_out(root: Path, **files: str) -> None:
    """Write a starter with these tests into the lab at `root`."""
    made = tuple(
        StarterFile(path=f"tests/{name}.py", content=text.encode()) for name, text in files.items()
    )
    paths = tuple(file.path for file in made)
    starter = Starter(assignment="hw3", source="", files=made, tests=paths)
    update_files(root, None, starter)
    write_record(root, StarterRecord(sha256="0" * 64, starter=starter))


@pytest.fixture
def root(home: Path) -> Path:
    lab = home / "digits"
    (lab / "net.py").write_text("def double(n): return n + 2\n")
    hand_out(lab, test_net=TESTS)
    return lab


def test_each_test_is_shown_and_a_failed_one_is_exit_code_1(labctl: Labctl, root: Path) -> None:
    said = labctl("check")
    assert said.code == 1
    lines = said.out.splitlines()
    assert "passed   tests/test_net.py::test_double" in lines
    assert "failed   tests/test_net.py::test_more[1]" in lines
    assert "skipped  tests/test_net.py::test_later" in lines
    assert "         needs a GPU" in lines
    assert lines[-1] == "hw3: 1 of 4 tests passed"
    (root / "net.py").write_text("def double(n): return 2 * n\n")
    said = labctl("check", "--json")
    assert said.code == 0
    check = json.loads(said.out)["check"]
    assert [test["outcome"] for test in check["tests"]] == ["passed"] * 3 + ["skipped"]
    assert (check["assignment"], check["where"], check["changed"]) == ("hw3", "here", [])
    assert not list(root.rglob("__pycache__"))
    assert not (root / ".pytest_cache").exists()


def test_the_marker_that_gives_points_is_known(
    labctl: Labctl, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marked = TESTS.replace("def test_double", "@pytest.mark.points(3)\ndef test_double")
    hand_out(root, test_net=marked)
    monkeypatch.setenv("PYTHONWARNINGS", "error::pytest.PytestUnknownMarkWarning")
    assert "passed   tests/test_net.py::test_double" in labctl("check").out


def test_a_check_finds_the_lab_of_an_assignment_by_its_name(
    labctl: Labctl, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course_lab = home / "digits"
    (course_lab / "hw3").mkdir()
    (course_lab / "hw3" / "lab.yaml").write_text("lab: hw3\n")
    hand_out(course_lab / "hw3", test_a="def test_a(): pass\n")
    assert labctl("check", "hw3").out.endswith("hw3: 1 of 1 tests passed\n")
    said = labctl("check")
    assert (said.code, "next: labctl check hw3" in said.err) == (4, True)
    monkeypatch.chdir(course_lab / "hw3")
    assert labctl("check").code == 0
    for name in ("hw4", "..", "../digits/hw3"):
        said = labctl("check", name)
        assert (said.code, "labctl join" in said.err) == (4, True)


def test_a_lab_without_tests_says_where_they_come_from(labctl: Labctl, home: Path) -> None:
    said = labctl("check")
    assert said.code == 4
    assert "no public tests came with the lab" in said.err
    assert "next: labctl join\n" in said.err
    assert "labctl join FILE\n" in said.err


def test_tests_that_the_student_changed_or_deleted_are_named(labctl: Labctl, root: Path) -> None:
    hand_out(root, test_net=TESTS, test_other="def test_other(): pass\n", data="X = 1\n")
    (root / "tests" / "test_net.py").write_text("def test_mine(): pass\n")
    (root / "tests" / "data.py").unlink()
    said = labctl("check")
    assert said.code == 0
    assert "! tests/test_net.py is not as the course handed it out" in said.err
    assert "! tests/data.py is not as the course handed it out" in said.err
    assert "test_other.py is not" not in said.err
    for file in (root / "tests").iterdir():
        file.unlink()
    said = labctl("check")
    assert (said.code, "labctl join --restore tests/test_net.py" in said.err) == (4, True)
    assert labctl("join", "--restore", "tests/test_net.py").out == "restored tests/test_net.py\n"
    assert (root / "tests" / "test_net.py").read_text() == TESTS
    assert labctl("join", "--restore", "tests/test_net.py").code == 3
    for path in ("nothing.py", "../digits/lab.yaml", "lab.yaml"):
        assert labctl("join", "--restore", path).code == 4
    assert labctl("join", "alice.join", "--restore", "tests/test_net.py").code == 2


def test_a_test_that_is_now_a_link_does_not_run(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere.py").write_text("def test_elsewhere(): pass\n")
    (root / "tests" / "test_net.py").unlink()
    (root / "tests" / "test_net.py").symlink_to(tmp_path / "elsewhere.py")
    with pytest.raises(LabError, match="no longer in the lab"):
        run_tests(root)


def test_code_that_cannot_be_imported_fails_with_the_reason(labctl: Labctl, root: Path) -> None:
    (root / "net.py").write_text("import no_such_package\n")
    said = labctl("check")
    assert said.code == 1
    assert "No module named 'no_such_package'" in said.out
    assert "hw3: 0 of 1 tests passed" in said.out


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os._exit(7)", "exit code 7"),
        ("while True: pass", "did not finish within 1 s"),
        ("def double(n): raise KeyboardInterrupt", "exit code 2 and before all of them had run"),
        ("import sys; sys.exit(5)", None),
    ],
)
def test_code_that_ends_or_never_ends_pytest_is_reported(
    code: str, said: str | None, root: Path
) -> None:
    (root / "net.py").write_text(code)
    if said is None:
        assert run_tests(root).failed
        return
    with pytest.raises(LabError, match=said):
        run_tests(root, time_limit_s=1 if "while" in code else 60)


def test_a_process_that_a_test_leaves_behind_is_ended_and_delays_nothing(
    home: Path, tmp_path: Path
) -> None:
    """It has the output of pytest itself, as after `capfd.disabled()`."""
    file = tmp_path / "pid"
    left_behind = (
        "import pathlib, subprocess\n"
        "def test_a(capfd):\n"
        "    with capfd.disabled():\n"
        "        child = subprocess.Popen(['sleep', '300'])\n"
        f"    pathlib.Path({str(file)!r}).write_text(str(child.pid))\n"
    )
    hand_out(home / "digits", test_a=left_behind)
    (test,) = run_tests(home / "digits", time_limit_s=60).tests
    assert test.outcome == "passed"
    with contextlib.suppress(ProcessLookupError):
        ended = os.pidfd_open(int(file.read_text()))
        assert select.select([ended], [], [], 30)[0]
        os.close(ended)


def test_the_configuration_of_the_lab_does_not_change_the_results(root: Path) -> None:
    (root / "pytest.ini").write_text("[pytest]\naddopts = --deselect tests/test_net.py\n")
    assert len(run_tests(root).tests) == 4


def test_without_pytest_the_error_says_how_to_install_it(
    labctl: Labctl, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(public_tests.importlib.util, "find_spec", lambda name: None)
    said = labctl("check")
    assert said.code == 1
    assert "pytest is not installed" in said.err
    assert "labctl check --on-server" in said.err


# On the server: the push and the agent are replaced, and their parts are tested elsewhere.


class RemoteAgent:
    """An agent that answers a check with `replies`, in their order."""

    def __init__(self, *replies: CheckReply) -> None:
        self.replies = list(replies)
        self.requests: list[CheckRequest] = []

    def call(self, verb: Any, request: CheckRequest, *, timeout_s: float) -> CheckReply:
        self.requests.append(request)
        return self.replies.pop(0)


@pytest.fixture
def lab(root: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    loaded = Lab.load(root)
    context = loaded.context
    offer = Offer(provider="local", type="container")
    server = Server(
        id="s", provider="local", lab="digits", lab_id=loaded.id, alias="digits", offer=offer,
        created_at=1.0, state="running", endpoint=Endpoint(host="192.0.2.7"),
    )  # fmt: skip
    context.state.save_server(server)
    context.state.save_run(Run(id="r1", lab_id=loaded.id, server_id="s", state="exited"))
    monkeypatch.setattr(public_tests, "choose_container_gpus_option", lambda context, server: "")
    monkeypatch.setattr(public_tests.lab_files, "push_code", lambda *_, **__: None)
    return loaded


XML = """<testsuites><testsuite>
<testcase classname="tests.test_net" name="test_a" file="tests/test_net.py"/>
<testcase classname="tests.test_net" name="test_b" file="tests/test_net.py">
<failure message="assert 1 == 2&#10;more">E   assert 1 == 2</failure></testcase>
</testsuite></testsuites>"""


def test_a_check_on_the_server_uses_the_latest_run_and_its_image(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = RemoteAgent(CheckReply(missing="digits:1"), CheckReply(code=1, results=XML))
    monkeypatch.setattr(type(lab.context), "open_agent", lambda self, server: agent)
    fetched: list[str] = []
    monkeypatch.setattr(
        public_tests.images,
        "ensure_image",
        lambda context, server, remote, name, *, of_run: fetched.append(name),
    )
    report = public_tests.run_tests_on_server(lab.context, time_limit_s=30)
    assert (report.where, fetched) == ("server", ["digits:1"])
    assert [(test.name, test.outcome, test.message) for test in report.tests] == [
        ("tests/test_net.py::test_a", "passed", ""),
        ("tests/test_net.py::test_b", "failed", "assert 1 == 2"),
    ]
    assert (agent.requests[0].run, agent.requests[0].tests) == ("r1", ("tests/test_net.py",))
    agent = RemoteAgent(CheckReply(missing="digits:1"), CheckReply(missing="digits:1"))
    with pytest.raises(LabError, match="digits:1 of run r1 is not on the server"):
        public_tests.run_tests_on_server(lab.context)


@pytest.mark.parametrize("results", ["", "<", "<testsuites/>", "not XML"])
def test_a_check_without_results_shows_the_output(
    results: str, lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = CheckReply(code=1, said="python: No module named pytest", results=results)
    agent = RemoteAgent(reply)
    monkeypatch.setattr(type(lab.context), "open_agent", lambda self, server: agent)
    with pytest.raises(LabError, match="without a result") as caught:
        public_tests.run_tests_on_server(lab.context)
    assert "add pytest to requirements.txt" in caught.value.hint


def test_a_check_on_the_server_needs_a_run(labctl: Labctl, root: Path) -> None:
    said = labctl("check", "--on-server")
    assert said.code == 4
    assert "labctl run" in said.err
