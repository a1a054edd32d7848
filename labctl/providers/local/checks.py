"""The checks of `labctl doctor` for this machine's Docker Engine."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

from labctl.errors import EngineError
from labctl.model import GIB, Check
from labctl.providers.local import cache
from labctl.providers.local.engine import EngineInfo
from labctl.providers.local.image import BUILD_BASE
from labctl.text import bytes_text

LOW_DISK_BYTES = 10 * GIB
# Removes the owner's layers of ended servers, but none in use. The next `up` builds them again.
FREE_LAYERS = "docker volume rm $(docker volume ls -q --filter {label})"


def list_engine_checks(
    info: EngineInfo, *, built: bool, base_problem: str, owner: str
) -> list[Check]:
    """Check a running engine by its `info`; `built` says whether the lab server image exists.

    `base_problem` says why it cannot be built.

    The command that frees the disk removes the layers of `owner` only: others may share the engine.
    """
    return [
        _check_engine(info),
        _check_cgroup(info.cgroup_version),
        *_check_disk(info, owner),
        _check_image(built, base_problem),
    ]


def make_no_engine_checks(error: EngineError) -> list[Check]:
    """Return the checks of an engine that cannot be reached."""
    detail = f"{error}: {error.why}"
    return [Check(name="Docker Engine", ok=False, detail=detail, next=error.hint)]


def _check_engine(info: EngineInfo) -> Check:
    version = info.version
    linux = info.os == "linux"
    return Check(
        name="Docker Engine",
        ok=linux,
        detail=version if linux else f"{version}, runs {info.os} containers",
        next="" if linux else "switch Docker to Linux containers",
    )


def _check_cgroup(version: str) -> Check:
    """Check the version of cgroup; with version 1, servers see the limits of this machine."""
    old = version == "1"
    return Check(
        name="cgroup",
        ok=True,
        warning=old,
        detail=f"v{version}{', which Docker and systemd no longer develop' if old else ''}",
        next="boot Linux with systemd.unified_cgroup_hierarchy=1" if old else "",
    )


def _check_disk(info: EngineInfo, owner: str) -> list[Check]:
    """Check the engine's disk; nothing if it is inaccessible (in Docker Desktop's own machine)."""
    root = Path(info.root)
    try:
        free = shutil.disk_usage(root).free
    except (FileNotFoundError, PermissionError):
        return []
    ok = free >= LOW_DISK_BYTES
    label = shlex.quote(f"label={cache.LABEL}={owner}")
    return [
        Check(
            name="disk for images",
            ok=ok,
            detail=f"{bytes_text(free)} free in {root}",
            next="" if ok else FREE_LAYERS.format(label=label),
        )
    ]


def _check_image(built: bool, base_problem: str) -> Check:
    if base_problem:
        return Check(
            name="lab server image", ok=True, warning=True, detail=base_problem, next=BUILD_BASE
        )
    detail = "built" if built else "not built yet: the first up builds it in about a minute"
    return Check(name="lab server image", ok=True, detail=detail)
