"""A submission graded in two containers: a stranger's that sees no label, then staff's that sees
no code of the stranger's.

    ~/labctl/<lab>/grading/<name>/      what was pushed: submissions, inputs, labels, the grader
    ~/labctl/<lab>/grading/.jobs/<job>  what came of a submission, until it is cleared

The account inside is nobody's, so that what is mounted is made readable for all, below a directory
that only this account may enter.
"""

from __future__ import annotations

import fcntl
import http.client
import os
import stat
from pathlib import Path
from typing import Any

from ...wire.boot_id import boot_token
from ..host import engine
from ..host.paths import CHUNK, checked_name, drop_tree, lab_dir, read_json, write_json, write_text
from ..reply import Failure
from ..runs.containers import mount
from . import sandbox

LABEL = "labctl.courses.grading"
LARGEST_PREDICTIONS = 64 * 1024 * 1024
LARGEST_RESULTS = 1024 * 1024
PREDICTIONS, RESULTS = "predictions", "results.json"
SCRIPTS = ("accuracy.py", "images.py")
# What must not lie at home where strangers' code runs.
KEYS = (
    ".aws/credentials", ".aws/sso/cache", ".config/gcloud", ".azure", ".kube/config", ".netrc",
    ".git-credentials", ".config/labctl/secrets", ".local/share/labctl/keys", ".docker/config.json",
    ".config/huggingface/token", ".cache/huggingface/token",
)  # fmt: skip
VARIABLES = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "GOOGLE_APPLICATION_CREDENTIALS")
METADATA = "169.254.169.254"
METADATA_S = 1.0
TOKEN = "X-aws-ec2-metadata-token"


def check(_: dict[str, Any]) -> dict[str, Any]:
    """{"machine": changes with machine and boot, "credentials": what was found, in words}."""
    found = [f"~/{name}" for name in KEYS if _holds_something(Path.home() / name)]
    found += [f"the variable {name}" for name in VARIABLES if os.environ.get(name)]
    found += _private_keys(Path.home() / ".ssh")
    role = _role()
    found += [f"the machine's own role, {role}"] if role else []
    return {"machine": boot_token(), "credentials": found}


def _holds_something(path: Path) -> bool:
    if path.name == "config.json":
        auths = read_json(path).get("auths")
        return bool(auths) or bool(read_json(path).get("credsStore"))
    try:
        return any(path.iterdir()) if path.is_dir() else path.stat().st_size > 0
    except OSError:
        return False


def _private_keys(folder: Path) -> list[str]:
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        try:
            with path.open("rb") as file:
                private = b"PRIVATE KEY-----" in file.read(64)
        except OSError:
            continue
        if private:
            found.append(f"~/.ssh/{path.name}")
    return found


def _role() -> str:
    """The role that a cloud machine hands out to whoever asks on it; "" where there is none."""
    try:
        token = _metadata("PUT", "/latest/api/token", {f"{TOKEN}-ttl-seconds": "60"})
        roles = _metadata("GET", "/latest/meta-data/iam/security-credentials/", {TOKEN: token})
    except (OSError, http.client.HTTPException):
        return ""
    return roles.split("\n")[0]


def _metadata(method: str, path: str, headers: dict[str, str]) -> str:
    link = http.client.HTTPConnection(METADATA, timeout=METADATA_S)
    try:
        link.request(method, path, headers=headers)
        reply = link.getresponse()
        return reply.read(4096).decode("latin-1") if reply.status == 200 else ""
    finally:
        link.close()


