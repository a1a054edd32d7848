"""The settings of the server, from the environment of its container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "LABCTL_SERVE_"
MIB = 1024**2


class SettingError(Exception):
    """An environment variable has an invalid value."""


@dataclass(frozen=True)
class ServeSettings:
    """`LABCTL_SERVE_<NAME>` in the environment sets any of these; sizes are bytes."""

    # Passed to `load` of the project's predict.py.
    checkpoints: Path = Path("checkpoints")
    host: str = "127.0.0.1"
    port: int = 8000
    # Images per batch; 1: no batching.
    max_batch: int = 32
    # How long an incomplete batch waits for more images.
    wait_ms: float = 0.0
    # Images that may wait for the model; a request beyond that is refused as busy.
    max_waiting: int = 256
    # Images in one request.
    max_images: int = 32
    # Body of one request; base64 is a third larger than the file itself.
    max_body_bytes: int = 16 * MIB
    # Width by height of one image, checked in its header before it is decoded.
    max_pixels: int = 25_000_000
    # Memory for all bodies and decoded images together.
    max_held_bytes: int = 512 * MIB
    # How long a body may take to arrive.
    body_s: float = 30.0
    # How long active requests may take after a stop was requested.
    stop_s: float = 8.0


def read_environment(environ: Mapping[str, str]) -> ServeSettings:
    """Read the settings; SettingError names a variable that is invalid or unknown."""
    kinds = {
        setting.name: type(getattr(ServeSettings(), setting.name))
        for setting in fields(ServeSettings)
    }
    kinds["checkpoints"] = Path
    values = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX):
            continue
        name = key[len(PREFIX) :].lower()
        if name not in kinds:
            known = ", ".join(PREFIX + setting.upper() for setting in kinds)
            raise SettingError(f"unknown setting {key}; the settings are {known}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise SettingError(f"{key} cannot be {text!r}") from None
        if name not in ("checkpoints", "host") and not 0 <= values[name] < float("inf"):
            raise SettingError(f"{key} cannot be {text!r}")
    settings = ServeSettings(**values)
    if settings.max_batch < 1:
        raise SettingError(f"{PREFIX}MAX_BATCH must be at least 1 (1: no batching)")
    return settings
