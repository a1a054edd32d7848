"""Build a model with the lab's own code and measure it, in a child process of the lab's Python."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from labctl import estimate
from labctl.config.installation import install_command
from labctl.decoding import convert_value
from labctl.errors import InterruptError, LabError, NotFoundError, UsageError
from labctl.estimate import measure
from labctl.estimate.plan import FitMeasurement, ModelMeasurement, ModelPlan
from labctl.events import Reporter, Step
from labctl.model import Value
from labctl.services.language_models.source import CONFIG, GGUF_SUFFIX
from labctl.shell import command

MARK = "labctl-measured:"
TIME_LIMIT_S = 120
TAIL_LINES = 6
# "BirdNet.forward() missing 1 required positional argument: 'offsets'"
MISSING_ARGUMENT = re.compile(r"TypeError: [\w.<>]+\(\) missing \d+ required ")
VENVS = (".venv", "venv")
# A function with such a name and no required argument probably returns a model.
_BUILDS = re.compile(r"(?:build|make|create|get)_\w*(?:model|net)\w*")
ANY_TARGET = "FILE.py:FUNCTION"
MOST_FILES = 20
LARGEST_SOURCE_BYTES = 256 * 1024
NO_EXIT = "put data loading and training under `if __name__ == '__main__':`"
BY_SIZE = "labctl estimate --params 8B   # by its size, without code"


class ModelSource(Value, frozen=True):
    """The code to call. `input_shape` is of one item; if empty, the code tells it or it is guessed.

    If `python` is "", it is that of a virtual environment in the lab directory, else labctl's own.
    """

    file: Path
    function: str
    root: Path
    input_shape: tuple[int, ...] = ()
    input_type: str = "float32"
    python: str = ""
    time_limit_s: int = TIME_LIMIT_S


def parse_target(text: str, root: Path) -> tuple[Path, str]:
    """Parse `train.py:build_model`. UsageError, NotFoundError.

    The file is absolute, or relative to the current directory if that is in the lab, or to the lab.
    """
    if text.endswith(GGUF_SUFFIX) or (Path(text) / CONFIG).is_file():
        raise UsageError(
            f"{text} is a language model, not a function",
            why="the memory of one is computed before it is served, and before anything is started",
            hint=command("labctl", "serve", "--model", text).render(),
        )
    name, colon, function = text.rpartition(":")
    if not colon or not name or not function.isidentifier():
        raise UsageError(
            f"{text!r} does not name a function in a file",
            why=f"expected {ANY_TARGET}; the function returns the model and takes no arguments",
            hint=f"labctl estimate {suggest_target(root)}",
        )
    here = Path.cwd()
    is_here = here.is_relative_to(root.resolve()) and (here / name).is_file()
    file = ((here if is_here else root) / name).resolve()
    if not file.is_file():
        raise NotFoundError(
            f"{root} has no file {name}",
            why=_list_python_files(root),
            hint=f"labctl estimate {suggest_target(root)}\n"
            f"labctl -C DIR estimate {shlex.quote(text)}",
        )
    return file, function


def suggest_target(root: Path) -> str:
    """Return a function of the lab that probably builds a model, else "FILE.py:FUNCTION"."""
    for path in sorted(root.glob("*.py"))[:MOST_FILES]:
        try:
            if path.stat().st_size > LARGEST_SOURCE_BYTES:
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            tree = ast.parse(text if _BUILDS.search(text) else "")
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and _builds_model(node):
                return f"{path.name}:{node.name}"
    return ANY_TARGET


def _builds_model(function: ast.FunctionDef) -> bool:
    parameters = function.args
    required = len(parameters.posonlyargs) + len(parameters.args) - len(parameters.defaults)
    return (
        _BUILDS.fullmatch(function.name) is not None
        and required == 0
        and None not in parameters.kw_defaults
    )


def _list_python_files(root: Path) -> str:
    names = sorted(path.name for path in root.glob("*.py"))[:10] if root.is_dir() else []
    return f"its Python files: {', '.join(names)}" if names else "it has no Python files"


def find_lab_python(root: Path) -> str:
    """Find the interpreter of a virtual environment in the lab, else return labctl's own."""
    for venv in VENVS:
        python = root / venv / "bin" / "python"
        if python.is_file():
            return str(python)
    return sys.executable


def measure_model(
    source: ModelSource, plan: ModelPlan, reporter: Reporter
) -> ModelMeasurement | FitMeasurement:
    """Count a model's parameters, and measure its activations and operations. LabError on failure.

    Runs two small batches on the CPU; larger ones are extrapolated linearly. A model for tables is
    trained on parts of its rows instead.
    """
    python = source.python or find_lab_python(source.root)
    name = f"building {source.file.name}:{source.function}"
    reporter.emit(Step(name=name))
    measurement = _run_program(source, python, _build_request(source, plan))
    reporter.emit(Step(name=name, done=True))
    return measurement


class _MeasurementRequest(Value, frozen=True):
    """The request that labctl/estimate/measure.py reads; `input` is the shape of one item."""

    file: str
    function: str
    training: bool
    precision: str
    seq: int
    input: tuple[int, ...]
    input_type: str


class _MeasureRefusal(Value, frozen=True):
    """The reply of measure.py if it measured nothing; `error` is "" if it did."""

    error: str = ""
    why: str = ""
    exception: str = ""
    module: str = ""


def _build_request(source: ModelSource, plan: ModelPlan) -> _MeasurementRequest:
    return _MeasurementRequest(
        file=str(source.file),
        function=source.function,
        training=plan.training,
        precision=plan.precision,
        seq=plan.seq,
        input=source.input_shape,
        input_type=source.input_type,
    )


