"""Runs: claim, launch, look, cancel. Truth is the run directory, labels and `docker inspect`."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ...wire.boot_id import boot_token
from ..broker.detection import TAKEN
from ..host import engine
from ..host.background import scope_words
from ..host.docker import docker, tmux, tmux_begun
from ..host.paths import drop_tree, inside, lab_dir, read_json, run_dir, write_json, write_text
from ..program import PROGRAM
from ..reply import Failure
from . import secrets_tmpfs
from .containers import run_body
from .run_state import UNENDED, existing, final, last_attempt, look

BEST_SHELL = "command -v bash >/dev/null && exec bash; exec sh"


def start(request: dict[str, Any]) -> dict[str, Any]:
    """Claim and launch a run, or find the one that the same request made before.

    Replies {"missing": image} without claiming anything when the image is not here.
    """
    spec = request["spec"]
    root = lab_dir(spec["lab"], spec["lab_id"])
    directory = run_dir(root, spec["id"])
    found = engine.image(spec["image"]) if not directory.exists() else None
    if found is None and not directory.exists():
        return {"missing": spec["image"]}
    again = not _claim(root, directory, spec)
    with launching(directory):
        return _started(request, root, directory, found, again)


@contextmanager
def launching(directory: Path) -> Iterator[None]:
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
    if state["state"] != "claimed":
        # Launched before, or by a call that found our claim and was quicker.
        return {"run": state, "found": True, "directory": str(directory)}
    found = found or engine.image(spec["image"])
    if found is None:
        return {"missing": spec["image"]}
    try:
        seen = launch(root, directory, spec, found, request.get("secrets", {}))
    except Failure:
        if not again:
            drop_tree(directory)
        secrets_tmpfs.drop(spec["id"])
        raise
    return {"run": look(directory, seen), "found": again, "directory": str(directory)}


def _claim(root: Path, directory: Path, spec: dict[str, Any]) -> bool:
    """True when this call made the run directory; the rename is atomic and carries the hash."""
    text = json.dumps(spec, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh = directory.parent / f".{spec['id']}.{os.urandom(4).hex()}"
    (fresh / ".labctl").mkdir(parents=True)
    write_text(fresh / ".labctl" / "spec.json", text)
    write_json(fresh / ".labctl" / "claim.json", {"hash": digest, "created_at": time.time()})
    try:
        fresh.rename(directory)
        return True
    except OSError:
        drop_tree(fresh)
        if read_json(directory / ".labctl" / "claim.json").get("hash") != digest:
            raise Failure(
                "policy",
                f"there is another run {spec['id']} on this server",
                "its command, image or settings differ",
                f"labctl logs -f {spec['id']}   # that one; or labctl run --id ANOTHER-NAME",
            ) from None
        return False


def launch(
    root: Path, directory: Path, spec: dict[str, Any], found: dict[str, Any], values: dict[str, str]
) -> dict[str, dict[str, Any]]:
    """Start the container; what is known of it then, as `inspect` would show it."""
    _snapshot(root / "code", directory / "code")
    for name in {*spec["outputs"], "logs", "checkpoints"}:
        inside(directory, name).mkdir(parents=True, exist_ok=True)
    (directory / "logs" / "run.log").touch()
    own = directory / ".labctl"
    write_text(own / "entry.sh", entry_script(), 0o755)
    attempt = len(list(own.glob("attempt-*"))) + 1
    container = f"{root.name}-{spec['id']}-{attempt}"
    place: dict[str, Any] = {"container": container, "boot": boot_token(), "image_id": found["Id"]}
    place["image_digest"] = next(iter(found.get("RepoDigests") or ()), "")
    place["started_at"] = time.time()
    write_json(own / f"attempt-{attempt}", place)
    secrets_tmpfs.put(spec["id"], values)
    seen = _begun(container, spec, run_body(root, directory, spec, found))
    # It runs: that it has filled the disk by now must not make its start a failure.
    with suppress(OSError):
        write_json(own / f"attempt-{attempt}", {**place, "launched": True})
    tmux_begun(*_session(spec["id"], directory, container))
    _recorder_begun()
    return seen


def _recorder_begun() -> None:
    """Telemetry, by a process of its own that outlives this one (telemetry.py): not waited for.

    It begins a second later, so that it is not in the way of the container's start.
    """
    program = PROGRAM / "__main__.py"
    words = ["sh", "-c", 'sleep 1; exec "$@"', "sh", sys.executable, "-I", "-S", str(program)]
    words = [*scope_words(), *words, "telemetry"]
    null = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    with suppress(OSError, NotImplementedError):
        os.posix_spawnp(words[0], words, os.environ, file_actions=null, setsid=True)


def _begun(container: str, spec: dict[str, Any], body: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Make the container and start it. One of that name is the same attempt's, and left alone."""
    try:
        if not engine.create(container, body):
            return {}
        engine.start(container)
    except engine.Refused as refused:
        engine.remove(container)
        raise _refused(spec, refused.message) from None
    # The engine has just said so. Asked now, it answers a command that ends at once 80 ms later.
    return {container: {"State": {"Running": True}}}


