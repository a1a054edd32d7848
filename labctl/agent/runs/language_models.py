"""Serving a language model: its weights, and the secrets that its download needs."""

from __future__ import annotations

from pathlib import Path

from ...wire.services import ServiceRequest
from ..host.engine_objects import Mount
from ..host.paths import require_name
from ..reply import Failure
from . import secrets_tmpfs
from .containers import build_mount

WEIGHTS, SECRETS = "/lab/model", "/run/labctl-secrets"


def require_weights(root: Path, request: ServiceRequest) -> None:
    """Failure (missing) if the weights are not on this server."""
    if request.weights and not _find_weights(root, request).is_dir():
        what = f"the model {request.weights} is not on this server"
        raise Failure("missing", what, "", "labctl serve --help   # --model sends it")


def build_mounts(root: Path, request: ServiceRequest) -> list[Mount]:
    """Return read-only mounts of the weights and of the secrets, which are written first."""
    mounts = []
    if request.weights:
        mounts.append(build_mount(_find_weights(root, request), WEIGHTS, read_only=True))
    if request.secrets:
        owner = _name_owner(root, request.name)
        secrets_tmpfs.write_secrets(owner, request.secrets)
        mounts.append(build_mount(secrets_tmpfs.secrets_directory(owner), SECRETS, read_only=True))
    return mounts


def remove_secrets(root: Path, name: str) -> None:
    secrets_tmpfs.remove_secrets(_name_owner(root, name))


def _find_weights(root: Path, request: ServiceRequest) -> Path:
    return root / "models" / require_name(request.weights)


def _name_owner(root: Path, name: str) -> str:
    # No run has a name with this prefix and the lab's directory in it.
    return f"service.{root.name}.{name}"
