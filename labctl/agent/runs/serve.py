"""Serving a trained model: what its container sees, and how little it may do."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

from ...wire.codec import to_json
from ...wire.model_files import describe_saving
from ...wire.run_ids import AUXILIARY_PREFIXES
from ...wire.services import (
    NEEDS_CHECKPOINT,
    NEEDS_PREDICT,
    SAVE_CHECKPOINT,
    WRITE_PREDICT,
    ServedModel,
    ServiceRequest,
)
from ..host.engine_objects import Mount, NewHostConfig
from ..host.paths import drop_tree, require_name, resolve_inside, run_dir, write_text
from ..reply import Failure
from .containers import build_mount, restrict
from .misplaced_model import find_misplaced_model
from .records import read_claim
from .run_state import UNENDED, inspect_run

NAME = "serve"
PORT = 8000
PACKAGE = "labctl_model_server"
SCRIPT = f"exec python3 -m {PACKAGE}.services.model_server"
# Succeeds in an image that has the server program's dependencies.
TEST = "python3 -c 'import fastapi, uvicorn, multipart, prometheus_client, PIL'"
# exit code of the server program when it refuses a checkpoint or a setting; its output says why
REFUSED = 3
APP, RUN = "/lab/app", "/lab/run"
MOST_PROCESSES = 1024


def describe_model_settings(request: ServiceRequest) -> list[object]:
    """Return what distinguishes one model's service from another; [] for other services."""
    if request.model is None:
        return []
    return [to_json(request.model), request.env, _digest(request.app)]


def require_model(root: Path, model: ServedModel) -> None:
    """Failure (missing) if the run, its checkpoint or predict.py is not on this server.

    Call this before anything is built or installed for the model.
    """
    _find_checkpoints(root, model)
    _find_code(root, model)


def build_mounts(root: Path, model: ServedModel, app: dict[str, str]) -> list[Mount]:
    """Return read-only mounts of the project's code, the checkpoints and labctl's server program.

    `app` has the server program's files. Failure (missing) if the run, its checkpoint or the
    project's predict.py is not on this server.
    """
    checkpoints, code = _find_checkpoints(root, model), _find_code(root, model)
    return [
        build_mount(code, "/lab/code", read_only=True),
        build_mount(checkpoints, f"{RUN}/checkpoints", read_only=True),
        build_mount(_install_server(root, app), APP, read_only=True),
    ]


def build_env(model: ServedModel) -> dict[str, str]:
    subpath = f"/{model.checkpoint}" if model.checkpoint else ""
    return {
        "PYTHONPATH": APP,
        "PROMETHEUS_DISABLE_CREATED_SERIES": "True",
        "LABCTL_RUN_ID": model.run,
        "LABCTL_RUN_DIR": RUN,
        "LABCTL_CHECKPOINT_DIR": f"{RUN}/checkpoints",
        "LABCTL_SERVE_CHECKPOINTS": f"{RUN}/checkpoints{subpath}",
        "LABCTL_SERVE_HOST": "0.0.0.0",
        "LABCTL_SERVE_PORT": str(PORT),
    }


def lock_down(config: NewHostConfig) -> NewHostConfig:
    """Allow the container to write only to its cache: it processes bytes that strangers send."""
    return restrict(config, {"/tmp": "size=1g"}, pids=MOST_PROCESSES, has_network=True)


def explain_failure(code: int | None, output: str) -> Failure:
    """Explain from its exit code and output why a model server ended."""
    if code == REFUSED:
        # The container's log is all that is left of it; this begins its last message.
        why = output.rpartition("refused: ")[2]
        hint = "labctl serve --checkpoint NAME   # another one; or run again, and save safetensors"
        return Failure("policy", "the model server refused the model", why, hint)
    return Failure("service", "the model server stopped", output, "labctl serve --push")


def _find_code(root: Path, model: ServedModel) -> Path:
    run = model.run
    code = run_dir(root, run) / "code" if model.code == "run" else root / "code"
    if not (code / "predict.py").is_file():
        whose = f"the code of run {run}" if model.code == "run" else "the lab's code"
        raise Failure("missing", f"{whose} has no predict.py", NEEDS_PREDICT, WRITE_PREDICT)
    return code


def _find_checkpoints(root: Path, model: ServedModel) -> Path:
    run = require_name(model.run)
    is_pushed = model.where == "here"
    directory = root / "models" / run if is_pushed else run_dir(root, run) / "checkpoints"
    if not _has_checkpoints(directory):
        raise _make_no_checkpoints_failure(root, run)
    if model.checkpoint and not resolve_inside(directory, model.checkpoint).exists():
        available = ", ".join(
            sorted(entry.name for entry in directory.iterdir() if entry.name[0] != ".")
        )
        message = f"run {run} has no checkpoint {model.checkpoint!r}"
        raise Failure(
            "missing", message, f"available checkpoints: {available or 'none'}", "labctl serve"
        )
    return directory


def _has_checkpoints(directory: Path) -> bool:
    return directory.is_dir() and any(entry.name[0] != "." for entry in directory.iterdir())


def _make_no_checkpoints_failure(root: Path, run: str) -> Failure:
    """Return the failure for a run without checkpoints, with the latest run that has some.

    A run that has not ended may still save one. If an ended one wrote a model elsewhere, say where,
    and how its script saves the model instead.
    """
    message = f"run {run} has no checkpoints on this server"
    others = [
        directory.parent
        for directory in run_dir(root, run).parent.glob("*/checkpoints")
        if not directory.parent.name.startswith(AUXILIARY_PREFIXES) and _has_checkpoints(directory)
    ]
    other = ""
    if others:
        latest = max(others, key=lambda home: read_claim(home).created_at)
        other = f"labctl serve {latest.name}   # the latest run with checkpoints"
    directory = run_dir(root, run)
    if (directory / ".labctl").is_dir() and inspect_run(directory, {}).state in UNENDED:
        why = "it has not ended, and may save its first one later"
        follow = f"labctl logs -f {run}"
        return Failure("missing", message, why, f"{follow}\n{other}" if other else follow)
    model = find_misplaced_model(directory)
    if model is not None:
        why = f"{NEEDS_CHECKPOINT}; this run wrote {model.path} instead"
        saving = describe_saving(model.path, model.place)
        return Failure("missing", message, why, f"{other}\n{saving}" if other else saving)
    why = "" if others else f"no run on this server has any: {NEEDS_CHECKPOINT}"
    return Failure("missing", message, why, other or SAVE_CHECKPOINT)


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _install_server(root: Path, files: dict[str, str]) -> Path:
    """Return a directory with labctl's server program, made once for each version of it."""
    directory = root / ".labctl" / f"serving-{_digest(files)}"
    if directory.is_dir():
        return directory
    staging = directory.with_name(f".{directory.name}.{os.urandom(4).hex()}")
    for name, text in files.items():
        path = resolve_inside(staging / PACKAGE, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, text)
    try:
        staging.rename(directory)
    except OSError:
        drop_tree(staging)
        if not directory.is_dir():
            raise
    return directory
