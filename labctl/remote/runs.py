"""Runs: claim, launch, look, cancel. Truth is the run directory, labels and `docker inspect`."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from datetime import UTC
from pathlib import Path
from typing import Any

from .docker import docker, image, inspect, mount, passwd_file, tmux
from .place import (
    boot_token,
    home,
    inside,
    lab_dir,
    read_json,
    read_text,
    run_dir,
    write_json,
    write_text,
)
from .reply import Failure

IGNORED_NEW = ("__pycache__", ".ipynb_checkpoints", ".git", ".labctl")
GIB = 1024**3


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
        _drop_secrets(spec["id"])
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
    (home() / ".cache" / "home").mkdir(parents=True, exist_ok=True)
    (root / "data").mkdir(exist_ok=True)
    own = directory / ".labctl"
    write_text(own / "entry.sh", entry_script(), 0o755)
    attempt = len(list(own.glob("attempt-*"))) + 1
    container = f"{root.name}-{spec['id']}-{attempt}"
    place = {"container": container, "boot": boot_token(), "image_id": found["Id"]}
    write_json(own / f"attempt-{attempt}", {**place, "started_at": time.time()})
    _put_secrets(spec["id"], values)
    line = run_line(root, directory, spec, found, container)
    done = docker(*line, check=False)
    if done.returncode != 0 and container not in inspect([container]):
        raise _refused(spec, done.stderr)
    if done.returncode != 0 and "is already in use" not in done.stderr:
        docker("rm", "-f", container, check=False)
        raise _refused(spec, done.stderr)
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
    """The words after `docker` that start a run. Pure but for passwd_file's cache."""
    config = found.get("Config") or {}
    env = {**_fixed_env(spec), **spec["env"]}
    words = ["run", "--detach", "--name", container, "--entrypoint", "/bin/sh"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}", "--workdir", "/lab/code"]
    words += ["--security-opt", "no-new-privileges", "--stop-timeout", "60"]
    words += ["--label", f"labctl.run={spec['id']}", "--label", f"labctl.lab-id={spec['lab_id']}"]
    words += ["--log-opt", "max-size=50m", "--hostname", spec["lab"]]
    words += mount(directory / "code", "/lab/code")
    words += mount(root / "data", "/lab/data", read_only=True)
    words += mount(directory, "/lab/run")
    words += mount(home() / ".cache", "/lab/cache")
    words += mount(passwd_file(found["Id"], home() / ".passwd"), "/etc/passwd", read_only=True)
    if spec["secrets"]:
        words += mount(secrets_dir(spec["id"]), "/run/labctl-secrets", read_only=True)
    for key, value in sorted(env.items()):
        words += ["--env", f"{key}={value}"]
    if spec["gpus"]:
        words += ["--gpus", spec["gpus"] if spec["gpus"] == "all" else f'"device={spec["gpus"]}"']
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


def _fixed_env(spec: dict[str, Any]) -> dict[str, str]:
    return {
        "HOME": "/lab/cache/home",
        "USER": "lab",
        "PYTHONUNBUFFERED": "1",
        "HF_HOME": "/lab/cache/huggingface",
        "TORCH_HOME": "/lab/cache/torch",
        "PIP_CACHE_DIR": "/lab/cache/pip",
        "LABCTL_RUN_ID": spec["id"],
        "LABCTL_DATA_DIR": "/lab/data",
        "LABCTL_RUN_DIR": "/lab/run",
        "LABCTL_CHECKPOINT_DIR": "/lab/run/checkpoints",
        "LABCTL_LOG_DIR": "/lab/run/logs",
    }


def entry_script() -> str:
    import pkgutil

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


def secrets_dir(run_id: str) -> Path:
    return Path("/dev/shm") / f"labctl-{os.getuid()}" / run_id


def _put_secrets(run_id: str, values: dict[str, str]) -> None:
    """Secrets live on a tmpfs, 0600, for as long as the run: never on disk, never in argv."""
    if not values:
        return
    directory = secrets_dir(run_id)
    directory.parent.mkdir(mode=0o700, exist_ok=True)
    if directory.parent.is_symlink() or directory.parent.stat().st_uid != os.getuid():
        raise Failure("policy", f"{directory.parent} belongs to somebody else", "", "labctl doctor")
    directory.parent.chmod(0o700)
    directory.mkdir(mode=0o700, exist_ok=True)
    for name, value in values.items():
        write_text(directory / name, value, 0o600)


def _drop_secrets(run_id: str) -> None:
    shutil.rmtree(secrets_dir(run_id), ignore_errors=True)