def _run_program(
    source: ModelSource, python: str, request: _MeasurementRequest
) -> ModelMeasurement | FitMeasurement:
    program, *modules = (
        Path(estimate.__file__).with_name(f"{name}.py").read_text()
        for name in ("measure", *measure.MODULES)
    )
    try:
        child = subprocess.Popen(
            [python, "-B", "-c", program, *modules],
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
            f"{python} cannot be started", why=str(error.strerror), hint="set --python PATH"
        ) from None
    # Only ASCII, whatever the encoding of the pipe is.
    request_line = json.dumps(msgspec.to_builtins(request)) + "\n"
    out, err = _communicate(child, source, request_line)
    for line in reversed(out.splitlines()):
        if line.startswith(MARK):
            return _parse_reply(source, python, line.removeprefix(MARK))
    raise _explain_crash(source, child.returncode, err or out)


def _parse_reply(source: ModelSource, python: str, text: str) -> ModelMeasurement | FitMeasurement:
    body = json.loads(text)
    refusal = convert_value(body, _MeasureRefusal)
    if refusal.error:
        raise _explain_refusal(source, python, refusal)
    if "trials" in body:
        return convert_value(body, FitMeasurement)
    return convert_value(body, ModelMeasurement)


def _communicate(
    child: subprocess.Popen[str], source: ModelSource, request: str
) -> tuple[str, str]:
    """Send the request and return (stdout, stderr). Kills the process group on a timeout."""
    try:
        return child.communicate(request, timeout=source.time_limit_s)
    except subprocess.TimeoutExpired:
        _end(child)
        raise LabError(
            f"{source.file.name}:{source.function} did not finish within {source.time_limit_s} s",
            why=f"labctl stopped it. It runs on this machine's CPU; {NO_EXIT}",
            hint=f"set --time-limit 10m, or:\n{BY_SIZE}",
        ) from None
    except KeyboardInterrupt:
        _end(child)
        raise InterruptError("interrupted while the model was being built") from None


def _end(child: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _explain_crash(source: ModelSource, code: int, output: str) -> LabError:
    """Explain why the program ended without a reply: a signal, or the code exited."""
    lines = [line for line in output.strip().splitlines() if line.strip()]
    name = f"{source.file.name}:{source.function}"
    if code < 0:
        return LabError(f"{name} was killed by signal {-code}", why=_tail(lines), hint=BY_SIZE)
    return LabError(f"{name} exited with code {code}", why=_tail(lines), hint=NO_EXIT)


def _explain_exception(source: ModelSource, python: str, refusal: _MeasureRefusal) -> LabError:
    """Explain an exception of the code while it built the model, or in a pass of the model."""
    name, message = f"{source.file.name}:{source.function}", refusal.why.splitlines()[-1]
    # PyTorch has no class of its own for this.
    if refusal.exception == "MemoryError" or "can't allocate memory" in refusal.why:
        return LabError(
            f"{name} needs more memory than this machine has free", why=message, hint=BY_SIZE
        )
    if refusal.module:
        package = refusal.module.partition(".")[0]
        install = f"{python} -m pip install {package}   # or set --python PATH\n{BY_SIZE}"
        return LabError(f"{name} cannot be imported", why=refusal.why, hint=install)
    # Without a line of the user's code, it is labctl's own call that lacks the argument.
    is_argument_missing = refusal.why == message and MISSING_ARGUMENT.match(message) is not None
    if refusal.error == "build":
        hint = "write a function without parameters that returns the model"
        return LabError(
            f"{name} failed", why=refusal.why, hint=hint if is_argument_missing else BY_SIZE
        )
    hint = "if the shape is wrong, set --input 3x224x224 (--input-type int64 for tokens)"
    if is_argument_missing:
        hint = "return (model, (first input, second input)) from the function"
    return LabError(f"the forward or backward pass of {name} failed", why=refusal.why, hint=hint)


def _tail(lines: list[str]) -> str:
    return "\n".join(line[:200] for line in lines[-TAIL_LINES:])


def _explain_refusal(source: ModelSource, python: str, refusal: _MeasureRefusal) -> LabError:
    name, why = f"{source.file.name}:{source.function}", refusal.why
    if refusal.error in ("build", "pass"):
        return _explain_exception(source, python, refusal)
    if refusal.error == "torch":
        own = python == sys.executable
        install = install_command("train") if own else f"{python} -m pip install torch"
        return LabError(
            f"PyTorch is not installed in {python}",
            why=f"labctl imports {source.file.name} there to build and measure the model",
            hint=f"{install}   # or set --python PATH\n{BY_SIZE}",
        )
    if refusal.error == "function":
        return NotFoundError(
            f"{source.file.name} has no function {source.function}",
            why=f"its functions: {why}" if why else "it defines no functions",
            hint="write one that returns the model, or (model, an example input)",
        )
    if refusal.error == "model":
        return LabError(
            f"{name} did not return a model that labctl can measure",
            why=f"{why}; labctl measures models of PyTorch, Keras, Flax, and those with fit()",
            hint="return the model, or (model, an example input)",
        )
    if refusal.error == "table":
        return LabError(
            f"{name} returned a model with fit(), but no table to train it on",
            why=why,
            hint="return (model, (rows, labels)) with NumPy arrays or frames of pandas",
        )
    if refusal.error == "input":
        return UsageError(
            f"the input shape of {name} is unknown",
            why=why,
            hint="set --input 3x224x224 (of one item), or return (model, an example input)",
        )
    return LabError(f"{name} cannot be measured", why=why, hint=BY_SIZE)
