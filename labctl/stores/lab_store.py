"""Open the lab's store, and give the lab's server access to it."""

from __future__ import annotations

from pathlib import Path

from labctl.config import find_user_name
from labctl.errors import LabError, NotFoundError, TransferError
from labctl.events import UniqueNote, report_wait
from labctl.model import Endpoint, Server
from labctl.servers.accounts import find_missing_bucket_setup, find_s3_profile
from labctl.servers.context import LabContext
from labctl.stores import LabStore, StoreContext, open_store
from labctl.stores.ssh import SshLabStore
from labctl.text import add_next
from labctl.wire.mirrors import (
    MIRROR_NOW,
    PREPARE_STORE,
    RESTORE_RUN,
    MirrorPassReply,
    MirrorPassRequest,
    PrepareStoreRequest,
    RestoreRunReply,
    RestoreRunRequest,
)

PREPARE_S = 400.0
# a key that no lab writes
PROBE = "probe"
LONG_S = 6 * 3600.0


def prefix(context: LabContext) -> str:
    """Return the lab's own prefix in its store."""
    return f"{context.config.name}-{context.lab_id}"


def open_lab_store(context: LabContext) -> LabStore:
    """Open the lab's prefix of its store; NotFoundError if lab.yaml has no store."""
    if not context.config.store:
        hint = f"set store: in {context.subject.config_file}"
        raise NotFoundError(f"{context.name} has no store", hint=hint)
    return open_store(context.config.store, prefix(context), _context(context))


def prepare_store(context: LabContext, server: Server) -> None:
    """Give the server what it needs to mirror to the lab's store. Idempotent.

    On an SSH store, a key that the server generates replaces the lab's earlier one, so that an
    earlier server of the lab can no longer write. Problems cause a warning only: the server is
    usable without a store.
    """
    config = context.config
    request = PrepareStoreRequest(config.name, context.lab_id, config.store, config.mirror_s)
    remote = context.open_agent(server)
    if not context.config.store:
        if context.state.list_events(server_id=server.id, kind="store"):
            remote.call(PREPARE_STORE, request)
        return
    store = open_lab_store(context)
    if isinstance(store, SshLabStore):
        endpoint = store.endpoint()
        request = request._replace(
            host=endpoint.host,
            port=endpoint.port,
            user=endpoint.user,
            host_key=endpoint.host_key,
            directory=prefix(context),
        )
        if problem := _find_detour(endpoint):
            _warn(context, problem)
    reply = remote.call(PREPARE_STORE, request, timeout_s=PREPARE_S)
    if isinstance(store, SshLabStore) and reply.public_key:
        store.grant_access(prefix(context), reply.public_key)
    if reply.lacks:
        _warn(context, reply.lacks)
    context.state.record(
        "store", lab_id=context.lab_id, server_id=server.id, detail={"url": context.config.store}
    )


def has_one_key(context: LabContext) -> bool:
    """Whether only one server at a time has access to the lab's store: by a key of its own."""
    return context.config.store.startswith("ssh://")


def warn_before_start(context: LabContext) -> None:
    """Warn if a new server could not mirror to the lab's bucket, before it costs money."""
    if not context.config.store.startswith("s3://"):
        return  # on an SSH store, the user's login creates what is missing
    if missing := find_missing_bucket_setup(context.provider):
        _warn(context, missing)
    try:
        with report_wait(context.reporter, f"checking {context.config.store}"):
            open_lab_store(context).read(PROBE)
    except TransferError as error:
        _warn(context, error.what, error.hint)
    except LabError:
        return  # the user may not read there, while the server may write


def forget_store(context: LabContext) -> None:
    """Revoke the lab's servers' access to its store; its content stays. Idempotent."""
    if has_one_key(context):
        store = open_lab_store(context)
        if isinstance(store, SshLabStore):
            store.revoke_access(prefix(context))


def mirror_now(context: LabContext, server: Server, run_id: str = "") -> MirrorPassReply:
    """Make the server send new files of a run, or of all runs for ""."""
    request = MirrorPassRequest(context.config.name, context.lab_id, run_id)
    return context.open_agent(server).call(MIRROR_NOW, request, timeout_s=LONG_S)


def restore_run(context: LabContext, server: Server, run_id: str) -> RestoreRunReply:
    """Make the server restore a run from the store. NotFoundError if the store has none of it."""
    config = context.config
    request = RestoreRunRequest(config.name, context.lab_id, run_id, config.store)
    return context.open_agent(server).call(RESTORE_RUN, request, timeout_s=LONG_S)


def _warn(context: LabContext, problem: str, hint: str = "") -> None:
    text = f"results cannot be mirrored to {context.config.store}: {problem}"
    if hint:
        text = add_next(text, hint)
    elif context.subject.kind == "lab":
        text += "; instead: labctl pull --follow"
    context.reporter.emit(UniqueNote(text=text, level="warning"))


def _find_detour(endpoint: Endpoint) -> str:
    if endpoint.jump or endpoint.proxy_command:
        return "your connection uses a jump host, which the server cannot use"
    return ""


def _context(context: LabContext) -> StoreContext:
    mirror = Path(__file__).parents[1] / "agent" / "mirror"

    def settle_host_key(endpoint: Endpoint) -> Endpoint:
        return context.connections.settle_host_key(endpoint, context.reporter)

    def resolve_alias(host: str) -> Endpoint:
        try:
            return context.connections.user_config.resolve_alias(host)
        except LabError:
            return Endpoint(host=host, port=22, user=find_user_name())

    return StoreContext(
        connect=context.connections.connect,
        settle_host_key=settle_host_key,
        resolve_alias=resolve_alias,
        gateway=(mirror / "ssh_gateway.py").read_bytes(),
        keys=(mirror / "authorized_keys.py").read_bytes(),
        profile=find_s3_profile(context.provider),
    )
