"""Run an assignment's public tests with pytest: here, or in a sandbox on the server.

The tests came with the assignment's starter. Pytest writes its results as JUnit XML, which is read
as untrusted input: the tests import the student's code.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as xml
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from labctl.config import copy_environment
from labctl.config.installation import install_command
from labctl.errors import LabError, NotFoundError
from labctl.events import Step
from labctl.model import Value
from labctl.runs import images, runs
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_container_gpus_option
from labctl.shell import command
from labctl.sync import lab_files
from labctl.sync.starter import RECORD, StarterRecord, read_record
from labctl.text import duration_text
from labctl.wire.containment import find_link_on_way
from labctl.wire.sandbox import CHECK, CheckReply, CheckRequest

TIME_LIMIT_S = 600
# Seconds added to the check's own limit, for the connection.
LINK_S = 60.0
MOST_BYTES = 4 * 1024**2
SHOWN_CHARACTERS = 1500
LONGEST_MESSAGE = 300
# What to type in a lab that has no public tests.
JOIN = """\
labctl join   # in the lab of a course: gets new assignments, and their tests
labctl join FILE   # elsewhere: joins a course with the file from your instructor"""
MOST_HINTS = 3
Outcome = Literal["passed", "failed", "skipped"]


class PublicTest(Value, frozen=True):
    """One test by pytest's name for it; `message` says why it failed or was skipped."""

    name: str
    outcome: Outcome
    message: str = ""


class CheckReport(Value, frozen=True):
    """The results of an assignment's public tests, on this machine or on the server.

    `changed` are files of the tests that differ from those of the course, or are missing.
    """

    assignment: str
    where: Literal["here", "server"]
    tests: tuple[PublicTest, ...]
    changed: tuple[str, ...] = ()

    @property
    def failed(self) -> tuple[PublicTest, ...]:
        return tuple(test for test in self.tests if test.outcome == "failed")


class _TestFiles(Value, frozen=True):
    """The test modules to run, and the files of the tests that the student changed or deleted."""

    assignment: str
    modules: tuple[str, ...]
    changed: tuple[str, ...]


def has_public_tests(root: Path) -> bool:
    """Whether public tests came with the lab's starter."""
    record = read_record(root)
    return record is not None and bool(record.starter.tests)


def run_tests(root: Path, *, time_limit_s: int = TIME_LIMIT_S) -> CheckReport:
    """Run the public tests of the lab at `root` with this Python.

    NotFoundError if the lab has none; LabError if pytest is missing or does not end.
    """
    files = _find_tests(root)
    if importlib.util.find_spec("pytest") is None:
        raise LabError(
            "pytest is not installed in labctl's Python environment",
            why=f"the tests run with {sys.executable}",
            hint=f"{install_command('train')}\nlabctl check --on-server",
        )
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        code, output = _run_pytest(root, files.modules, results, time_limit_s)
        text = _read_text(results)
    tests = _parse_results(text, code, output)
    return CheckReport(
        assignment=files.assignment, where="here", tests=tests, changed=files.changed
    )


def _run_pytest(
    root: Path, modules: Sequence[str], results: Path, time_limit_s: int
) -> tuple[int, str]:
    """Return pytest's exit code and the end of its output. Its process group is ended."""
    # A pytest.ini of the lab is not used: results must not depend on it.
    words = (
        sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(root),
        "-p", "no:cacheprovider", "-o", "junit_family=xunit1", "-o", "markers=points",
        f"--junitxml={results}", "--", *modules,
    )  # fmt: skip
    # The output is a file: a pipe would be open for as long as any process that a test started.
    with tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            words,
            cwd=root,
            env={**copy_environment(), "PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(time_limit_s)
        except subprocess.TimeoutExpired:
            raise LabError(
                f"the tests did not finish within {duration_text(time_limit_s)}",
                why="labctl has stopped them",
                hint="labctl check --time-limit 1h",
            ) from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        output.seek(max(0, output.seek(0, os.SEEK_END) - MOST_BYTES))
        return code, output.read().decode(errors="replace")


def run_tests_on_server(context: LabContext, *, time_limit_s: int = TIME_LIMIT_S) -> CheckReport:
    """Push the code, and run the public tests on the server, in the image of the latest run.

    NotFoundError if the lab has no tests, or no run yet.
    """
    root = context.config.root
    files = _find_tests(root)
    run = runs.find_run(context)
    server = context.get_server()
    lab_files.push_code(context, server, force=False)
    request = CheckRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        run=run.id,
        tests=files.modules,
        gpus=choose_container_gpus_option(context, server),
        deadline_s=time_limit_s,
    )
    code, reply = _call_server(context, request, time_limit_s)
    tests = _parse_results(reply.results, code, reply.said)
    return CheckReport(
        assignment=files.assignment, where="server", tests=tests, changed=files.changed
    )


