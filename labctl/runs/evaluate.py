"""A checkpoint evaluated by the lab's own evaluate.py: here, or shut in on the server.

What comes of it is kept beside what was pulled: `evaluation.json` (here, or the server's where
nobody has evaluated it here) and `evaluation-on-server.json`.
"""

from __future__ import annotations

import importlib.util
import json
import secrets
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec

from labctl.config import environment
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.events import Note, Step
from labctl.model import NAME_PATTERN, Run, Value
from labctl.runs import images, runs
from labctl.runs.evaluation import FILE, Evaluation, parse_evaluation, read_evaluation
from labctl.runs.pickle_check import refuse_pickles
from labctl.servers.context import Ground
from labctl.servers.prepare import gpu_for

ON_SERVER = "evaluation-on-server.json"
# What the way there and back may take beside the evaluation itself.
LINK_S = 60.0
SAME = 1e-9
THERE_LIMIT_S = 3600


class Choice(Value, frozen=True):
    """What to evaluate: `path` is below the run's directory: "checkpoints", or one of them."""

    run: Run
    path: str
    directory: Path


class Evaluated(Value, frozen=True):
    """Accuracies are shares from 0 to 1, None where not measured for this checkpoint.

    `same` when both are there and agree to the last counted item. `evaluation` is all that is
    known of the newer one; None where evaluate.py told its accuracy alone.
    """

    run: str
    checkpoint: str
    accuracy_local: float | None
    accuracy_server: float | None
    total: int
    same: bool
    evaluation: Evaluation | None = None
    file: str = ""


def chosen(ground: Ground, which: str) -> Choice:
    """What `which` names: "" (the latest run), a run, a checkpoint of the latest, or a path.

    UsageError for a path outside of the lab's runs; NotFoundError for what is not here.
    """
    home = (ground.config.root / "runs").resolve()
    if not which or (NAME_PATTERN.fullmatch(which) and ground.state.run(ground.lab_id, which)):
        run = runs.latest(ground, which)
        return Choice(run=run, path="checkpoints", directory=home / run.id)
    for base in (Path.cwd(), ground.config.root, home):
        path = (base / which).resolve()
        if path.is_dir() and path != home:
            if not path.is_relative_to(home):
                continue
            run_id, *inner = path.relative_to(home).parts
            run = runs.latest(ground, run_id)
            return Choice(run=run, path="/".join(inner) or "checkpoints", directory=home / run_id)
    latest = runs.latest(ground)
    if (home / latest.id / "checkpoints" / which).is_dir() and "/" not in which:
        return Choice(run=latest, path=f"checkpoints/{which}", directory=home / latest.id)
    if Path(which).is_dir():
        raise UsageError(
            f"{which} is not among this lab's runs",
            why="eval keeps what it finds beside the run that made the checkpoint",
            hint=f"python evaluate.py {which}",
        )
    raise NotFoundError(
        f"there is no run and no checkpoint called {which} here",
        why=_known(home / latest.id),
        hint="labctl status, labctl pull",
    )


def _known(run: Path) -> str:
    names = sorted(p.name for p in run.glob("checkpoints/*") if p.is_dir())
    return f"checkpoints of {run.name}: {', '.join(names[-5:])}" if names else ""


def evaluate(ground: Ground, which: str = "") -> Evaluated:
    """Run evaluate.py here on what `pull` brought; LabError where torch or the script is missing.

    PolicyError where that holds pickles. The script's last line must be a JSON object with
    accuracy and checkpoint; what it writes to the file LABCTL_EVALUATION is kept.
    """
    choice = chosen(ground, which)
    place = choice.directory / choice.path
    if not place.is_dir():
        raise NotFoundError(f"run {choice.run.id} is not here", hint=f"labctl pull {choice.run.id}")
    if not (ground.config.root / "evaluate.py").is_file():
        raise NotFoundError(
            "this lab has no evaluate.py",
            why="eval runs `python evaluate.py CHECKPOINTS` in the lab's directory",
            hint="see the sample project: labctl init digits",
        )
    refuse_pickles(place, hint="labctl eval --on-server   # there it is shut in, without network")
    if importlib.util.find_spec("torch") is None:
        raise LabError(
            "PyTorch is not installed beside labctl",
            why=f"evaluate.py runs with {sys.executable}",
            hint="pip install 'labctl[train]'; or labctl eval --on-server",
        )
    ground.reporter.emit(Step(name="evaluating"))
    staging = choice.directory / f".{FILE}.{secrets.token_hex(4)}"
    try:
        said = _run_here(ground.config.root, place, staging)
        found = _parsed(staging.read_bytes(), "here") if staging.is_file() else None
    finally:
        staging.unlink(missing_ok=True)
    ground.reporter.emit(Step(name="evaluating", done=True))
    if found is None:
        _tell_plain(ground)
    else:
        _keep(choice.directory / FILE, found)
    checkpoint = found.checkpoint if found else str(said.get("checkpoint", ""))
    return _compared(
        choice.run.id,
        checkpoint,
        here=found.accuracy if found else float(said["accuracy"]),
        server=accuracy_on_server(choice.directory, checkpoint),
        total=found.items if found else int(said.get("total", 0)),
        evaluation=found,
        file=str(choice.directory / FILE) if found else "",
    )


