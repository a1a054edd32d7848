"""Whether a run's files, its evaluation and its report on this machine belong together.

A model that was downloaded in the middle of a run, or an evaluation of an earlier checkpoint, is a
valid bundle, but rarely what a student means to submit.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.insight.run_report import INPUTS_COMMENT, fingerprint_inputs
from labctl.model import Run
from labctl.runs import outputs, runs
from labctl.runs.evaluate import evaluate, evaluate_on_server
from labctl.runs.evaluation import FILE as EVALUATION
from labctl.runs.evaluation import Evaluation, read_evaluation
from labctl.runs.evaluation_script import can_evaluate_here
from labctl.servers.context import LabContext
from labctl.submissions.assignment import Assignment
from labctl.submissions.run_files import CHECKPOINTS, LOGS, REPORT
from labctl.sync.local_results import RECORD, read_pulled_run
from labctl.sync.scan import hash_file
from labctl.text import names_text
from labctl.wire.checkpoints import fingerprint_checkpoints

MOST_NAMED = 3


class _Arrival(NamedTuple):
    """The newest file in a directory: the name below it that leads there, and its time here."""

    name: str
    at: float


class RunOnServer(NamedTuple):
    """A run's state, and its whole checkpoints that are on its server but not on this machine."""

    run: Run
    new_checkpoints: tuple[str, ...] = ()


def inspect_run(context: LabContext, run: Run, *, needs_model: bool = False) -> RunOnServer:
    """Ask the server of an unfinished run for its state and its checkpoints.

    With `needs_model`, also ask that of an ended run without a checkpoint on this machine: `labctl
    explain` downloads only its logs. Returns the last known state if no server answers.
    """
    has_checkpoints = (context.config.root / "runs" / run.id / CHECKPOINTS).is_dir()
    if run.has_ended and (has_checkpoints or not needs_model):
        return RunOnServer(run)
    try:
        server = context.get_server()
        if server.id != run.server_id:
            return RunOnServer(run)
        runs.refresh(context, server)
        current = context.state.get_run(context.lab_id, run.id) or run
        return RunOnServer(current, outputs.list_new_checkpoints(context, server, run.id))
    except NotFoundError:
        return RunOnServer(run)
    except LabError as error:
        if run.has_ended:
            return RunOnServer(run)
        text = f"cannot ask the server whether run {run.id} has ended: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
        return RunOnServer(run)


def has_final_files(run: Run, home: Path) -> bool:
    """Whether the files in `home` were downloaded after the run had ended."""
    pulled = read_pulled_run(home / RECORD)
    if not run.has_ended or pulled is None or not pulled.has_ended:
        return False
    return (pulled.ended_at or 0.0) >= (run.ended_at or 0.0)


def find_stale_results(on_server: RunOnServer, home: Path, checkpoint: str) -> tuple[str, ...]:
    """Say which results in `home` are older than others, in one sentence each.

    `checkpoint` is the one to submit, "" for all of them.
    """
    return (
        *_compare_files(on_server, home),
        *_compare_evaluation(home, checkpoint),
        *_compare_report(home),
    )


def renew_evaluation(context: LabContext, rules: Assignment, run_id: str, checkpoint: str) -> None:
    """Evaluate the run, or one of its checkpoints: on this machine if PyTorch is here.

    A lab without evaluate.py is only an error if the assignment requires an evaluation.
    """
    has_script = (context.config.root / "evaluate.py").is_file()
    if not has_script and "evaluation" not in rules.require:
        text = "this lab has no evaluate.py: the submission has no new evaluation"
        context.reporter.emit(Note(text=text))
        return
    folder = context.config.root / "runs" / run_id / CHECKPOINTS / checkpoint
    which = f"{run_id}/{CHECKPOINTS}/{checkpoint}" if checkpoint and folder.is_dir() else run_id
    if (
        can_evaluate_here(context.config.root)
        or context.state.get_lab_server(context.lab_id) is None
    ):
        evaluate(context, which)
    else:
        evaluate_on_server(context, which)


