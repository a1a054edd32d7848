"""Reload systemd's unit files, but never while a container has a GPU.

A reload applies the device rules of every container anew, and a container can lose its GPU by it
(gpu_access.py). So it is put off until no such container runs, and a mark says so meanwhile.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..reply import Failure
from . import engine

# There while a reload is put off. Not kept over a reboot, which reads all files anew.
PUT_OFF = Path("/run/labctl/reload-put-off")
NODE = Path("/dev/nvidiactl")


def reload_units(request: dict[str, Any]) -> dict[str, Any]:
    """The verb `reload-units`, as root: {"put_off_for": [container]}, empty once it is done."""
    names = list_gpu_containers()
    if names:
        PUT_OFF.parent.mkdir(mode=0o755, exist_ok=True)
        PUT_OFF.touch()
        return {"put_off_for": names}
    systemctl("daemon-reload")
    with suppress(FileNotFoundError):
        PUT_OFF.unlink()
    return {"put_off_for": []}


def list_gpu_containers() -> list[str]:
    """The names of the running containers that have a GPU.

    Where the engine does not answer, its containers may live on: a server with a GPU counts as one.
    """
    if not shutil.which("docker"):
        return []
    try:
        listed = json.loads(engine.ask("GET", "/containers/json"))
        running = engine.inspect([one["Id"] for one in listed])
    except Failure:
        return ["any, since the Docker Engine does not answer"] if NODE.exists() else []
    return sorted(name for name, container in running.items() if has_gpu(container["HostConfig"]))


def has_gpu(host_config: dict[str, Any]) -> bool:
    """By `--gpus`, by CDI, by NVIDIA's runtime, or by `--device /dev/nvidia0`."""
    devices = host_config.get("Devices") or []
    return bool(
        host_config.get("DeviceRequests")
        or host_config.get("Runtime") == "nvidia"
        or any(str(one.get("PathOnHost", "")).startswith("/dev/nvidia") for one in devices)
    )


def systemctl(*words: str) -> None:
    """Run systemctl; Failure with what it said where it fails."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = f"systemctl {words[0]} failed"
        raise Failure("server", said, done.stderr.strip()[-1000:], "labctl doctor")


def enable_at_boot(unit: str) -> None:
    """Have systemd start `unit` at every boot. `enable` alone would reload all units."""
    known = subprocess.run(["systemctl", "is-enabled", "--quiet", unit], check=False)
    if known.returncode != 0:
        systemctl("enable", "--no-reload", "--quiet", unit)