def evaluate_there(
    ground: Ground, which: str = "", *, time_limit_s: int = THERE_LIMIT_S
) -> Evaluated:
    """The same on the server, with the run's own code and image; see agent/sandbox/evaluation.py.

    Nothing need be pulled. LabError with its last words where evaluate.py fails or writes no
    evaluation.
    """
    choice = chosen(ground, which)
    server = ground.server()
    request = {
        "lab": ground.config.name,
        "lab_id": ground.lab_id,
        "run": choice.run.id,
        "checkpoint": choice.path,
        "gpus": gpu_for(ground.config.server.need, ground.facts(server), None),
        "deadline_s": time_limit_s,
    }
    remote = ground.remote(server)
    name = "evaluating on the server"
    ground.reporter.emit(Step(name=name))
    reply = remote.call("evaluate", request, timeout_s=time_limit_s + LINK_S)
    if "missing" in reply:
        images.ensure(ground, server, remote, reply["missing"], of_run=choice.run.id)
        reply = remote.call("evaluate", request, timeout_s=time_limit_s + LINK_S)
    ground.reporter.emit(Step(name=name, done=True))
    if reply.get("code") != 0 or not reply.get("evaluation"):
        raise _failed_there(choice.run.id, reply)
    found = _parsed(msgspec.json.encode(reply["evaluation"]), "server")
    choice.directory.mkdir(parents=True, exist_ok=True)
    _keep(choice.directory / ON_SERVER, found)
    here = accuracy_here(choice.directory, found.checkpoint)
    if here is None:
        _keep(choice.directory / FILE, found)
    return _compared(
        choice.run.id,
        found.checkpoint,
        here=here,
        server=found.accuracy,
        total=found.items,
        evaluation=found,
        file=str(choice.directory / ON_SERVER),
    )


def accuracy_here(directory: Path, checkpoint: str) -> float | None:
    """What evaluating this checkpoint on this machine came to; None where nobody has."""
    found = _read(directory / FILE)
    mine = found is not None and found.where == "here" and found.checkpoint == checkpoint
    return found.accuracy if found and mine else None


def accuracy_on_server(directory: Path, checkpoint: str) -> float | None:
    """What the server came to for this checkpoint: asked with --on-server, or told by the run."""
    for path in (directory / ON_SERVER, directory / "logs" / FILE):
        found = _read(path)
        if found is not None and found.checkpoint == checkpoint:
            return found.accuracy
    told = _figures(directory / "logs" / "metrics.json")
    if str(told.get("checkpoint", checkpoint)) != checkpoint:
        return None
    accuracy = told.get("accuracy")
    return float(accuracy) if isinstance(accuracy, int | float) else None


def _compared(
    run: str,
    checkpoint: str,
    *,
    here: float | None,
    server: float | None,
    total: int,
    evaluation: Evaluation | None,
    file: str,
) -> Evaluated:
    return Evaluated(
        run=run,
        checkpoint=checkpoint,
        accuracy_local=here,
        accuracy_server=server,
        total=total,
        same=here is not None and server is not None and abs(here - server) < SAME,
        evaluation=evaluation,
        file=file,
    )


def _parsed(text: bytes, where: Literal["here", "server"]) -> Evaluation:
    found = parse_evaluation(text, "what evaluate.py wrote")
    return msgspec.structs.replace(found, where=where, at=time.time())


def _keep(path: Path, found: Evaluation) -> None:
    staging = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    staging.write_bytes(msgspec.json.encode(found) + b"\n")
    staging.replace(path)


def _read(path: Path) -> Evaluation | None:
    try:
        return read_evaluation(path)
    except LabError:
        return None


def _run_here(root: Path, place: Path, out: Path) -> dict[str, Any]:
    """The object on evaluate.py's last line."""
    done = subprocess.run(
        [sys.executable, "evaluate.py", str(place)],
        cwd=root,
        env={**environment(), "LABCTL_EVALUATION": str(out)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    lines = done.stdout.strip().splitlines()
    try:
        body = json.loads(lines[-1])
        float(body["accuracy"])
    except (IndexError, ValueError, KeyError, TypeError):
        said = (done.stderr or done.stdout).strip()[-1500:]
        raise LabError(
            f"evaluate.py ended with {done.returncode}",
            why=said,
            hint="mend evaluate.py, then: labctl eval",
        ) from None
    result: dict[str, Any] = body
    return result


def _tell_plain(ground: Ground) -> None:
    text = "evaluate.py told its accuracy alone: a report will have no classes and no mistakes"
    ground.reporter.emit(Note(text=text))


def _failed_there(run_id: str, reply: dict[str, Any]) -> LabError:
    said = str(reply.get("said", "")).strip()[-1500:]
    if reply.get("code") == 0:
        return LabError(
            "evaluate.py wrote no evaluation on the server",
            why=f"it writes to the file that LABCTL_EVALUATION names\n{said}",
            hint="see the sample project: labctl init digits",
        )
    return LabError(
        f"evaluate.py ended with {reply.get('code')} on the server",
        why=said,
        hint=f"labctl eval {run_id}   # here",
    )


def _figures(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