def _compare_files(on_server: RunOnServer, home: Path) -> Iterator[str]:
    """Compare the downloaded files with the end of the run and the server's checkpoints."""
    run, record = on_server.run, home / RECORD
    if run.has_ended and record.is_file() and not has_final_files(run, home):
        at = _time_text(record.stat().st_mtime)
        yield f"the files on this machine ({at}) were downloaded before run {run.id} ended"
    if on_server.new_checkpoints:
        names = names_text(on_server.new_checkpoints[::-1], MOST_NAMED)
        yield f"the server has checkpoints that are not on this machine: {names}"


def _compare_evaluation(home: Path, checkpoint: str) -> Iterator[str]:
    path = home / EVALUATION
    try:
        evaluation = read_evaluation(path)
    except LabError:
        return
    at = evaluation.at or path.stat().st_mtime
    newest = _find_newest(home / CHECKPOINTS, leave_out=_list_evaluated(home, evaluation))
    if newest.at > at:
        yield (
            f"the evaluation ({_time_text(at)}) is older than the checkpoint {newest.name} "
            f"(downloaded {_time_text(newest.at)})"
        )
    name = evaluation.checkpoint
    if checkpoint and name and name != checkpoint and (home / CHECKPOINTS / name).exists():
        yield f"the evaluation is of the checkpoint {name}, but {checkpoint} would be submitted"


def _list_evaluated(home: Path, evaluation: Evaluation) -> set[str]:
    """List the checkpoints that are as the evaluation found them, whenever they came here.

    The server's are evaluated before a pull, and a copy of the project has new times.
    """
    current = fingerprint_checkpoints(home / CHECKPOINTS)
    recorded = evaluation.checkpoint_fingerprints
    same = {name for name, value in current.items() if recorded.get(name) == value}
    if evaluation.checkpoint_sha256 and evaluation.checkpoint in current.keys() - same:
        own = home / CHECKPOINTS / evaluation.checkpoint
        files = [own, *own.rglob("*")]
        hashes = (hash_file(file) for file in files if file.is_file() and not file.is_symlink())
        if evaluation.checkpoint_sha256 in hashes:
            same.add(evaluation.checkpoint)
    return same


def _compare_report(home: Path) -> Iterator[str]:
    path = home / REPORT
    if not path.is_file() or _is_written_from(path, home):
        return
    written_at = path.stat().st_mtime
    evaluation, newest = home / EVALUATION, _find_newest(home / CHECKPOINTS)
    others = (
        ("the evaluation", evaluation.stat().st_mtime if evaluation.is_file() else 0.0),
        (f"the checkpoint {newest.name}", newest.at),
        ("the downloaded logs", _find_newest(home / LOGS).at),
    )
    for what, at in others:
        if at > written_at:
            yield f"the report ({_time_text(written_at)}) is older than {what} ({_time_text(at)})"
            return


def _is_written_from(report: Path, home: Path) -> bool:
    """Whether the report says that it was written from the files that are here now."""
    comment = INPUTS_COMMENT.format(fingerprint_inputs(home)).encode()
    with report.open("rb") as file:
        file.seek(max(0, report.stat().st_size - 2 * len(comment)))
        return comment in file.read()


def _find_newest(folder: Path, leave_out: Collection[str] = ()) -> _Arrival:
    """Find the file that arrived last; an empty name and time 0 without files.

    `leave_out` are names at the top of `folder`. A download keeps the server's time of
    modification, so the time of the last status change says when a file came to this machine.
    """
    newest = _Arrival("", 0.0)
    for place, _, names in os.walk(folder):
        for name in names:
            path = Path(place) / name
            top, arrived_at = path.relative_to(folder).parts[0], path.lstat().st_ctime
            if arrived_at > newest.at and top not in leave_out:
                newest = _Arrival(top, arrived_at)
    return newest


def _time_text(at: float) -> str:
    """Write a time of this machine's clock; seconds tell apart what happened in one minute."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(at))
