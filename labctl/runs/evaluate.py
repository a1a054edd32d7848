"""Evaluate a checkpoint with the lab's own evaluate.py: here, or in a sandbox on the server.

The result is stored in the run's directory: `evaluation.json` (from here, or from the server if
the checkpoint was not evaluated here) and `evaluation-on-server.json`.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from labctl.errors import LabError, NotFoundError, UsageError
from labctl.events import Note, Step
from labctl.model import NAME_PATTERN, Run, Value
from labctl.runs import images, outputs, runs
from labctl.runs.checkpointed_runs import suggest_other_run
from labctl.runs.evaluation import FILE, Evaluation, parse_evaluation, read_evaluation
from labctl.runs.evaluation_script import (
    SCRIPT,
    ScriptResult,
    make_evaluation,
    make_server_error,
    parse_last_line,
    run_script,
)
from labctl.runs.missing_model import (
    make_ended_server_error,
    make_no_local_checkpoints_error,
    make_no_script_error,
    make_no_server_checkpoints_error,
    make_not_pulled_error,
)
from labctl.runs.pickle_check import refuse_pickles
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_container_gpus_option
from labctl.shell import command
from labctl.text import duration_text
from labctl.wire.checkpoints import fingerprint_checkpoints
from labctl.wire.containment import is_inside
from labctl.wire.sandbox import EVALUATE, EvaluateReply, EvaluateRequest

ON_SERVER = "evaluation-on-server.json"
CHECKPOINTS = "checkpoints"
# Seconds added to the evaluation's own limit, for the connection.
LINK_S = 60.0
SAME = 1e-9
THERE_LIMIT_S = 3600


class EvaluationTarget(Value, frozen=True):
    """What to evaluate. `path`, in the run's directory, is "checkpoints" or one of them."""

    run: Run
    path: str
    directory: Path


class EvaluationResult(Value, frozen=True):
    """The result of an evaluation. Accuracies are from 0 to 1, None if not measured.

    `same` is whether both were measured and agree to the last item. `evaluation` holds the details
    of the newer one; None if evaluate.py reported only its accuracy.
    """

    run: str
    checkpoint: str
    accuracy_local: float | None
    accuracy_server: float | None
    total: int
    same: bool
    evaluation: Evaluation | None = None
    file: str = ""


def resolve_target(context: LabContext, which: str) -> EvaluationTarget:
    """Resolve `which`: "" (the latest run), a run, a checkpoint of the latest run, or a path.

    UsageError for a path outside of the lab's runs; NotFoundError if nothing here has that name.
    """
    runs_dir = (context.config.root / "runs").resolve()
    if not which or (
        NAME_PATTERN.fullmatch(which) and context.state.get_run(context.lab_id, which)
    ):
        run = runs.find_run(context, which)
        return EvaluationTarget(run=run, path=CHECKPOINTS, directory=runs_dir / run.id)
    for base in (Path.cwd(), context.config.root, runs_dir):
        path = (base / which).resolve()
        if path.is_dir() and path != runs_dir:
            if not path.is_relative_to(runs_dir):
                continue
            run_id, *inner = path.relative_to(runs_dir).parts
            run = runs.find_run(context, run_id)
            return EvaluationTarget(
                run=run, path="/".join(inner) or CHECKPOINTS, directory=runs_dir / run_id
            )
    latest = runs.find_run(context)
    if (runs_dir / latest.id / "checkpoints" / which).is_dir() and "/" not in which:
        return EvaluationTarget(
            run=latest, path=f"checkpoints/{which}", directory=runs_dir / latest.id
        )
    if Path(which).is_dir():
        raise UsageError(
            f"{which} is not in this lab's runs directory",
            why="labctl stores its result in the directory of the run that wrote the checkpoint",
            hint=f"python evaluate.py {which}",
        )
    near = runs.find_similar_name(context, which)
    question = f"; did you mean {near}?" if near else ""
    raise NotFoundError(
        f"no run or checkpoint called {which} on this machine{question}",
        typed=which,
        near=near,
        why=_list_checkpoints(runs_dir / latest.id),
        hint="labctl status\nlabctl pull",
    )


def _has_more_checkpoints_on_server(context: LabContext, run: Run) -> bool:
    """Whether the run's server has checkpoints that this machine lacks, as after `explain`."""
    server = context.state.get_server(run.server_id)
    if server is None or server.state == "stopped":
        return False
    try:
        return bool(outputs.list_new_checkpoints(context, server, run.id))
    except LabError:
        return False


