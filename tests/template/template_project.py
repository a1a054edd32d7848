"""The sample project under test: importable, and run as its users run it."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import runpy
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

REPOSITORY = Path(__file__).parents[2]
TEMPLATE = REPOSITORY / "templates" / "image-classifier"
sys.path.insert(0, str(TEMPLATE))
# A step takes milliseconds: whoever waits longer waits for something that does not come.
PATIENCE_S = 300.0


class Program(Protocol):
    """What a test does with a program that runs; `subprocess.Popen` has it."""

    @property
    def returncode(self) -> int | None: ...
    def poll(self) -> int | None: ...
    def send_signal(self, sig: int, /) -> None: ...
    def kill(self) -> None: ...
    def communicate(self, *, timeout: float | None = None) -> tuple[str, object]: ...


class ForkedProgram:
    """A Python program in a fork of a process that has imported PyTorch, which takes seconds.

    Apart from that it runs as by `python -B -W error`. Its output lies in a file.
    """

    def __init__(
        self, program: Path, arguments: tuple[str, ...], cwd: Path, environ: Mapping[str, str]
    ) -> None:
        handle, output = tempfile.mkstemp(prefix=f"{program.stem}-")
        os.close(handle)
        self._output = Path(output)
        argv = [str(program), *arguments]
        self._process = _prepared().Process(
            target=_run_program, args=(argv, str(cwd), dict(environ), output)
        )
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, sig: int, /) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, sig)

    def kill(self) -> None:
        self._process.kill()

    def communicate(self, *, timeout: float | None = None) -> tuple[str, object]:
        """(What it printed to both streams, None); once."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()
        text = self._output.read_text()
        self._output.unlink()
        return text, None


def _prepared() -> multiprocessing.context.ForkServerContext:
    """The context whose processes are forks of one that has imported the project."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["template_imports"])
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join((str(TEMPLATE), str(Path(__file__).parent)))
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        del os.environ["PYTHONPATH"]
        if before is not None:
            os.environ["PYTHONPATH"] = before
    return context


def _run_program(argv: list[str], cwd: str, environ: dict[str, str], output: str) -> None:
    """Become the program, in a fork."""
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = argv
    sys.dont_write_bytecode = True
    warnings.simplefilter("error")
    runpy.run_path(argv[0], run_name="__main__")


def start(program: str, *arguments: str, run: Path, data: Path | None = None) -> ForkedProgram:
    """Start a program of the project in the directory `run`, as labctl's container would.

    `data` is a dataset, in a directory called digits. A warning ends the program.
    """
    run.mkdir(exist_ok=True)
    return ForkedProgram(TEMPLATE / program, arguments, run, _environ(run, data))


def start_anew(
    program: str, *arguments: str, run: Path, data: Path | None = None
) -> subprocess.Popen[str]:
    """The same in an interpreter of its own, as a student starts it."""
    run.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-B", "-W", "error", str(TEMPLATE / program), *arguments],
        cwd=run,
        env=_environ(run, data),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_script(script: Path, *arguments: str, run: Path) -> str:
    """The output of a test's own program, which may import the project."""
    return finish(ForkedProgram(script, arguments, run, os.environ))


def _environ(run: Path, data: Path | None) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key[:7] != "LABCTL_"}
    environ |= {"LABCTL_RUN_DIR": str(run), "LABCTL_RUN_ID": "run-1", "SEED": "1"}
    return environ | ({"LABCTL_DATA_DIR": str(data.parent)} if data else {})


def finish(process: Program, exit_code: int = 0) -> str:
    """Wait for a program and return its output; it must end with `exit_code`."""
    output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == exit_code, output
    return output