def open_session(run_id: str, directory: Path, container: str) -> str:
    """The tmux session for people: run (the log), gpu, shell. Killing it harms nothing."""
    name = f"labctl-{run_id}"
    if tmux("has-session", "-t", f"={name}").returncode == 0:
        return name
    log = directory / "logs" / "run.log"
    gpu = "if command -v nvidia-smi >/dev/null; then exec watch -n 2 nvidia-smi; else exec top; fi"
    enter = (
        "exec sh /lab/run/.labctl/entry.sh sh -c 'command -v bash >/dev/null && exec bash; exec sh'"
    )
    shell = f"docker exec -it -e LABCTL_ENTER=1 {container} sh -c {_quoted(enter)}"
    shell += " || exec ${SHELL:-sh}"
    tmux(
        *("new-session", "-d", "-s", name, "-n", "run", "-c", str(directory)),
        *("-x", "200", "-y", "50", f"exec tail -n +1 -F {_quoted(str(log))}", ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "gpu", gpu, ";"),
        *("new-window", "-d", "-t", f"={name}:", "-n", "shell", shell),
    )
    return name


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def session(request: dict[str, Any]) -> dict[str, Any]:
    """The name of a run's tmux session, made again if it is gone."""
    directory = existing(request)
    attempt = last_attempt(directory)
    return {"session": open_session(directory.name, directory, attempt.get("container", ""))}


def existing(request: dict[str, Any]) -> Path:
    directory = run_dir(lab_dir(request["lab"], request["lab_id"]), request["run"])
    if not directory.is_dir():
        raise Failure("missing", f"there is no run {request['run']} here", "", "labctl status")
    return directory


def last_attempt(directory: Path) -> dict[str, Any]:
    found = sorted((directory / ".labctl").glob("attempt-*"), key=lambda p: int(p.name[8:]))
    return read_json(found[-1]) if found else {}


def status(request: dict[str, Any]) -> dict[str, Any]:
    """Every run of the lab (or those named in "runs"), asked of Docker in one call."""
    root = lab_dir(request["lab"], request["lab_id"])
    wanted = request.get("runs")
    directories = [
        d
        for d in sorted((root / "runs").glob("*"))
        if not d.name.startswith(".") and (not wanted or d.name in wanted)
    ]
    names = [last_attempt(d).get("container", "") for d in directories if not final(d)]
    seen = inspect([n for n in names if n])
    usage = shutil.disk_usage(str(root))
    return {
        "runs": [look(d, seen) for d in directories],
        "disk": {"free_bytes": usage.free, "total_bytes": usage.total},
        "uptime_s": float(read_text(Path("/proc/uptime")).split()[0]),
        "now": time.time(),
    }


def final(directory: Path) -> dict[str, Any]:
    """The record of a run that is known to have ended, {} otherwise."""
    return read_json(directory / ".labctl" / "record.json")


