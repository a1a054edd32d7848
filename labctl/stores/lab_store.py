"""Open the lab's store, and give the lab's server access to it."""

from __future__ import annotations

import getpass
from pathlib import Path
from typing import Any

from labctl.errors import LabError, NotFoundError
from labctl.events import Note
from labctl.model import Endpoint, Server
from labctl.servers.context import LabContext
from labctl.stores import LabStore, StoreContext, open_store
from labctl.stores.ssh import SshLabStore

PREPARE_S = 400.0
LONG_S = 6 * 3600.0


def prefix(ground: LabContext) -> str:
    """Return the lab's own prefix in its store."""
    return f"{ground.config.name}-{ground.lab_id}"


def open_lab_store(ground: LabContext) -> LabStore:
    """Open the lab's prefix of its store; NotFoundError if lab.yaml has no store."""
    if not ground.config.store:
        raise NotFoundError(f"{ground.config.name} has no store", hint="set store: in lab.yaml")
    return open_store(ground.config.store, prefix(ground), _surroundings(ground))


def prepare_store(ground: LabContext, server: Server) -> None:
    """Give the server what it needs to mirror to the lab's store. Idempotent.

    On an SSH store, a key that the server generates replaces the lab's earlier one, so that an
    earlier server of the lab can no longer write. Problems cause a warning only: the server is
    usable without a store.
    """
    request: dict[str, Any] = {**_lab_request(ground), "url": ground.config.store}
    request["mirror_s"] = ground.config.mirror_s
    remote = ground.open_agent(server)
    if not ground.config.store:
        if ground.state.list_events(server_id=server.id, kind="store"):
            remote.call("store", request)
        return
    store = open_lab_store(ground)
    if isinstance(store, SshLabStore):
        endpoint = store.endpoint()
        request |= {"host": endpoint.host, "port": endpoint.port, "user": endpoint.user}
        request |= {"host_key": endpoint.host_key, "directory": prefix(ground)}
        if problem := _find_detour(endpoint):
            _warn(ground, problem)
    reply = remote.call("store", request, timeout_s=PREPARE_S)
    if isinstance(store, SshLabStore) and reply["public_key"]:
        store.grant_access(prefix(ground), reply["public_key"])
    if reply["lacks"]:
        _warn(ground, reply["lacks"])
    ground.state.record(
        "store", lab_id=ground.lab_id, server_id=server.id, detail={"url": ground.config.store}
    )


def forget_store(ground: LabContext) -> None:
    """Revoke the lab's servers' access to its store; its content stays. Idempotent."""
    if ground.config.store.startswith("ssh://"):
        store = open_lab_store(ground)
        if isinstance(store, SshLabStore):
            store.revoke_access(prefix(ground))


def mirror_now(ground: LabContext, server: Server, run_id: str = "") -> dict[str, Any]:
    """Make the server send new files: {"sent", "bytes", "behind_bytes", "failed", "why"}."""
    request = {**_lab_request(ground), **({"run": run_id} if run_id else {})}
    return ground.open_agent(server).call("mirror-now", request, timeout_s=LONG_S)


def restore_run(ground: LabContext, server: Server, run_id: str) -> dict[str, Any]:
    """Make the server restore a run from the store; returns {"run", "files", "bytes", "left_out"}.

    NotFoundError if the store has nothing of it.
    """
    request = {**_lab_request(ground), "run": run_id, "store": ground.config.store}
    return ground.open_agent(server).call("restore-run", request, timeout_s=LONG_S)


def _lab_request(ground: LabContext) -> dict[str, Any]:
    return {"lab": ground.config.name, "lab_id": ground.lab_id}


def _warn(ground: LabContext, problem: str) -> None:
    text = (
        f"results cannot be mirrored to {ground.config.store}: {problem}; use labctl pull --follow"
    )
    ground.reporter.emit(Note(text=text, level="warning"))


def _find_detour(endpoint: Endpoint) -> str:
    if endpoint.jump or endpoint.proxy_command:
        return "your connection uses a jump host, which the server cannot use"
    return ""


def _surroundings(ground: LabContext) -> StoreContext:
    mirror = Path(__file__).parents[1] / "agent" / "mirror"
    config = ground.config.server
    settings = config.provider_settings.get(config.provider)

    def settle_host_key(endpoint: Endpoint) -> Endpoint:
        return ground.connections.settle_host_key(endpoint, ground.reporter)

    def resolve_alias(host: str) -> Endpoint:
        try:
            return ground.connections.resolve_alias(host)
        except LabError:
            return Endpoint(host=host, port=22, user=getpass.getuser())

    return StoreContext(
        connect=ground.connections.connect,
        settle_host_key=settle_host_key,
        resolve_alias=resolve_alias,
        gateway=(mirror / "ssh_gateway.py").read_bytes(),
        keys=(mirror / "authorized_keys.py").read_bytes(),
        profile=getattr(settings, "profile", ""),
    )