def grade(request: dict[str, Any]) -> dict[str, Any]:
    """Run one submission and judge what it says.

    "submission", "inputs", "labels" and "grader" name what was pushed ("" for none), "predict" and
    "grade" are the two commands, "limits" and "timeout_s" hold for each. Replies {"predict",
    "grade", "results": text or null}, or {"missing": image}. The same "job" again gives the same
    answer without running anything, until `clear`.
    """
    found = engine.image(request["image"])
    if found is None:
        return {"missing": request["image"]}
    top = _top(request)
    job = top / ".jobs" / checked_name(request["job"])
    job.mkdir(parents=True, exist_ok=True)
    with (job / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = read_json(job / "reply.json")
        if known:
            return known
        reply = _graded(request, top, job, found)
        if reply["grade"] is None or reply["grade"]["outcome"] == "ok":
            write_json(job / "reply.json", reply, mode=0o600)
        return reply


def clear(request: dict[str, Any]) -> dict[str, Any]:
    """Remove everything of this lab's grading: labels, submissions, containers."""
    top = _top(request)
    for name in sandbox.left(f"{LABEL}={request['lab_id']}"):
        engine.remove(name)
    drop_tree(top)
    lab = lab_dir(request["lab"], request["lab_id"])
    for path in (lab / ".labctl").glob(".*-grading-*"):
        drop_tree(path) if path.is_dir() else path.unlink()
    return {"cleared": not top.exists()}


def _top(request: dict[str, Any]) -> Path:
    top = lab_dir(request["lab"], request["lab_id"]) / "grading"
    top.mkdir(mode=0o700, exist_ok=True)
    top.chmod(0o700)
    return top


def _graded(request: dict[str, Any], top: Path, job: Path, found: dict[str, Any]) -> dict[str, Any]:
    told = _predicted(request, top, found)
    if told.outcome != "ok":
        return {"predict": told.told(), "grade": None, "results": None}
    place = job / PREDICTIONS
    try:
        _write(place, told.output)
        judged = _judged(request, top, place, found)
    finally:
        if place.exists():
            place.unlink()
    results = judged.output.decode("utf-8", "replace") if judged.outcome == "ok" else None
    return {"predict": told.told(), "grade": judged.told(), "results": results}


def _predicted(request: dict[str, Any], top: Path, found: dict[str, Any]) -> sandbox.Ended:
    """The stranger's container: their code and model, and the inputs."""
    own = _pushed(top, request["submission"])
    mounts = [_seen(own / part, f"/lab/{part}") for part in ("code", "model")]
    if request["inputs"]:
        mounts.append(_seen(_pushed(top, request["inputs"]), "/lab/inputs"))
    mounts.append(_seen(_scripts(top), "/lab/labctl"))
    env = {
        "LABCTL_INPUTS": "/lab/inputs",
        "LABCTL_MODEL": "/lab/model",
        "LABCTL_PREDICTIONS": f"{sandbox.OUT}/{PREDICTIONS}",
    }
    made = _container(request, found, request["predict"], PREDICTIONS, mounts, env)
    return _run(request, "predict", made, LARGEST_PREDICTIONS)


def _judged(
    request: dict[str, Any], top: Path, predictions: Path, found: dict[str, Any]
) -> sandbox.Ended:
    """Staff's container: the labels, their own code, and what the first one said. No more."""
    mounts = [mount(predictions, "/lab/predictions", read_only=True)]
    mounts.append(_seen(_pushed(top, request["grader"]), "/lab/code"))
    for part in ("inputs", "labels"):
        if request[part]:
            mounts.append(_seen(_pushed(top, request[part]), f"/lab/{part}"))
    mounts.append(_seen(_scripts(top), "/lab/labctl"))
    env = {
        "LABCTL_INPUTS": "/lab/inputs",
        "LABCTL_LABELS": "/lab/labels",
        "LABCTL_PREDICTIONS": "/lab/predictions",
        "LABCTL_RESULTS": f"{sandbox.OUT}/{RESULTS}",
        "LABCTL_POINTS": str(request["points"]),
    }
    made = _container(request, found, request["grade"], RESULTS, mounts, env)
    return _run(request, "grade", made, LARGEST_RESULTS)


def _container(
    request: dict[str, Any],
    found: dict[str, Any],
    command: list[str],
    output: str,
    mounts: list[dict[str, Any]],
    env: dict[str, str],
) -> dict[str, Any]:
    labels = {LABEL: request["lab_id"], "labctl.lab-id": request["lab_id"]}
    return sandbox.body(found, command, output, mounts, env, labels, request["limits"])


def _run(request: dict[str, Any], part: str, made: dict[str, Any], most: int) -> sandbox.Ended:
    name = f"labctl-{part}-{checked_name(request['job'])}"
    return sandbox.run(name, made, float(request["timeout_s"]), most)


def _pushed(top: Path, name: str) -> Path:
    path = top / checked_name(name)
    if not path.is_dir():
        raise Failure("missing", f"{name} is not on the grading server", hint="run it again")
    return path


def _seen(path: Path, target: str) -> dict[str, Any]:
    """A mount that nobody's account can read. What is not there is an empty directory."""
    path.mkdir(exist_ok=True)
    path.chmod(0o755)
    for folder, names, files in os.walk(str(path)):
        for name in names:
            _open_up(Path(folder, name), 0o755)
        for name in files:
            _open_up(Path(folder, name), 0o644)
    return mount(path, target, read_only=True)


def _open_up(path: Path, mode: int) -> None:
    found = path.lstat()
    if not stat.S_ISLNK(found.st_mode) and found.st_mode & mode != mode:
        path.chmod(found.st_mode | mode)


def _scripts(top: Path) -> Path:
    """labctl's own two programs for the containers, as files that they can read."""
    folder = top / ".labctl"
    folder.mkdir(exist_ok=True)
    for name in SCRIPTS:
        text = Path(__file__).with_name(f"grading_{name}").read_text(encoding="utf-8")
        place = folder / name
        if not place.exists() or place.read_text(encoding="utf-8") != text:
            write_text(place, text)
    return folder


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    with os.fdopen(descriptor, "wb") as file:
        for at in range(0, len(content), CHUNK):
            file.write(content[at : at + CHUNK])
    path.chmod(0o644)