def look(directory: Path, seen: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What can truthfully be said of a run now. An ended run is recorded once and for all."""
    record = final(directory)
    if record:
        return record
    spec = read_json(directory / ".labctl" / "spec.json")
    attempt = last_attempt(directory)
    claim = read_json(directory / ".labctl" / "claim.json")
    state: dict[str, Any] = {
        "id": directory.name,
        "lab_id": spec.get("lab_id", ""),
        "command": spec.get("command", []),
        "image": spec.get("image", ""),
        "created_at": claim.get("created_at", 0.0),
        "started_at": attempt.get("started_at"),
        "container": attempt.get("container", ""),
        "progress": _progress(directory),
    }
    name = attempt.get("container", "")
    found = seen.get(name) or (inspect([name]).get(name) if name else None)
    ending = _ending(directory, spec, attempt, found)
    state.update(ending)
    if state["state"] in ("exited", "lost", "cancelled"):
        state["new_files"] = new_files(directory, spec.get("outputs", []))
        state["progress"] = _progress(directory)
        _keep_console(directory, spec, name, found)
        write_json(directory / ".labctl" / "record.json", state)
        _drop_secrets(directory.name)
    return state


def _ending(
    directory: Path, spec: dict[str, Any], attempt: dict[str, Any], found: dict[str, Any] | None
) -> dict[str, Any]:
    """state, exit_code, ended_at and told, from the exit record, Docker and the boot token."""
    if found is None and not attempt:
        return {"state": "claimed"}
    inner = (found or {}).get("State") or {}
    if inner.get("Running") or inner.get("Restarting"):
        return {"state": "running"}
    if inner.get("Status") == "created" and not inner.get("Error"):
        return {"state": "claimed"}
    written = read_json(directory / ".labctl" / "exit.json")
    cancelled = (directory / ".labctl" / "cancel").exists()
    if written:
        told = told_of(int(written["code"]), written, spec, cancelled)
        end = float(written["ended_at"])
        state = "cancelled" if cancelled else "exited"
        return {"state": state, "exit_code": written["code"], "ended_at": end, "told": told}
    if attempt.get("boot") and attempt["boot"] != boot_token():
        told = "lost: the server restarted while it ran; its outputs up to then are kept"
        return {"state": "lost", "ended_at": None, "told": told}
    if found is None:
        # `docker run` may still be at work for a claim that another call made this second.
        if time.time() - float(attempt.get("started_at") or 0) < 30:
            return {"state": "starting"}
        return {"state": "lost", "ended_at": None, "told": "lost: its container was removed"}
    code = int(inner.get("ExitCode", -1))
    ended = _docker_time(inner.get("FinishedAt", ""))
    if inner.get("OOMKilled"):
        told = told_of(137, {"oom_kills": 1}, spec, False)
    elif cancelled:
        told = "cancelled: it did not stop within its time and was killed"
    elif inner.get("Error"):
        told = f"could not start: {inner['Error'][-500:]}"
    else:
        told = f"its container was killed from outside ({signal_name(code - 128)})"
        told = told if code > 128 else f"its container ended with {code} before the command did"
    state = "cancelled" if cancelled else "exited"
    return {"state": state, "exit_code": code, "ended_at": ended, "told": told}


def told_of(code: int, written: dict[str, Any], spec: dict[str, Any], cancelled: bool) -> str:
    """How a run ended, in words."""
    if int(written.get("oom_kills") or 0) > 0 and code != 0:
        limit = int(spec.get("memory_bytes") or 0)
        said = f"its limit of {limit / GIB:.2f} GiB" if limit else "the server's memory"
        peak = int(written.get("peak_memory_bytes") or 0)
        peak_said = f" (peak {peak / GIB:.2f} GiB)" if peak else ""
        return f"out of memory: killed at {said}{peak_said}"
    if cancelled:
        return f"cancelled; the command ended with {code}"
    if code == 0:
        return "done"
    if code == 127:
        return "exit 127: the command was not found in the image"
    if code == 126:
        return "exit 126: the command was found but cannot be executed"
    if code > 128 and signal_name(code - 128):
        return f"ended by {signal_name(code - 128)} (exit {code})"
    return f"failed with exit code {code}"


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""


def _docker_time(text: str) -> float | None:
    from datetime import datetime

    try:
        moment = datetime.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")
    except ValueError:
        return None
    return moment.replace(tzinfo=UTC).timestamp()


def _progress(directory: Path) -> dict[str, float]:
    """Numbers that a training script may leave in logs/progress.json."""
    body = read_json(directory / "logs" / "progress.json")
    return {k: float(v) for k, v in body.items() if isinstance(v, (int, float))}


def new_files(directory: Path, outputs: list[str]) -> list[str]:
    """Files that the run made outside its outputs, relative to the run directory."""
    try:
        known = set(json.loads(read_text(directory / ".labctl" / "code.json") or "[]"))
    except ValueError:
        known = set()
    kept = {*outputs, "logs", "checkpoints", "code", ".labctl"}
    found = []
    for path in sorted(directory.rglob("*")):
        parts = path.relative_to(directory).parts
        if any(p in IGNORED_NEW for p in parts) or path.is_symlink() or not path.is_file():
            continue
        if (parts[0] == "code" and "/".join(parts[1:]) not in known) or (
            parts[0] not in kept and not any("/".join(parts).startswith(f"{o}/") for o in outputs)
        ):
            found.append("/".join(parts))
        if len(found) >= 200:
            break
    return found


def _keep_console(
    directory: Path, spec: dict[str, Any], name: str, found: dict[str, Any] | None
) -> None:
    """What the container itself printed: all of it with a terminal, the shell's errors without."""
    log = directory / "logs" / "run.log"
    if found and (spec.get("tty") or not log.exists() or log.stat().st_size == 0):
        done = docker("logs", name, check=False)
        with log.open("a") as file:
            file.write(done.stdout + done.stderr)


def cancel(request: dict[str, Any]) -> dict[str, Any]:
    """SIGTERM, `grace_s` to write a checkpoint, then SIGKILL. Repeating it does no harm."""
    directory = existing(request)
    before = look(directory, {})
    if before["state"] not in ("running", "starting", "claimed"):
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
