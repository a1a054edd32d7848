"""What the lab's containers are made of: bodies of the engine's `create`, as values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..host.engine import archive, create, proxies, remove
from ..host.paths import home
from . import secrets_tmpfs

HOME_ENV = {
    "HOME": "/lab/cache/home",
    "USER": "lab",
    "PYTHONUNBUFFERED": "1",
    "HF_HOME": "/lab/cache/huggingface",
    "TORCH_HOME": "/lab/cache/torch",
    "PIP_CACHE_DIR": "/lab/cache/pip",
    "LABCTL_CACHE_DIR": "/lab/cache",
}


def run_body(
    root: Path, directory: Path, spec: dict[str, Any], found: dict[str, Any]
) -> dict[str, Any]:
    """The container of a run. Pure but for what `lab_body` makes."""
    mounts = [mount(directory / "code", "/lab/code"), mount(directory, "/lab/run")]
    if spec["secrets"]:
        kept = secrets_tmpfs.directory_of(spec["id"])
        mounts.append(mount(kept, "/run/labctl-secrets", read_only=True))
    env = {**run_env(spec), **spec["env"]}
    body = lab_body(root, spec, found, mounts, env, {"labctl.run": spec["id"]})
    body["Entrypoint"] = ["/bin/sh"]
    own = (found.get("Config") or {}).get("Entrypoint") or []
    body["Cmd"] = ["/lab/run/.labctl/entry.sh", *own, *spec["command"]]
    body["StopTimeout"] = 60
    body["Tty"] = body["OpenStdin"] = bool(spec["tty"])
    body["HostConfig"].update(limits(spec))
    return body


def lab_body(
    root: Path,
    spec: dict[str, Any],
    found: dict[str, Any],
    mounts: list[dict[str, Any]],
    env: dict[str, str],
    labels: dict[str, str],
) -> dict[str, Any]:
    """What every container of a lab has: our user, its home and cache, data, a label.

    `spec` has lab, lab_id and gpus ("", "all" or device UUIDs joined by commas), `found` is the
    image as `docker inspect` shows it.
    """
    (home() / ".cache" / "home").mkdir(parents=True, exist_ok=True)
    (root / "data").mkdir(exist_ok=True)
    passwd = passwd_file(found["Id"], home() / ".passwd")
    shared = [
        mount(root / "data", "/lab/data", read_only=True),
        mount(home() / ".cache", "/lab/cache"),
        mount(passwd, "/etc/passwd", read_only=True),
    ]
    variables = {**proxies(), **HOME_ENV, **env}
    return {
        "Image": found["Id"],
        "Hostname": spec["lab"],
        "User": f"{os.getuid()}:{os.getgid()}",
        "WorkingDir": "/lab/code",
        "Env": [f"{key}={value}" for key, value in sorted(variables.items())],
        "Labels": {"labctl.lab-id": spec["lab_id"], **labels},
        "HostConfig": {
            "Mounts": [*shared, *mounts],
            "SecurityOpt": ["no-new-privileges"],
            "LogConfig": {"Type": "", "Config": {"max-size": "50m"}},
            "DeviceRequests": _devices(spec.get("gpus", "")),
        },
    }


def mount(source: Path, target: str, read_only: bool = False) -> dict[str, Any]:
    return {"Type": "bind", "Source": str(source), "Target": target, "ReadOnly": read_only}


def _devices(gpus: str) -> list[dict[str, Any]]:
    """What `docker run --gpus` asks for."""
    if not gpus:
        return []
    asked: dict[str, Any] = {"Driver": "", "Capabilities": [["gpu"]], "Options": {}}
    return [{**asked, **({"Count": -1} if gpus == "all" else {"DeviceIDs": gpus.split(",")})}]


def limits(spec: dict[str, Any]) -> dict[str, int]:
    """0 is no limit. Memory without swap beside it, so that the limit is the limit."""
    return {
        "Memory": spec["memory_bytes"],
        "MemorySwap": spec["memory_bytes"],
        "NanoCpus": round(spec["cpus"] * 1e9),
        "ShmSize": spec["shm_bytes"],
    }


def run_env(spec: dict[str, Any]) -> dict[str, str]:
    return {
        "LABCTL_RUN_ID": spec["id"],
        "LABCTL_DATA_DIR": "/lab/data",
        "LABCTL_RUN_DIR": "/lab/run",
        "LABCTL_CHECKPOINT_DIR": "/lab/run/checkpoints",
        "LABCTL_LOG_DIR": "/lab/run/logs",
    }


def passwd_file(image_id: str, directory: Path) -> Path:
    """The image's /etc/passwd with our user in it, made once per image.

    Libraries ask who they are (getpass, torch's cache, ssh): without an entry they fail.
    """
    path = directory / f"passwd-{image_id.rpartition(':')[2][:24]}"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    made = f"labctl-passwd-{os.urandom(8).hex()}"
    create(made, {"Image": image_id, "Entrypoint": ["/bin/true"]})
    try:
        text = _file_in(made, "/etc/passwd")
    finally:
        remove(made)
    kept = [
        row
        for row in text.splitlines()
        if row.count(":") == 6 and row.split(":")[2] != str(os.getuid())
    ]
    kept.append(f"lab:x:{os.getuid()}:{os.getgid()}:labctl:/lab/cache/home:/bin/sh")
    staging = path.with_name(path.name + ".new")
    staging.write_text("\n".join(kept) + "\n")
    staging.replace(path)
    return path


def _file_in(container: str, path: str) -> str:
    """A file of a container that need not run and need not hold any program; "" if absent."""
    import io
    import tarfile  # once per image: a start need not pay for it

    content = archive(container, path)
    if not content:
        return ""
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:
        member = tar.extractfile(tar.getmembers()[0])
        return member.read().decode(errors="replace") if member else ""
