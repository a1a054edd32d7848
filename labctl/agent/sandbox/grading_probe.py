"""Call the functions of staff's probe.py, which use the student's code, and store what they return.

It runs in the student's container, so probe.py must hold no expected value. The functions run in a
process of their own; if it ends, the remaining functions run in a new one. Writes an object with
a `CallResult` for each function. If all have an error, it exits with 1.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import util
from pathlib import Path
from typing import Any, Callable, NamedTuple

# Seconds before the container's time limit at which the functions are stopped.
MARGIN_S = 2.0
MOST_ERROR = 500


class CallResult(NamedTuple):
    """What a function returned, as a JSON value; with an `error`, it returned nothing."""

    value: object = None
    error: str = ""


def list_functions(text: str) -> list[str]:
    """Return the public functions of probe.py, in its order, without running it."""
    nodes = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return [node.name for node in nodes if not node.name.startswith("_")]


def convert(value: Any) -> Any:
    """Return arrays and tensors as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a value that JSON has")


def call_function(function: Callable[[], object]) -> CallResult:
    try:
        return CallResult(json.loads(json.dumps(function(), default=convert)))
    except Exception as error:
        return CallResult(error=describe_error(error))


def describe_error(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text}"[:MOST_ERROR] if text else type(error).__name__


def run_functions(probe: Path, names: list[str], target: Path) -> None:
    """Call these functions, and append the result of each to a file, one line each."""
    sys.path.insert(0, str(Path.cwd()))
    with target.open("a", encoding="utf-8") as file:
        try:
            specification = util.spec_from_file_location("probe", str(probe))
            assert specification is not None
            assert specification.loader is not None
            module = util.module_from_spec(specification)
            specification.loader.exec_module(module)
        except Exception as error:
            failure = CallResult(error=describe_error(error))
            file.writelines(f"{json.dumps([name, *failure])}\n" for name in names)
            return
        for name in names:
            file.write(f"{json.dumps([name, *call_function(getattr(module, name))])}\n")
            file.flush()


def read_results(path: Path) -> dict[str, CallResult]:
    """Read the complete lines of the results; the student's code may have written others."""
    results = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            name, value, error = json.loads(line)
            results[str(name)] = CallResult(value, str(error))
        except (ValueError, TypeError, RecursionError):
            continue
    return results


def call_all(names: list[str], target: Path, deadline: float) -> dict[str, CallResult]:
    """Call all functions before the deadline; one that ends its process has an error."""
    results: dict[str, CallResult] = {}
    remaining = list(names)
    while remaining:
        words = [sys.executable, __file__, str(target), *remaining]
        target.write_bytes(b"")
        # Half of the time that is left, so that the others have some if one does not end.
        limit_s = max(0.0, deadline - time.monotonic()) / 2
        try:
            code = subprocess.call(words, timeout=limit_s)
            why = f"the process ended with {code}"
        except subprocess.TimeoutExpired:
            why = "it did not end in time"
        results.update(read_results(target))
        remaining = [name for name in remaining if name not in results]
        if remaining:
            print(f"{remaining[0]}: {why}", file=sys.stderr)
            results[remaining.pop(0)] = CallResult(error=why)
    return results


def main() -> int:
    probe = Path(os.environ["LABCTL_PROBE"])
    if len(sys.argv) > 1:
        run_functions(probe, sys.argv[2:], Path(sys.argv[1]))
        return 0
    deadline = time.monotonic() + float(os.environ["LABCTL_TIMEOUT_S"]) - MARGIN_S
    names = list_functions(probe.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        results = call_all(names, Path(folder) / "results", deadline)
    errors = [results[name].error for name in names if results[name].error]
    if len(errors) == len(names):
        # Nothing works, perhaps because the image lacks a package: that is no grade.
        print(errors[0] if errors else "probe.py has no function")
        return 1
    outputs = {name: results[name]._asdict() for name in names}
    Path(os.environ["LABCTL_PREDICTIONS"]).write_text(json.dumps(outputs), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
