"""Runs: claim, launch, look, cancel. Truth is the run directory, labels and `docker inspect`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import pkgutil
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from . import secrets_tmpfs
from .docker import docker, image, inspect, mount, passwd_file, tmux
from .looks import UNENDED, existing, final, last_attempt, look
from .place import boot_token, home, inside, lab_dir, read_json, run_dir, write_json, write_text
from .reply import Failure

HOME_ENV = {
    "HOME": "/lab/cache/home",
    "USER": "lab",
    "PYTHONUNBUFFERED": "1",
    "HF_HOME": "/lab/cache/huggingface",
    "TORCH_HOME": "/lab/cache/torch",
    "PIP_CACHE_DIR": "/lab/cache/pip",
    "LABCTL_CACHE_DIR": "/lab/cache",
}
BEST_SHELL = "command -v bash >/dev/null && exec bash; exec sh"


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Claim and launch a run, or find the one that the same request made before.

    Replies {"missing": image} without claiming anything when the image is not here.
    """
    spec = request["spec"]
    root = lab_dir(spec["lab"], spec["lab_id"])
    directory = run_dir(root, spec["id"])
    found = image(spec["image"]) if not directory.exists() else None
    if found is None and not directory.exists():
        return {"missing": spec["image"]}
    again = not _claim(root, directory, spec)
    with _launching(directory):
        return _started(request, root, directory, found, again)


@contextmanager
def _launching(directory: Path) -> Iterator[None]:
    """Calls that claim the same run at once go one after another; the later ones find it.

    The lock ends with this process: no child inherits it.
    """
    try:
        file = (directory / ".labctl" / "claim.json").open("r+")
    except FileNotFoundError:
        raise _failed_elsewhere(directory) from None
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        if not directory.exists():
            raise _failed_elsewhere(directory)
        yield


def _failed_elsewhere(directory: Path) -> Failure:
    said = f"run {directory.name} was being started by another call, which failed"
    return Failure("docker", said, hint=f"labctl run --id {directory.name}")


def _started(
    request: dict[str, Any],
    root: Path,
    directory: Path,
    found: dict[str, Any] | None,
    again: bool,
) -> dict[str, Any]:
    spec = request["spec"]
    state = look(directory, {})
    if again and state["state"] != "claimed":
        return {"run": state, "found": True, "directory": str(directory)}
    found = found or image(spec["image"])
    if found is None:
        return {"missing": spec["image"]}
    try:
        _launch(root, directory, spec, found, request.get("secrets", {}))
    except Failure:
        if not again:
            shutil.rmtree(directory, ignore_errors=True)
        secrets_tmpfs.drop(spec["id"])
        raise
    return {"run": look(directory, {}), "found": again, "directory": str(directory)}