def run_modules_on_server(
    context: LabContext, run_id: str, modules: Sequence[str], time_limit_s: int
) -> tuple[PublicTest, ...]:
    """Run these test modules of the code on the server, in the image of a run.

    LabError if the server has no such image, or if the tests do not end.
    """
    server = context.get_server()
    request = CheckRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        run=run_id,
        tests=tuple(modules),
        gpus=choose_container_gpus_option(context, server),
        deadline_s=time_limit_s,
    )
    reply = context.open_agent(server).call(CHECK, request, timeout_s=time_limit_s + LINK_S)
    if reply.code is None:
        raise LabError(f"the image of run {run_id} is not on the server")
    return _parse_results(reply.results, reply.code, reply.said)


def _call_server(
    context: LabContext, request: CheckRequest, time_limit_s: int
) -> tuple[int, CheckReply]:
    """Run the tests, in an image that the server gets if it lacks it; return pytest's exit code."""
    server = context.get_server()
    remote = context.open_agent(server)
    step = Step(name="running the tests", detail=f"at most {duration_text(time_limit_s)}")
    context.reporter.emit(step)
    reply = remote.call(CHECK, request, timeout_s=time_limit_s + LINK_S)
    if reply.missing:
        images.ensure_image(context, server, remote, reply.missing, of_run=request.run)
        reply = remote.call(CHECK, request, timeout_s=time_limit_s + LINK_S)
    if reply.code is None:
        raise LabError(
            f"the image {reply.missing} of run {request.run} is not on the server",
            why="the tests run in it",
            hint="labctl run && labctl check --on-server",
        )
    context.reporter.emit(Step(name=step.name, done=True))
    return reply.code, reply


def _find_tests(root: Path) -> _TestFiles:
    record = read_record(root)
    if record is None or not record.starter.tests:
        # In the course's lab, each assignment has a directory.
        labs = sorted(file.parent.parent.name for file in root.glob(f"*/{RECORD}"))
        commands = [command("labctl", "check", name).render() for name in labs[:MOST_HINTS]]
        raise NotFoundError(
            f"no public tests came with the lab in {root}",
            why="they come with the files of an assignment",
            hint="\n".join(commands) or JOIN,
        )
    modules = tuple(path for path in record.starter.tests if _is_module(root, path))
    if not modules:
        raise NotFoundError(
            "the public tests are no longer in the lab",
            why=", ".join(record.starter.tests)[:SHOWN_CHARACTERS],
            hint="\n".join(_restore_command(path) for path in record.starter.tests[:MOST_HINTS]),
        )
    return _TestFiles(
        assignment=record.starter.assignment,
        modules=modules,
        changed=_list_changed(root, record),
    )


def _restore_command(path: str) -> str:
    return command("labctl", "join", "--restore", path).render()


def _is_module(root: Path, path: str) -> bool:
    name = path.rpartition("/")[2]
    file = root / path
    is_file = file.is_file() and not file.is_symlink() and find_link_on_way(root, path) is None
    return is_file and name.startswith("test_") and name.endswith(".py")


def _list_changed(root: Path, record: StarterRecord) -> tuple[str, ...]:
    files = record.starter.by_path()
    return tuple(
        path
        for path in record.starter.tests
        if not (root / path).is_file() or (root / path).read_bytes() != files[path].content
    )


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError:
        return ""
    return "" if len(data) > MOST_BYTES else data.decode(errors="replace")


def _parse_results(text: str, code: int, output: str) -> tuple[PublicTest, ...]:
    """Return the tests of a JUnit XML file.

    LabError, with the output, if it has none, or if pytest failed though no test did.
    """
    try:
        tests = [_parse_case(case) for case in xml.fromstring(text).iter("testcase")]
    except (xml.ParseError, ValueError):
        tests = []
    has_failure = any(test.outcome == "failed" for test in tests)
    if not tests or (code != 0 and not has_failure):
        problem = "before all of them had run" if tests else "without a result"
        hint = "labctl check"
        if "No module named pytest" in output:
            hint = "add pytest to requirements.txt, then:\nlabctl run\nlabctl check --on-server"
        raise LabError(
            f"the tests ended with exit code {code} and {problem}",
            why=output.strip()[-SHOWN_CHARACTERS:],
            hint=hint,
        )
    return tuple(tests)


def _parse_case(case: xml.Element) -> PublicTest:
    name = str(case.get("name", ""))
    file = str(case.get("file") or case.get("classname") or "")
    # A module that cannot be imported is a case without a file, named after the module.
    title = f"{file}::{name}" if file else name
    outcome: Outcome = "passed"
    message = ""
    for kind in ("failure", "error", "skipped"):
        element = case.find(kind)
        if element is not None:
            outcome = "skipped" if kind == "skipped" else "failed"
            message = _summarize(element)
            break
    return PublicTest(name=title[:LONGEST_MESSAGE], outcome=outcome, message=message)


def _summarize(element: xml.Element) -> str:
    """Return the message of a failure, or the last line of an error's text."""
    message = str(element.get("message") or "").strip()
    lines = [line for line in str(element.text or "").splitlines() if line.startswith("E ")]
    if message.startswith(("collection failure", "failed on setup")) and lines:
        message = lines[-1][1:].strip()
    return message.splitlines()[0][:LONGEST_MESSAGE] if message else ""
