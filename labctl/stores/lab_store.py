"""The lab's store, from here: opened, and made ready for the server that will write to it."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.model import Endpoint, Server
from labctl.servers.context import Ground
from labctl.stores import Store, Surroundings, open_store
from labctl.stores.ssh import SshStore

PREPARE_S = 400.0
LONG_S = 6 * 3600.0


def prefix(ground: Ground) -> str:
    """The lab's own prefix in whatever store."""
    return f"{ground.config.name}-{ground.lab_id}"


def lab_store(ground: Ground) -> Store:
    """The lab's prefix of its store; NotFoundError where lab.yaml names none."""
    if not ground.config.store:
        raise NotFoundError(f"{ground.config.name} has no store", hint="store: in lab.yaml")
    return open_store(ground.config.store, prefix(ground), _surroundings(ground))


def prepare_store(ground: Ground, server: Server) -> None:
    """Give the server what it needs to mirror to the lab's store; safe to repeat.

    On an SSH server, a key that the server makes itself replaces the one that the lab had there: an
    earlier server of the lab writes no more. What is lacking is told; the server is usable without.
    """
    request: dict[str, Any] = {**_about(ground), "url": ground.config.store}
    request["mirror_s"] = ground.config.mirror_s
    remote = ground.remote(server)
    if not ground.config.store:
        if ground.state.events(server_id=server.id, kind="store"):
            remote.call("store", request)
        return
    store = lab_store(ground)
    if isinstance(store, SshStore):
        endpoint = store.endpoint()
        request |= {"host": endpoint.host, "port": endpoint.port, "user": endpoint.user}
        request |= {"host_key": endpoint.host_key, "directory": prefix(ground)}
        if lack := _roundabout(endpoint):
            _warn(ground, lack)
    reply = remote.call("store", request, timeout_s=PREPARE_S)
    if isinstance(store, SshStore) and reply["public_key"]:
        store.admit(prefix(ground), reply["public_key"])
    if reply["lacks"]:
        _warn(ground, reply["lacks"])
    ground.state.record(
        "store", lab_id=ground.lab_id, server_id=server.id, detail={"url": ground.config.store}
    )


def forget_store(ground: Ground) -> None:
    """No server of the lab writes to its store any more; what is there stays. Safe to repeat."""
    if ground.config.store.startswith("ssh://"):
        store = lab_store(ground)
        if isinstance(store, SshStore):
            store.forget(prefix(ground))


def mirror_now(ground: Ground, server: Server, run_id: str = "") -> dict[str, Any]:
    """Have the server send what is new: {"sent", "bytes", "behind_bytes", "failed", "why"}."""
    request = {**_about(ground), **({"run": run_id} if run_id else {})}
    return ground.remote(server).call("mirror-now", request, timeout_s=LONG_S)


def restore_run(ground: Ground, server: Server, run_id: str) -> dict[str, Any]:
    """Have the server make a run of what the store has: {"run", "files", "bytes", "left_out"}.

    NotFoundError where the store has nothing of it.
    """
    request = {**_about(ground), "run": run_id, "store": ground.config.store}
    return ground.remote(server).call("restore-run", request, timeout_s=LONG_S)


def _about(ground: Ground) -> dict[str, Any]:
    return {"lab": ground.config.name, "lab_id": ground.lab_id}


def _warn(ground: Ground, lack: str) -> None:
    text = f"results cannot be mirrored to {ground.config.store}: {lack}; use labctl pull --follow"
    ground.reporter.emit(Note(text=text, level="warning"))


def _roundabout(endpoint: Endpoint) -> str:
    if endpoint.jump or endpoint.proxy_command:
        return "you reach it through another machine, which the server cannot"
    return ""


def _surroundings(ground: Ground) -> Surroundings:
    mirror = Path(__file__).parents[1] / "agent" / "mirror"
    config = ground.config.server
    settings = config.provider_settings.get(config.provider)

    def settled(endpoint: Endpoint) -> Endpoint:
        return ground.connections.settle_host_key(endpoint, ground.reporter)

    def resolved(host: str) -> Endpoint:
        try:
            return ground.connections.resolve_alias(host)
        except LabError:
            return Endpoint(host=host, port=22, user=getpass.getuser())

    return Surroundings(
        connect=ground.connections.connect,
        settle_host_key=settled,
        resolve_alias=resolved,
        gateway=(mirror / "ssh_gateway.py").read_bytes(),
        keys=(mirror / "authorized_keys.py").read_bytes(),
        profile=getattr(settings, "profile", ""),
    )
