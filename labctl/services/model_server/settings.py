"""Every bound and choice of the server, from the environment of its container."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

PREFIX = "LABCTL_SERVE_"
MIB = 1024**2


class SettingError(Exception):
    """A variable holds something that it cannot mean."""


@dataclass(frozen=True)
class Settings:
    """`LABCTL_SERVE_<NAME>` in the environment sets any of these; sizes are bytes."""

    # What `load` of the project's predict.py is given.
    checkpoints: Path = Path("checkpoints")
    host: str = "127.0.0.1"
    port: int = 8000
    # Images that the model is given at once; 1: no batching.
    max_batch: int = 32
    # How long a batch that is not full waits for more before the model is given it.
    wait_ms: float = 0.0
    # Images that wait for the model; a request beyond them is told to come again.
    max_waiting: int = 256
    # Images in one request.
    max_images: int = 32
    # One request's body: base64 takes a third more than the file itself.
    max_body_bytes: int = 16 * MIB
    # Width by height of one image, read from its header before anything is unpacked.
    max_pixels: int = 25_000_000
    # What all bodies and unpacked images may take together.
    max_held_bytes: int = 512 * MIB
    # How long a body may take to arrive.
    body_s: float = 30.0
    # How long requests that were begun may take after the order to stop.
    stop_s: float = 8.0


def from_environment(environ: Mapping[str, str]) -> Settings:
    """SettingError names the variable that cannot be read, or that is not there to be set."""
    kinds = {one.name: type(getattr(Settings(), one.name)) for one in fields(Settings)}
    kinds["checkpoints"] = Path
    values = {}
    for key, text in environ.items():
        if not key.startswith(PREFIX):
            continue
        name = key[len(PREFIX) :].lower()
        if name not in kinds:
            known = ", ".join(PREFIX + one.upper() for one in kinds)
            raise SettingError(f"{key} is no setting; there are {known}")
        try:
            values[name] = kinds[name](text)
        except ValueError:
            raise SettingError(f"{key} cannot be {text!r}") from None
        if name not in ("checkpoints", "host") and not 0 <= values[name] < float("inf"):
            raise SettingError(f"{key} cannot be {text!r}")
    found = Settings(**values)
    if found.max_batch < 1:
        raise SettingError(f"{PREFIX}MAX_BATCH must be 1 at least (1: no batching)")
    return found