def _refused(spec: dict[str, Any], message: str) -> Failure:
    why = message.strip()[-1500:]
    if why.startswith(TAKEN):
        return Failure("policy", f"run {spec['id']} cannot start now", why, "labctl run, later")
    if "could not select device driver" in why:
        return Failure("gpu", "Docker on the server cannot give a GPU", why, "labctl doctor")
    if "no space left on device" in why:
        return Failure("disk", "the server's disk is full", why, "labctl ssh -- df -h")
    return Failure("docker", f"the container of run {spec['id']} did not start", why)


def entry_script() -> str:
    return Path(__file__).with_name("entry.sh").read_text()


def _snapshot(code: Path, target: Path) -> None:
    """Copy the code for this run alone, reflinked where the filesystem can."""
    if target.exists():
        return
    code.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(".code.partial")
    if partial.exists():
        drop_tree(partial)
    complaint = _copied(code, partial)
    if complaint:
        full = "No space left" in complaint
        raise Failure(
            "disk" if full else "docker",
            "the server's disk is full" if full else "the code could not be copied for the run",
            complaint[-500:],
            "labctl ssh -- df -h",
        )
    names = sorted(str(p.relative_to(partial)) for p in partial.rglob("*") if p.is_file())
    write_json(target.parent / ".labctl" / "code.json", names)
    partial.rename(target)


def _copied(source: Path, target: Path) -> str:
    """What `cp` complains of, "" where all was copied. (To import subprocess takes 3 ms.)"""
    words = ["cp", "-a", "--reflink=auto", str(source), str(target)]
    reading, writing = os.pipe()
    errors = [(os.POSIX_SPAWN_DUP2, writing, 2)]
    process = os.posix_spawnp("cp", words, os.environ, file_actions=errors)
    os.close(writing)
    with os.fdopen(reading, errors="replace") as said:
        text = said.read().strip()
    _, status = os.waitpid(process, 0)
    return text or f"cp ended with status {status}" if status else ""


def _session(run_id: str, directory: Path, container: str) -> list[str]:
    """The words after `tmux` for the session for people: run (the log), gpu, shell.

    Killing it harms nothing. Where there is one of that name, tmux does none of it.
    """
    name = f"labctl-{run_id}"
    log = directory / "logs" / "run.log"
    gpu = "if command -v nvidia-smi >/dev/null; then exec watch -n 2 nvidia-smi; else exec top; fi"
    enter = f"exec sh /lab/run/.labctl/entry.sh sh -c {shlex.quote(BEST_SHELL)}"
    shell = f"docker exec -it -e LABCTL_ENTER=1 {container} sh -c {shlex.quote(enter)}"
    shell += " || exec ${SHELL:-sh}"
    return [
        *("new-session", "-d", "-s", name, "-n", "run", "-c", str(directory)),
        *("-x", "200", "-y", "50", f"exec tail -n +1 -F {shlex.quote(str(log))}", ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "gpu", gpu, ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "shell", shell),
    ]


def session(request: dict[str, Any]) -> dict[str, Any]:
    """The name of a run's tmux session, made again if it is gone."""
    directory = existing(request)
    tmux(*_session(directory.name, directory, last_attempt(directory).get("container", "")))
    return {"session": f"labctl-{directory.name}"}


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
    from ..sandbox.evaluation import container_of  # a start has no use for it

    root = lab_dir(request["lab"], request["lab_id"])
    gone = []
    for directory in sorted((root / "runs").glob("*")):
        if not directory.name.startswith(".") and final(directory):
            name = last_attempt(directory).get("container", "")
            if name:
                engine.remove(name)
            engine.remove(container_of(root, directory.name))
            tmux("kill-session", "-t", f"=labctl-{directory.name}")
            gone.append(directory.name)
    return {"cleared": gone}
