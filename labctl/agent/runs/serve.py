"""A trained model as a service: what its container sees, and how little it may do there."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ..host.paths import checked_name, drop_tree, inside, run_dir, write_text
from ..reply import Failure
from .containers import limits, mount

NAME = "serve"
PORT = 8000
PACKAGE = "labctl_model_server"
# As known_services.KNOWN has it.
KNOWN = {
    "script": f"exec python3 -m {PACKAGE}.services.model_server",
    "port": PORT,
    "path": "/",
    "test": "python3 -c 'import fastapi, uvicorn, multipart, prometheus_client, PIL'",
}
# How the server program ends where a checkpoint or a setting is refused; its words say why.
REFUSED = 3
APP, RUN = "/lab/app", "/lab/run"
# The model's container writes nothing but its cache: a stranger's bytes end up in it.
LOCKED: dict[str, Any] = {
    "ReadonlyRootfs": True,
    "CapDrop": ["ALL"],
    "PidsLimit": 1024,
    "Tmpfs": {"/tmp": "size=1g"},
}


def wish(request: dict[str, Any]) -> list[Any]:
    """What makes one model's service differ from another's; [] for other services."""
    model = request.get("model")
    return [model, request.get("env", {}), _digest(request["app"])] if model else []


def mounts(root: Path, request: dict[str, Any]) -> list[dict[str, Any]]:
    """The project's code, the checkpoints and labctl's server program, all read-only.

    Failure (missing) where the run, its checkpoint or the project's predict.py is not there.
    """
    code, checkpoints = _code(root, request["model"]), _checkpoints(root, request["model"])
    return [
        mount(code, "/lab/code", read_only=True),
        mount(checkpoints, f"{RUN}/checkpoints", read_only=True),
        mount(_app(root, request["app"]), APP, read_only=True),
    ]


def env(request: dict[str, Any]) -> dict[str, str]:
    model = request["model"]
    chosen = f"/{model['checkpoint']}" if model["checkpoint"] else ""
    return {
        "PYTHONPATH": APP,
        "PROMETHEUS_DISABLE_CREATED_SERIES": "True",
        "LABCTL_RUN_ID": model["run"],
        "LABCTL_RUN_DIR": RUN,
        "LABCTL_CHECKPOINT_DIR": f"{RUN}/checkpoints",
        "LABCTL_SERVE_CHECKPOINTS": f"{RUN}/checkpoints{chosen}",
        "LABCTL_SERVE_HOST": "0.0.0.0",
        "LABCTL_SERVE_PORT": str(PORT),
    }


def host_config(request: dict[str, Any]) -> dict[str, Any]:
    """What goes over the `HostConfig` of any service of the lab."""
    return {**LOCKED, **limits(request)}


def failure(code: int | None, words: str) -> Failure:
    """Why a server that has ended did so, from its exit code and its last words."""
    if code == REFUSED:
        why = words.rpartition("refused: ")[2]
        return Failure("policy", "the model is refused", why, "labctl serve --checkpoint NAME")
    return Failure("service", "the model cannot be served", words, "labctl serve --push")


def _code(root: Path, model: dict[str, Any]) -> Path:
    run = model["run"]
    code = run_dir(root, run) / "code" if model["code"] == "run" else root / "code"
    if not (code / "predict.py").is_file():
        whose = f"the code of run {run}" if model["code"] == "run" else "the lab's code"
        hint = "labctl serve --push" if model["code"] == "run" else "labctl init example"
        why = "it says how the model is loaded (docs/serve.md); the sample project has one"
        raise Failure("missing", f"{whose} has no predict.py", why, hint)
    return code


def _checkpoints(root: Path, model: dict[str, Any]) -> Path:
    run = checked_name(model["run"])
    pushed = model["where"] == "here"
    home = root / "models" / run if pushed else run_dir(root, run) / "checkpoints"
    if not home.is_dir():
        said = f"run {run} has no checkpoints on this server"
        raise Failure("missing", said, "", "labctl status --refresh")
    if model["checkpoint"] and not inside(home, model["checkpoint"]).exists():
        there = ", ".join(sorted(one.name for one in home.iterdir() if one.name[0] != "."))
        said = f"run {run} has no checkpoint {model['checkpoint']!r}"
        raise Failure("missing", said, f"there are: {there or 'none'}", "labctl serve")
    return home


def _digest(files: dict[str, str]) -> str:
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _app(root: Path, files: dict[str, str]) -> Path:
    """A directory with labctl's server program, made once for each version of it."""
    home = root / ".labctl" / f"serving-{_digest(files)}"
    if home.is_dir():
        return home
    staging = home.with_name(f".{home.name}.{os.urandom(4).hex()}")
    for name, text in files.items():
        place = inside(staging / PACKAGE, name)
        place.parent.mkdir(parents=True, exist_ok=True)
        write_text(place, text)
    try:
        staging.rename(home)
    except OSError:
        drop_tree(staging)
        if not home.is_dir():
            raise
    return home