def _claim(root: Path, directory: Path, spec: dict[str, Any]) -> bool:
    """True when this call made the run directory; the rename is atomic and carries the hash."""
    text = json.dumps(spec, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.parent / f".{spec['id']}.{secrets.token_hex(4)}"
    (fresh / ".labctl").mkdir(parents=True)
    write_text(fresh / ".labctl" / "spec.json", text)
    write_json(fresh / ".labctl" / "claim.json", {"hash": digest, "created_at": time.time()})
    try:
        fresh.rename(directory)
        return True
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if read_json(directory / ".labctl" / "claim.json").get("hash") != digest:
            raise Failure(
                "policy",
                f"there is another run {spec['id']} on this server",
                "its command, image or settings differ",
                "labctl run --id ANOTHER-NAME",
            ) from None
        return False


def _launch(
    root: Path, directory: Path, spec: dict[str, Any], found: dict[str, Any], values: dict[str, str]
) -> None:
    _snapshot(root / "code", directory / "code")
    for name in {*spec["outputs"], "logs", "checkpoints"}:
        inside(directory, name).mkdir(parents=True, exist_ok=True)
    (directory / "logs" / "run.log").touch()
    own = directory / ".labctl"
    write_text(own / "entry.sh", entry_script(), 0o755)
    attempt = len(list(own.glob("attempt-*"))) + 1
    container = f"{root.name}-{spec['id']}-{attempt}"
    place: dict[str, Any] = {"container": container, "boot": boot_token(), "image_id": found["Id"]}
    place["started_at"] = time.time()
    write_json(own / f"attempt-{attempt}", place)
    secrets_tmpfs.put(spec["id"], values)
    line = run_line(root, directory, spec, found, container)
    done = docker(*line, check=False)
    if done.returncode != 0 and container not in inspect([container]):
        raise _refused(spec, done.stderr)
    if done.returncode != 0 and "is already in use" not in done.stderr:
        docker("rm", "-f", container, check=False)
        raise _refused(spec, done.stderr)
    # It runs: that it has filled the disk by now must not make its start a failure.
    with suppress(OSError):
        write_json(own / f"attempt-{attempt}", {**place, "launched": True})
    open_session(spec["id"], directory, container)


def _refused(spec: dict[str, Any], stderr: str) -> Failure:
    why = stderr.strip()[-1500:]
    if "could not select device driver" in why:
        return Failure("gpu", "Docker on the server cannot give a GPU", why, "labctl doctor")
    if "no space left on device" in why:
        return Failure("disk", "the server's disk is full", why, "labctl ssh -- df -h")
    return Failure("docker", f"the container of run {spec['id']} did not start", why)


def run_line(
    root: Path, directory: Path, spec: dict[str, Any], found: dict[str, Any], container: str
) -> list[str]:
    """The words after `docker` that start a run. Pure but for what `as_user` makes."""
    config = found.get("Config") or {}
    env = {**HOME_ENV, **_fixed_env(spec), **spec["env"]}
    words = ["run", "--detach", "--name", container, "--entrypoint", "/bin/sh"]
    words += [*as_user(root, spec, found), "--stop-timeout", "60"]
    words += ["--label", f"labctl.run={spec['id']}"]
    words += mount(directory / "code", "/lab/code")
    words += mount(directory, "/lab/run")
    if spec["secrets"]:
        words += mount(
            secrets_tmpfs.directory_of(spec["id"]), "/run/labctl-secrets", read_only=True
        )
    for key, value in sorted(env.items()):
        words += ["--env", f"{key}={value}"]
    words += gpu_words(spec["gpus"])
    if spec["memory_bytes"]:
        words += ["--memory", str(spec["memory_bytes"]), "--memory-swap", str(spec["memory_bytes"])]
    if spec["cpus"]:
        words += ["--cpus", str(spec["cpus"])]
    if spec["shm_bytes"]:
        words += ["--shm-size", str(spec["shm_bytes"])]
    if spec["tty"]:
        words += ["--interactive", "--tty"]
    entry = config.get("Entrypoint") or []
    return [*words, found["Id"], "/lab/run/.labctl/entry.sh", *entry, *spec["command"]]


def as_user(root: Path, spec: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """What every container of a lab has: our user, its home and cache, data, a label.

    `spec` has lab and lab_id, `found` is the image as `docker inspect` shows it.
    """
    (home() / ".cache" / "home").mkdir(parents=True, exist_ok=True)
    (root / "data").mkdir(exist_ok=True)
    words = ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", "/lab/code"]
    words += ["--security-opt", "no-new-privileges", "--hostname", spec["lab"]]
    words += ["--label", f"labctl.lab-id={spec['lab_id']}", "--log-opt", "max-size=50m"]
    words += mount(root / "data", "/lab/data", read_only=True)
    words += mount(home() / ".cache", "/lab/cache")
    return words + mount(
        passwd_file(found["Id"], home() / ".passwd"), "/etc/passwd", read_only=True
    )


def gpu_words(gpus: str) -> list[str]:
    """`gpus` is "", "all" or device UUIDs joined by commas."""
    if not gpus:
        return []
    return ["--gpus", gpus if gpus == "all" else f'"device={gpus}"']


def _fixed_env(spec: dict[str, Any]) -> dict[str, str]:
    return {
        "LABCTL_RUN_ID": spec["id"],
        "LABCTL_DATA_DIR": "/lab/data",
        "LABCTL_RUN_DIR": "/lab/run",
        "LABCTL_CHECKPOINT_DIR": "/lab/run/checkpoints",
        "LABCTL_LOG_DIR": "/lab/run/logs",
    }


def entry_script() -> str:
    return (pkgutil.get_data(__package__ or "remote", "entry.sh") or b"").decode()


def _snapshot(code: Path, target: Path) -> None:
    """Copy the code for this run alone, reflinked where the filesystem can."""
    if target.exists():
        return
    code.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(".code.partial")
    shutil.rmtree(partial, ignore_errors=True)
    done = subprocess.run(
        ["cp", "-a", "--reflink=auto", str(code), str(partial)],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        full = "No space left" in done.stderr
        raise Failure(
            "disk" if full else "docker",
            "the server's disk is full" if full else "the code could not be copied for the run",
            done.stderr.strip()[-500:],
            "labctl ssh -- df -h",
        )
    names = sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file())
    write_json(target.parent / ".labctl" / "code.json", names)
    partial.rename(target)


def open_session(run_id: str, directory: Path, container: str) -> str:
    """The tmux session for people: run (the log), gpu, shell. Killing it harms nothing."""
    name = f"labctl-{run_id}"
    if tmux("has-session", "-t", f"={name}").returncode == 0:
        return name
    log = directory / "logs" / "run.log"
    gpu = "if command -v nvidia-smi >/dev/null; then exec watch -n 2 nvidia-smi; else exec top; fi"
    enter = f"exec sh /lab/run/.labctl/entry.sh sh -c {shlex.quote(BEST_SHELL)}"
    shell = f"docker exec -it -e LABCTL_ENTER=1 {container} sh -c {shlex.quote(enter)}"
    shell += " || exec ${SHELL:-sh}"
    tmux(
        *("new-session", "-d", "-s", name, "-n", "run", "-c", str(directory)),
        *("-x", "200", "-y", "50", f"exec tail -n +1 -F {shlex.quote(str(log))}", ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "gpu", gpu, ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "shell", shell),
    )
    return name


def session(request: dict[str, Any]) -> dict[str, Any]:
    """The name of a run's tmux session, made again if it is gone."""
    directory = existing(request)
    attempt = last_attempt(directory)
    return {"session": open_session(directory.name, directory, attempt.get("container", ""))}


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    """SIGTERM, `grace_s` to write a checkpoint, then SIGKILL. Repeating it does no harm."""
    directory = existing(request)
    before = look(directory, {})
    if before["state"] not in UNENDED:
        return {"run": before, "already": True}
    (directory / ".labctl" / "cancel").touch()
    name = before["container"]
    if name:
        docker("stop", "--time", str(int(request.get("grace_s", 60))), name, check=False)
    after = look(directory, {})
    if after["state"] == "claimed":
        after = {**after, "state": "cancelled", "told": "cancelled before it started"}
        write_json(directory / ".labctl" / "record.json", after)
    tmux("kill-session", "-t", f"=labctl-{directory.name}")
    return {"run": after, "already": False}


def clear(request: dict[str, Any]) -> dict[str, Any]:
    """Remove what ended runs no longer need: their containers and sessions, never their files."""
    root = lab_dir(request["lab"], request["lab_id"])
    gone = []
    for directory in sorted((root / "runs").glob("*")):
        if not directory.name.startswith(".") and final(directory):
            docker("rm", "-f", last_attempt(directory).get("container", ""), check=False)
            tmux("kill-session", "-t", f"=labctl-{directory.name}")
            gone.append(directory.name)
    return {"cleared": gone}
