"""A model built by the lab's own code and measured, in a child process of the lab's Python."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from labctl.errors import InterruptError, LabError, NotFoundError, UsageError
from labctl.estimate.plan import Measured, Plan
from labctl.events import Reporter, Step
from labctl.model import Value

MARK = "labctl-measured:"
TIME_LIMIT_S = 120
TAIL_LINES = 6
VENVS = (".venv", "venv")
BY_SIZE = "labctl estimate --params 8B   # by its size, without code"


class Source(Value, frozen=True):
    """Which code to call. `input_shape` is of one item; empty leaves it to the code or to a guess.

    `python` "" is the lab's: a virtual environment in its directory, else the one labctl runs on.
    """

    file: Path
    function: str
    root: Path
    input_shape: tuple[int, ...] = ()
    input_type: str = "float32"
    python: str = ""
    time_limit_s: int = TIME_LIMIT_S


def parse_target(text: str, root: Path) -> tuple[Path, str]:
    """`train.py:build_model`, the file below the lab or absolute; UsageError, NotFoundError."""
    name, colon, function = text.rpartition(":")
    if not colon or not name or not function.isidentifier():
        raise UsageError(
            f"{text!r} names no function in a file", hint="labctl estimate train.py:build_model"
        )
    file = (root / name).resolve()
    if not file.is_file():
        raise NotFoundError(
            f"there is no {name} in {root}",
            why=_python_files(root),
            hint="labctl -C DIR estimate train.py:build_model",
        )
    return file, function


def _python_files(root: Path) -> str:
    found = sorted(path.name for path in root.glob("*.py"))[:10] if root.is_dir() else []
    return f"Python files there: {', '.join(found)}" if found else "no Python file is there"


def lab_python(root: Path) -> str:
    """The interpreter of a virtual environment in the lab, else labctl's own."""
    for venv in VENVS:
        python = root / venv / "bin" / "python"
        if python.is_file():
            return str(python)
    return sys.executable


def measured(source: Source, plan: Plan, reporter: Reporter) -> Measured:
    """Parameters counted, activations and operations measured; LabError says what stood in the way.

    Two small batches run on the CPU; what a larger one takes is a straight line through them.
    """
    python = source.python or lab_python(source.root)
    name = f"building {source.file.name}:{source.function}"
    reporter.emit(Step(name=name))
    answer = _answer(source, python, _asked(source, plan))
    if "error" in answer:
        raise _refusal(source, python, answer)
    reporter.emit(Step(name=name, done=True))
    return msgspec.convert(answer, Measured)


def _asked(source: Source, plan: Plan) -> dict[str, Any]:
    return {
        "file": str(source.file),
        "function": source.function,
        "training": plan.training,
        "precision": plan.precision,
        "seq": plan.seq,
        "input": list(source.input_shape),
        "input_type": source.input_type,
    }


def _answer(source: Source, python: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    import labctl.estimate

    program = Path(labctl.estimate.__file__).with_name("measure.py").read_text()
    try:
        child = subprocess.Popen(
            [python, "-B", "-c", program],
            cwd=source.root,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise LabError(
            f"{python} cannot be started", why=str(error.strerror), hint="--python PATH"
        ) from None
    out, err = _finished(child, source, json.dumps(asked) + "\n")
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            body: dict[str, Any] = json.loads(line.removeprefix(MARK))
            return body
    raise _crash(source, python, child.returncode, err or out)


def _finished(child: subprocess.Popen[str], source: Source, asked: str) -> tuple[str, str]:
    """All that it said. What it started ends with it, whatever happens."""
    try:
        return child.communicate(asked, timeout=source.time_limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        raise LabError(
            f"{source.file.name}:{source.function} was not done after {source.time_limit_s} s",
            why="it was ended; it is built and run on this machine's processor. Data loading and "
            "training belong behind `if __name__ == '__main__':`",
            hint=f"--time-limit 10m; or {BY_SIZE}",
        ) from None
    except KeyboardInterrupt:
        _end(child)
        raise InterruptError("interrupted while the model was being built") from None


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _crash(source: Source, python: str, code: int, said: str) -> LabError:
    lines = [line for line in said.strip().splitlines() if line.strip()]
    name = f"{source.file.name}:{source.function}"
    if any("can't allocate memory" in line or "MemoryError" in line for line in lines[-3:]):
        return LabError(
            f"{name} needs more memory than this machine has to spare", why=lines[-1], hint=BY_SIZE
        )
    if code < 0:
        return LabError(f"{name} was ended by signal {-code}", why=_tail(lines), hint=BY_SIZE)
    if lines and lines[-1].startswith("ModuleNotFoundError"):
        missing = f"{python} -m pip install what is missing; or --python PATH; or {BY_SIZE}"
        return LabError(f"{name} cannot be imported", why=lines[-1], hint=missing)
    told = "--input 3x224x224 if the shape is wrong (--input-type int64 for tokens)"
    return LabError(f"{name} failed", why=_tail(lines), hint=told)


def _tail(lines: list[str]) -> str:
    return "\n".join(line[:200] for line in lines[-TAIL_LINES:])


def _refusal(source: Source, python: str, answer: dict[str, Any]) -> LabError:
    name, why = f"{source.file.name}:{source.function}", str(answer.get("why", ""))
    if answer["error"] == "torch":
        own = python == sys.executable
        install = "pip install 'labctl[train]'" if own else f"{python} -m pip install torch"
        return LabError(
            f"PyTorch is not installed in {python}",
            why=f"{source.file.name} is imported there, to build the model and count",
            hint=f"{install}; or --python PATH; or {BY_SIZE}",
        )
    if answer["error"] == "function":
        return NotFoundError(
            f"there is no function {source.function} in {source.file.name}",
            why=f"functions there: {why}" if why else "it has none of its own",
            hint="write one that returns the model, or (model, an example of its input)",
        )
    if answer["error"] == "model":
        return LabError(
            f"{name} did not return a PyTorch module",
            why=why,
            hint="return the model, or (model, an example of its input)",
        )
    if answer["error"] == "input":
        return UsageError(
            f"what goes into {name} is not known",
            why=why,
            hint="--input 3x224x224 (of one item), or return (model, an example of its input)",
        )
    return LabError(f"{name} cannot be measured", why=why, hint=BY_SIZE)
