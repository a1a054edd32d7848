"""Upload what runs logged offline for Weights & Biases, by wandb's own program on this machine."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from labctl.config import copy_environment, list_secret_names, read_secret
from labctl.config.installation import install_command
from labctl.config.tracking import WANDB_KEY
from labctl.errors import LabError, NotFoundError
from labctl.events import Step
from labctl.model import NAME_PATTERN, Value
from labctl.runs import runs
from labctl.servers.context import LabContext

# seconds that the upload of one run may take
UPLOAD_S = 3600
MOST_PARTS = 200
LOG_CHARACTERS = 1500


class TrackedRun(Value, frozen=True):
    """The offline parts of a run, one for each attempt, and how many were uploaded now."""

    run: str
    parts: int
    uploaded: int


def upload_runs(context: LabContext, run_ids: Sequence[str] = ()) -> tuple[TrackedRun, ...]:
    """Upload the pulled offline parts of these runs, by default of all; none is uploaded twice.

    NotFoundError if a named run has none, or if wandb is not installed; LabError if it fails.
    """
    directory = context.config.root / "runs"
    names = list(run_ids) or sorted(path.name for path in directory.glob("*") if path.is_dir())
    found = {name: _list_parts(_require_run(context, name, run_ids)) for name in names}
    for name in run_ids:
        if not found[name]:
            raise NotFoundError(
                f"run {name} has no offline files of Weights & Biases on this machine",
                why="a run writes them with `track: {wandb: offline}` in lab.yaml",
                hint=f"labctl pull {name}",
            )
    results = []
    for name, parts in found.items():
        pending = [part for part in parts if not _is_uploaded(part)]
        if pending:
            _upload(context, name, pending)
        if parts:
            results.append(TrackedRun(run=name, parts=len(parts), uploaded=len(pending)))
    return tuple(results)


def _require_run(context: LabContext, name: str, named: Sequence[str]) -> Path:
    if named and not NAME_PATTERN.fullmatch(name):
        raise NotFoundError(f"there is no run {name}", hint="labctl status --all")
    directory = context.config.root / "runs" / name
    if named and not directory.is_dir():
        runs.find_run(context, name)
        raise NotFoundError(
            f"run {name} was not pulled to this machine", hint=f"labctl pull {name}"
        )
    return directory


def _list_parts(run: Path) -> list[Path]:
    """List the directories of a run's offline parts, the oldest first; links are not followed."""
    folder = run / "logs" / "wandb"
    if folder.resolve() != run.resolve() / "logs" / "wandb":
        return []
    parts = sorted(folder.glob("offline-run-*"))
    return [part for part in parts if part.is_dir() and not part.is_symlink()][:MOST_PARTS]


def _is_uploaded(part: Path) -> bool:
    return any(part.glob("*.wandb.synced"))


def _find_program() -> list[str]:
    if importlib.util.find_spec("wandb"):
        return [sys.executable, "-m", "wandb"]
    if program := shutil.which("wandb"):
        return [program]
    raise NotFoundError(
        "wandb is not installed on this machine",
        why="its own program uploads the files",
        hint=install_command("wandb"),
    )


def _upload(context: LabContext, name: str, parts: Sequence[Path]) -> None:
    """Upload the parts of one run, which wandb puts together by their id."""
    step = f"uploading run {name} to Weights & Biases"
    environ = copy_environment()
    environ = {k: v for k, v in environ.items() if k not in ("WANDB_MODE", "WANDB_DIR")}
    if WANDB_KEY in list_secret_names(context.paths, context.lab_id):
        secret = read_secret(context.paths, context.lab_id, WANDB_KEY, environ)
        environ[WANDB_KEY] = secret.reveal()
    words = [*_find_program(), "sync", "--yes", *(str(part.resolve()) for part in parts)]
    context.reporter.emit(Step(name=step))
    # Elsewhere than in the lab: a file wandb/settings there could send the key to another host.
    with tempfile.TemporaryDirectory(prefix="labctl-wandb-") as folder:
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                timeout=UPLOAD_S,
            )
        except subprocess.TimeoutExpired:
            raise _make_error(name, f"it took more than {UPLOAD_S // 60} min") from None
    # wandb exits with 0 also when a host has refused the files; it marks those that it has sent.
    if done.returncode != 0 or not all(map(_is_uploaded, parts)):
        output = done.stdout.strip()
        if key := environ.get(WANDB_KEY):
            output = output.replace(key, "(hidden)")
        output = output[-LOG_CHARACTERS:]
        raise _make_error(name, output or f"wandb exited with {done.returncode}")
    context.reporter.emit(Step(name=step, done=True))


def _make_error(name: str, why: str) -> LabError:
    return LabError(
        f"run {name} was not uploaded to Weights & Biases",
        why=why,
        hint=f"labctl secret set {WANDB_KEY}   # your key, unless `wandb login` has stored it\n"
        f"labctl track sync {name}",
    )