def _list_checkpoints(run: Path) -> str:
    names = sorted(p.name for p in run.glob("checkpoints/*") if p.is_dir())
    return f"checkpoints of {run.name}: {', '.join(names[-5:])}" if names else ""


def evaluate(context: LabContext, which: str = "") -> EvaluationResult:
    """Run evaluate.py here on pulled checkpoints; LabError if a package or the script is missing.

    PolicyError if a checkpoint holds pickles. The script's last line must be a JSON object with
    accuracy and checkpoint; the file that it writes to LABCTL_EVALUATION is kept.
    """
    choice = resolve_target(context, which)
    path = choice.directory / choice.path
    has_server = context.state.get_server(choice.run.server_id) is not None
    if not (context.config.root / SCRIPT).is_file():
        raise make_no_script_error()
    if not _has_files(path):
        if _has_more_checkpoints_on_server(context, choice.run):
            raise make_not_pulled_error(choice.run)
        other = suggest_other_run(context, choice.run.id, "labctl", "eval", on_server=False)
        raise make_no_local_checkpoints_error(
            choice.run, choice.directory, other, has_server=has_server
        )
    on_server = command("labctl", "eval", "--on-server", *([which] if which else [])).render()
    sandboxed = f"{on_server}   # runs in a sandbox there, without network"
    refuse_pickles(
        path, hint=sandboxed if has_server else "labctl run   # after saving safetensors instead"
    )
    context.reporter.emit(Step(name="evaluating", detail=str(choice.path)))
    staging = choice.directory / f".{FILE}.{secrets.token_hex(4)}"
    fingerprints = fingerprint_checkpoints(choice.directory / CHECKPOINTS)
    try:
        script = run_script(context.config.root, path, staging, on_server)
        evaluation = None
        if staging.is_file():
            evaluation = _parse(staging.read_bytes(), "here", fingerprints)
    finally:
        staging.unlink(missing_ok=True)
    context.reporter.emit(Step(name="evaluating", done=True))
    if evaluation is None:
        _report_no_details(context)
    else:
        script = _summarize(evaluation)
    if kept := evaluation or make_evaluation(script, "here", fingerprints):
        _keep(choice.directory / FILE, kept)
    return _compare(
        choice.run.id,
        script,
        here=script.accuracy,
        server=read_server_accuracy(choice.directory, script.checkpoint),
        evaluation=evaluation,
        file=str(choice.directory / FILE) if evaluation else "",
    )


def evaluate_on_server(
    context: LabContext, which: str = "", *, time_limit_s: int = THERE_LIMIT_S
) -> EvaluationResult:
    """Evaluate on the server, with the run's own code and image; see agent/sandbox/evaluation.py.

    Works without a pull. If the run's code has no evaluate.py, the lab's is used. LabError with the
    last output if evaluate.py fails or reports no accuracy.
    """
    choice = resolve_target(context, which)
    reply = _call_server(context, choice, time_limit_s)
    if reply.used_program:
        text = f"the code of run {choice.run.id} has no {SCRIPT}: this lab's was used, "
        text += "with the run's other files"
        context.reporter.emit(Note(text=text))
    script = parse_last_line(reply.last_line)
    if reply.code != 0 or not (reply.evaluation or script):
        raise make_server_error(choice.run.id, choice.path, choice.directory, reply)
    evaluation = None
    if reply.evaluation:
        evaluation = _parse(
            msgspec.json.encode(reply.evaluation), "server", reply.checkpoint_fingerprints
        )
        script = _summarize(evaluation)
    else:
        _report_no_details(context)
    assert script is not None
    here = read_local_accuracy(choice.directory, script.checkpoint)
    if kept := evaluation or make_evaluation(script, "server", reply.checkpoint_fingerprints):
        choice.directory.mkdir(parents=True, exist_ok=True)
        _keep(choice.directory / ON_SERVER, kept)
        if here is None:
            _keep(choice.directory / FILE, kept)
    return _compare(
        choice.run.id,
        script,
        here=here,
        server=script.accuracy,
        evaluation=evaluation,
        file=str(choice.directory / ON_SERVER) if evaluation else "",
    )


