"""Every setting of a lab with its value and origin, for `labctl config`."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import msgspec

from labctl.config.scalars import format_duration, format_size, gpu_text, number_text
from labctl.config.schema import LabConfig
from labctl.config.sweep import list_sweep_settings

DEFAULT = "default"
MASK = "********"

_SECRETIVE = r"(?i)SECRET|TOKEN|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|PRIVATE"
_USER_OF_URL = r"://[^/@\s]+@"


def list_settings(config: LabConfig) -> list[tuple[str, str, str]]:
    """List (dotted key, value as text, origin) of all settings; secret values are masked."""
    return [(key, _mask(key, text), _find_origin(config, key)) for key, text in _rows(config)]


def _rows(config: LabConfig) -> Iterator[tuple[str, str]]:
    yield "lab", config.name
    yield from _server_rows(config)
    if config.image.is_built:
        for key in ("build", "requirements", "python", "conda"):
            if text := getattr(config.image, key):
                yield f"image.{key}", text
        if config.image.extras:
            yield "image.extras", ", ".join(config.image.extras)
        yield from ((f"image.args.{key}", text) for key, text in config.image.args.items())
        yield "image.registry", config.image.registry
        yield "image.store", "yes" if config.should_store_images else "no"
    elif config.uses_containers:
        yield "image", config.image.reference
    yield "run", shlex.join(config.run)
    if config.launch.launcher:
        yield "launch.with", config.launch.launcher
        yield "launch.per_server", str(config.launch.processes or "auto")
    if config.launch.launcher or config.server.count > 1:
        yield "launch.restarts", str(config.launch.restarts)
    if config.server.count > 1:
        yield "launch.silence", format_duration(config.launch.silence_s)
        stall_s = config.launch.stall_s
        yield "launch.stall", format_duration(stall_s) if stall_s else "off"
    yield from ((f"env.{key}", text) for key, text in config.env.items())
    yield "secrets", ", ".join(config.secrets)
    yield from ((f"data.{key}", source.written) for key, source in config.data.items())
    yield "outputs", ", ".join(config.outputs)
    for name, service in config.services.items():
        yield f"services.{name}.port", str(service.port)
        if service.command:
            yield f"services.{name}.command", shlex.join(service.command)
    yield "track.wandb", config.track.wandb or "off"
    yield "store", config.store
    yield "mirror", format_duration(config.mirror_s) if config.store else ""
    yield "limits.memory", _size(config.limits.memory_bytes)
    yield "limits.cpus", number_text(config.limits.cpus) if config.limits.cpus else ""
    yield "limits.shm", _size(config.limits.shm_bytes)
    yield from list_sweep_settings(config.sweep)
    yield "base_image", config.base_image
    yield "wheelhouse", config.wheelhouse
    yield "package_index", config.package_index
    yield "image_cache", _size(config.image_cache_bytes) or "off"
    yield "cache_pool", config.cache_pool


def _server_rows(config: LabConfig) -> Iterator[tuple[str, str]]:
    need = config.server.need
    yield "server.provider", config.server.provider
    if config.server.candidates:
        yield "server.fallback", ", ".join(config.server.candidates[1:])
    yield "server.executor", config.server.executor
    if config.server.count > 1:
        yield "server.count", str(config.server.count)
        yield "server.network", config.server.network
    yield "server.gpu", gpu_text(need.gpu)
    if need.type:
        yield "server.type", need.type
    yield "server.gpu_memory", _size(need.gpu.min_memory_bytes)
    yield "server.arch", need.arch
    yield "server.work", need.work
    yield "server.spot", need.spot
    yield "server.max_price", _price(need.max_price_usd_per_hour)
    yield "server.budget", _price(need.budget_usd)
    yield "server.ttl", format_duration(need.ttl_s) if need.ttl_s else ""
    yield "server.max_ttl", format_duration(need.max_ttl_s) if need.max_ttl_s else ""
    yield "server.idle", format_duration(need.idle_s) if need.idle_s else ""
    for provider, value in config.server.provider_settings.items():
        plain_value = msgspec.to_builtins(value, enc_hook=str)
        yield from _flatten(f"server.{provider}", plain_value)


def _flatten(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flatten(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        if any(isinstance(item, dict) for item in value):
            for position, item in enumerate(value):
                yield from _flatten(f"{path}[{position}]", item)
        else:
            yield path, ", ".join(str(item) for item in value)
    else:
        yield path, "" if value is None else str(value)


def _size(size: int) -> str:
    return format_size(size) if size else ""


def _price(price: float | None) -> str:
    return "" if price is None else number_text(price)


def _mask(key: str, text: str) -> str:
    if key != "secrets" and re.search(_SECRETIVE, key):
        return MASK if text else ""
    return re.sub(_USER_OF_URL, f"://{MASK}@", text)


def _find_origin(config: LabConfig, key: str) -> str:
    """Find the origin of the key, or of the list or mapping that it is a part of.

    For a mapping that is shown as one value, it is that of its first part.
    """
    parts = (each for name, each in config.origins.items() if name.startswith(f"{key}."))
    if key not in config.origins and (origin := next(parts, "")):
        return origin
    while key:
        if key in config.origins:
            return config.origins[key]
        key = re.sub(r"(\.[^.\[]*|\[[0-9]+\])$", "", key) if re.search(r"[.\[]", key) else ""
    return DEFAULT
