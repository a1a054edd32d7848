"""An evaluation on the server: the run's own evaluate.py over its checkpoints, shut in.

A checkpoint may be a pickle, which runs code when it is loaded. So the container sees the run, its
code and the data read-only, no network, no secrets and no capability; all that it can write to is
a directory of its own, which is removed afterwards, and a small /tmp.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path
from typing import Any

from ..host import engine
from ..host.docker import docker
from ..host.paths import drop_tree, inside, lab_dir, read_json
from ..reply import Failure
from ..runs.containers import lab_body, limits, mount, run_env
from ..runs.run_state import existing, last_attempt

PROGRAM = "evaluate.py"
OUT = "evaluation.json"
THERE = "/lab/evaluation"
LONGEST_S = 3600.0
LARGEST_BYTES = 32 * 1024 * 1024
SAID_LINES = "60"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0
PYTHON = 'command -v python >/dev/null && exec python "$@"; exec python3 "$@"'


def evaluate(request: dict[str, Any]) -> dict[str, Any]:
    """Evaluate "checkpoint" (a path below the run; all of its checkpoints where "").

    Replies {"code", "said": its last lines, "evaluation": what it wrote or null}, or {"missing":
    image}. Raises after "deadline_s" seconds. Two at once of one run go one after the other.
    """
    directory = existing(request)
    spec = read_json(directory / ".labctl" / "spec.json")
    if not (directory / "code" / PROGRAM).is_file():
        said = f"the code of run {directory.name} has no {PROGRAM}"
        raise Failure("missing", said, "an evaluation runs it in the run's own code")
    checkpoint = request.get("checkpoint") or "checkpoints"
    if not inside(directory, checkpoint).is_dir():
        raise Failure("missing", f"run {directory.name} has no {checkpoint} on this server")
    own = last_attempt(directory).get("image_id", "")
    found = (engine.image(own) if own else None) or engine.image(spec["image"])
    if found is None:
        return {"missing": spec["image"]}
    with (directory / ".labctl" / "evaluation.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _evaluated(request, directory, spec, found, checkpoint)


def container_of(root: Path, run: str) -> str:
    return f"{root.name}-eval-{run}"


def _evaluated(
    request: dict[str, Any],
    directory: Path,
    spec: dict[str, Any],
    found: dict[str, Any],
    checkpoint: str,
) -> dict[str, Any]:
    root = lab_dir(request["lab"], request["lab_id"])
    name = container_of(root, directory.name)
    place = directory / ".labctl" / f"evaluation-{os.urandom(4).hex()}"
    place.mkdir()
    engine.remove(name)  # what a call that was killed left behind
    try:
        spec = {**spec, "gpus": request.get("gpus", "")}
        engine.create(name, body(root, directory, spec, found, checkpoint, place))
        engine.start(name)
        code = _ended(name, float(request.get("deadline_s") or LONGEST_S))
        done = docker("logs", "--tail", SAID_LINES, name, check=False)
        return {
            "code": code,
            "said": (done.stdout + done.stderr)[-6000:],
            "evaluation": _written(place / OUT),
        }
    finally:
        engine.remove(name)
        drop_tree(place)


def body(
    root: Path,
    directory: Path,
    spec: dict[str, Any],
    found: dict[str, Any],
    checkpoint: str,
    place: Path,
) -> dict[str, Any]:
    """The container, as the engine's `create` takes it."""
    mounts = [
        mount(directory / "code", "/lab/code", read_only=True),
        mount(directory, "/lab/run", read_only=True),
        mount(place, THERE),
    ]
    # Programs that keep something at home find a place that is forgotten.
    env = {**run_env(spec), **spec["env"], "HOME": "/tmp", "LABCTL_EVALUATION": f"{THERE}/{OUT}"}
    labels = {"labctl.runs.evaluation": spec["id"]}
    made = lab_body(root, spec, found, mounts, env, labels)
    for one in made["HostConfig"]["Mounts"]:
        one["ReadOnly"] = one["Target"] != THERE
    made["HostConfig"].update(limits(spec))
    made["HostConfig"].update(
        NetworkMode="none", CapDrop=["ALL"], ReadonlyRootfs=True, Tmpfs={"/tmp": "mode=1777"}
    )
    words = ["/bin/sh", "-c", PYTHON, "evaluate", PROGRAM, f"/lab/run/{checkpoint}"]
    if (found.get("Config") or {}).get("Entrypoint"):
        made["Cmd"] = words
    else:
        made["Entrypoint"], made["Cmd"] = words[:1], words[1:]
    return made


def _ended(name: str, deadline_s: float) -> int:
    """The container's exit code, once it has one."""
    deadline, pause_s = time.monotonic() + deadline_s, FIRST_PAUSE_S
    while True:
        seen = engine.inspect([name]).get(name)
        if seen is None:
            raise Failure("docker", "the evaluation's container was removed from outside")
        if not seen["State"]["Running"]:
            return int(seen["State"]["ExitCode"])
        if time.monotonic() > deadline:
            said = f"the evaluation was not done after {deadline_s:g} s"
            raise Failure("docker", said, "it was ended", "labctl eval --on-server --time-limit 4h")
        time.sleep(pause_s)
        pause_s = min(LONGEST_PAUSE_S, pause_s * 2)


def _written(path: Path) -> Any:
    """What the program wrote; None where that is no JSON. It may have put a link there."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        text = file.read(LARGEST_BYTES + 1)
    if len(text) > LARGEST_BYTES:
        raise Failure("usage", f"{PROGRAM} wrote more than {LARGEST_BYTES >> 20} MiB")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
