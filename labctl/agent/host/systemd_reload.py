"""Reloading systemd's unit files, but never while a container has a GPU.

A reload applies the device rules of every container again, and can take a container's GPU away
(gpu_access.py). So the reload waits until no such container runs; a file marks that it is pending.
"""

from __future__ import annotations

import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from ...wire.verbs import Empty
from ...wire.watchdog import ReloadUnitsReply
from ..reply import Failure
from . import engine
from .engine_objects import ContainerHostConfig

# Exists while a reload is pending. A reboot removes it, and reads all unit files anyway.
PUT_OFF = Path("/run/labctl/reload-put-off")
NODE = Path("/dev/nvidiactl")


def reload_units(request: Empty) -> ReloadUnitsReply:
    """Reload systemd's units as root, unless a container has a GPU (verb `reload-units`)."""
    names = list_gpu_containers()
    if names:
        PUT_OFF.parent.mkdir(mode=0o755, exist_ok=True)
        PUT_OFF.touch()
        return ReloadUnitsReply(tuple(names))
    systemctl("daemon-reload")
    with suppress(FileNotFoundError):
        PUT_OFF.unlink()
    return ReloadUnitsReply(())


def list_gpu_containers() -> list[str]:
    """List the names of the running containers that have a GPU.

    If the engine does not answer, its containers may still run: a server with a GPU then counts as
    one such container.
    """
    if not shutil.which("docker"):
        return []
    try:
        ids = [container.Id for container in engine.list_containers()]
        running = engine.inspect_containers(ids)
    except Failure:
        return ["any (the Docker Engine does not answer)"] if NODE.exists() else []
    return sorted(name for name, container in running.items() if has_gpu(container.HostConfig))


def has_gpu(host_config: ContainerHostConfig) -> bool:
    """Return whether a container has a GPU: by `--gpus`, CDI, NVIDIA's runtime or `--device`."""
    return bool(
        host_config.DeviceRequests
        or host_config.Runtime == "nvidia"
        or any(device.PathOnHost.startswith("/dev/nvidia") for device in host_config.Devices or ())
    )


def systemctl(*words: str) -> None:
    """Run systemctl. Failure (server) with its error output if it fails."""
    done = subprocess.run(["systemctl", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        what = f"systemctl {words[0]} failed"
        raise Failure("server", what, done.stderr.strip()[-1000:], "labctl doctor")


def enable_at_boot(unit: str) -> None:
    """Enable `unit` at every boot. A plain `enable` would reload all units."""
    done = subprocess.run(["systemctl", "is-enabled", "--quiet", unit], check=False)
    if done.returncode != 0:
        systemctl("enable", "--no-reload", "--quiet", unit)
