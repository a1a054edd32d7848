"""What options of `labctl up` asked for, so that a recovery gets a server like the last one."""

from __future__ import annotations

import msgspec

from labctl.config import LabConfig
from labctl.decoding import convert_value
from labctl.model import GpuNeed, Need, Server
from labctl.servers.context import LabContext

# Kind of the ledger's line about a server that was created with options.
EVENT = "created with"
# The fields of a Need that options of `up` override, with the keys of lab.yaml. Its limits are
# those that the server's watchdog was given (`guard.restore_limits`).
KEYS = {
    "gpu": ("server.gpu", "server.gpu_memory"),
    "type": ("server.type",),
    "arch": ("server.arch",),
    "work": ("server.work",),
    "spot": ("server.spot",),
    "max_price_usd_per_hour": ("server.max_price",),
}


def choose_need(config: LabConfig, need: Need) -> LabConfig:
    """Return the configuration with `need`, which overrides lab.yaml as options do."""
    own = config.server.need
    changed = [field for field in KEYS if getattr(need, field) != getattr(own, field)]
    origins = {KEYS[field][0]: f"--{field}" for field in changed}
    server = msgspec.structs.replace(config.server, need=need)
    return msgspec.structs.replace(config, server=server, origins={**config.origins, **origins})


def note_need(context: LabContext, server: Server) -> None:
    """Record which parts of the need came from options, once their server was created."""
    origins = context.config.origins
    chosen = {
        field: msgspec.to_builtins(getattr(context.config.server.need, field))
        for field, keys in KEYS.items()
        if any(origins.get(key, "").startswith("--") for key in keys)
    }
    if chosen:
        context.state.record(EVENT, lab_id=context.lab_id, server_id=server.id, detail=chosen)


def forget_missing_gpu(context: LabContext, server: Server) -> None:
    """Record that the user uses the server without the GPU that `--gpu` asked for.

    This is so if it has none, and an `up` without `--gpu` has succeeded.
    """
    if context.config.server.need.gpu.is_required or context.config.submits_jobs:
        return
    for line in context.state.list_events(server_id=server.id, kind=EVENT, limit=1):
        gpu = convert_value(line.detail.get("gpu", {}), GpuNeed)
        if gpu.is_required and not context.load_facts(server).gpus:
            chosen = {field: value for field, value in line.detail.items() if field != "gpu"}
            context.state.record(EVENT, lab_id=context.lab_id, server_id=server.id, detail=chosen)


def restore_need(context: LabContext, server_id: str) -> LabConfig:
    """Return the configuration with the options with which the server was created."""
    need = context.config.server.need
    for line in context.state.list_events(server_id=server_id, kind=EVENT, limit=1):
        chosen = {field: value for field, value in line.detail.items() if field in KEYS}
        need = convert_value({**msgspec.to_builtins(need), **chosen}, Need)
    return choose_need(context.config, need)