def _call_server(context: LabContext, choice: EvaluationTarget, time_limit_s: int) -> EvaluateReply:
    """Run the evaluation there; NotFoundError if the run lacks a program or checkpoints."""
    server = context.get_server()
    request = EvaluateRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        run=choice.run.id,
        checkpoint=choice.path,
        gpus=choose_container_gpus_option(context, server),
        deadline_s=time_limit_s,
        program=read_own_script(context.config.root),
    )
    remote = context.open_agent(server)
    name = "evaluating on the server"
    context.reporter.emit(Step(name=name, detail=f"at most {duration_text(time_limit_s)}"))
    try:
        reply = remote.call(EVALUATE, request, timeout_s=time_limit_s + LINK_S)
    except NotFoundError as error:
        if choice.run.server_id == server.id:
            raise
        raise make_ended_server_error(choice.run) from error
    if reply.missing:
        images.ensure_image(context, server, remote, reply.missing, of_run=choice.run.id)
        reply = remote.call(EVALUATE, request, timeout_s=time_limit_s + LINK_S)
    context.reporter.emit(Step(name=name, done=True, brief=bool(reply.lacks)))
    if reply.lacks == "program":
        raise make_no_script_error()
    if reply.lacks:
        runs.refresh(context, server, remote)
        words = ("labctl", "eval", "--on-server")
        other = suggest_other_run(context, choice.run.id, *words, on_server=True)
        raise make_no_server_checkpoints_error(
            runs.find_run(context, choice.run.id), choice.directory, other
        )
    return reply


def read_own_script(root: Path) -> str:
    """Return the text of the lab's evaluate.py; "" without one.

    As with a push, a link out of the lab is not followed: it could send a private key.
    """
    script = root / SCRIPT
    if not script.is_file() or not is_inside(script, root):
        return ""
    return script.read_text(errors="replace")


def read_local_accuracy(directory: Path, checkpoint: str) -> float | None:
    """Return the checkpoint's accuracy as measured on this machine; None if it was not."""
    evaluation = _read(directory / FILE)
    if evaluation is None or evaluation.where != "here" or evaluation.checkpoint != checkpoint:
        return None
    return evaluation.accuracy


def read_server_accuracy(directory: Path, checkpoint: str) -> float | None:
    """Return the checkpoint's accuracy on the server: from eval --on-server, or from the run."""
    for path in (directory / ON_SERVER, directory / "logs" / FILE):
        evaluation = _read(path)
        if evaluation is not None and evaluation.checkpoint == checkpoint:
            return evaluation.accuracy
    metrics = _read_metrics(directory / "logs" / "metrics.json")
    return metrics.accuracy if metrics.checkpoint in (None, checkpoint) else None


def _compare(
    run: str,
    script: ScriptResult,
    *,
    here: float | None,
    server: float | None,
    evaluation: Evaluation | None,
    file: str,
) -> EvaluationResult:
    return EvaluationResult(
        run=run,
        checkpoint=script.checkpoint,
        accuracy_local=here,
        accuracy_server=server,
        total=script.total,
        same=here is not None and server is not None and abs(here - server) < SAME,
        evaluation=evaluation,
        file=file,
    )


def _summarize(evaluation: Evaluation) -> ScriptResult:
    return ScriptResult(evaluation.accuracy, evaluation.checkpoint, evaluation.items)


def _has_files(directory: Path) -> bool:
    """Whether a file is at any depth in `directory`."""
    return any(names for _, _, names in os.walk(directory))


def _parse(
    text: bytes, where: Literal["here", "server"], fingerprints: dict[str, str]
) -> Evaluation:
    evaluation = parse_evaluation(text, "the file that evaluate.py wrote")
    return msgspec.structs.replace(
        evaluation, where=where, at=time.time(), checkpoint_fingerprints=fingerprints
    )


def _keep(path: Path, evaluation: Evaluation) -> None:
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    staging.write_bytes(msgspec.json.encode(evaluation) + b"\n")
    staging.replace(path)


def _read(path: Path) -> Evaluation | None:
    try:
        return read_evaluation(path)
    except LabError:
        return None


def _report_no_details(context: LabContext) -> None:
    text = "evaluate.py reported only its accuracy: the report will show no classes or mistakes"
    context.reporter.emit(Note(text=text))


class _RunMetrics(NamedTuple):
    """The metrics that a run logged. `checkpoint` is None if they are not of a particular one."""

    accuracy: float | None = None
    checkpoint: str | None = None


def _read_metrics(path: Path) -> _RunMetrics:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return _RunMetrics()
    if not isinstance(body, dict):
        return _RunMetrics()
    accuracy = body.get("accuracy")
    try:
        number = float(accuracy) if isinstance(accuracy, int | float) else None
    except OverflowError:  # an integer of hundreds of digits
        number = None
    checkpoint = str(body["checkpoint"]) if "checkpoint" in body else None
    return _RunMetrics(number, checkpoint)
