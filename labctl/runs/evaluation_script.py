"""The lab's evaluate.py: run it on this machine, read its last line, and explain its failure."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import time
from pathlib import Path
from typing import Literal, NamedTuple

from labctl.config.installation import install_command
from labctl.errors import LabError
from labctl.runs.evaluation import Evaluation
from labctl.runs.lab_script import SHOWN_CHARACTERS, run_lab_script
from labctl.runs.pickle_check import has_pickles
from labctl.runs.script_imports import explain_usage_error
from labctl.shell import command
from labctl.wire.sandbox import EvaluateReply

SCRIPT = "evaluate.py"
# an integer that every reader of JSON keeps exactly
_MOST_ITEMS = 2**53
_IMPORTS_TORCH = re.compile(r"^\s*(?:import|from)\s+torch\b", re.MULTILINE)


class ScriptResult(NamedTuple):
    """What evaluate.py reports on its last line. `total` is 0 if it printed no number of items."""

    accuracy: float
    checkpoint: str
    total: int


def can_evaluate_here(root: Path) -> bool:
    """Whether this Python has PyTorch, or none of the lab's scripts imports it."""
    if importlib.util.find_spec("torch") is not None:
        return True
    texts = (path.read_text("utf-8", errors="replace") for path in root.glob("*.py"))
    return not any(_IMPORTS_TORCH.search(text) for text in texts)


def run_script(root: Path, checkpoints: Path, out: Path, on_server: str) -> ScriptResult:
    """Run evaluate.py here; it may write details to `out`. LabError without an accuracy.

    `on_server` is the command that runs it in the image of the run.
    """

    def suggest_install(package: str) -> str:
        install = [install_command("train")] if package == "torch" else []
        return "\n".join([on_server, *install])

    return run_lab_script(
        (SCRIPT, str(checkpoints)),
        root,
        _require_accuracy,
        fix="fix evaluate.py, then:\nlabctl eval",
        suggest_install=suggest_install,
        variables={"LABCTL_EVALUATION": str(out)},
    )


def _require_accuracy(line: str) -> ScriptResult:
    result = parse_last_line(line)
    if result is None:
        raise ValueError("no accuracy")
    return result


def parse_last_line(line: str) -> ScriptResult | None:
    """Parse the JSON object that evaluate.py prints last; None if it has no accuracy."""
    try:
        body = json.loads(line)
        accuracy = float(body["accuracy"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not math.isfinite(accuracy):  # of no items
        return None
    try:
        total = int(body.get("total", 0))
    except (ValueError, TypeError, OverflowError):
        total = 0
    total = total if 0 <= total <= _MOST_ITEMS else 0
    return ScriptResult(accuracy, str(body.get("checkpoint", "")), total)


def make_evaluation(
    script: ScriptResult, where: Literal["here", "server"], fingerprints: dict[str, str]
) -> Evaluation | None:
    """Make an evaluation of the accuracy alone; None if that is not a share."""
    if not 0 <= script.accuracy <= 1:
        return None
    return Evaluation(
        checkpoint=script.checkpoint,
        classes=(),
        confusion=(),
        accuracy=script.accuracy,
        items=script.total,
        where=where,
        at=time.time(),
        checkpoint_fingerprints=fingerprints,
    )


def make_server_error(run_id: str, path: str, directory: Path, reply: EvaluateReply) -> LabError:
    """Make the error for an evaluate.py that failed on the server, or reported no accuracy.

    The next step tries again with the script that was used, so it is never one that is refused: a
    run keeps its own script, and pickles are not loaded on this machine.
    """
    local, root = directory / path, directory.parent.parent
    if reply.used_program:
        again = command("labctl", "eval", "--on-server", f"runs/{run_id}/{path}")
    elif local.is_dir() and not has_pickles(local):
        again = command("labctl", "eval", f"runs/{run_id}/{path}")
    else:
        again = command("labctl", "run")
    output = reply.said.strip()[-SHOWN_CHARACTERS:]
    what = f"evaluate.py failed on the server with exit code {reply.code}"
    if reply.code == 0:
        what = "evaluate.py reported no accuracy on the server"
        needs = 'its last line of output must be JSON, such as {"accuracy": 0.9}'
        output = f"{needs}\n{output}"
    elif cause := explain_usage_error(root / SCRIPT, output):
        output = f"{cause}\n{output}"
    return LabError(what, why=output, hint=f"fix evaluate.py, then:\n{again.render()}")
