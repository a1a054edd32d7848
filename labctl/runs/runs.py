"""Start runs exactly once, follow them across lost connections, query and cancel them."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, cast

import msgspec

from labctl.config import copy_environment, read_secret_values, require_secret_names
from labctl.config.reader import find_nearest
from labctl.decoding import convert_value
from labctl.errors import (
    ConnectError,
    HostKeyError,
    InterruptError,
    LabError,
    NotFoundError,
)
from labctl.events import Note, Part, RepeatedNote, Step, report_part, report_wait
from labctl.model import Run, RunState, Server
from labctl.retry import ReconnectPolicy
from labctl.runs import images, provenance
from labctl.runs.active_runs import describe_runs_beside
from labctl.runs.environment import describe_install, describe_unused_dockerfile
from labctl.servers.agent import AgentClient
from labctl.servers.context import LabContext
from labctl.text import duration_text
from labctl.wire.runs import (
    CANCEL_RUN,
    DOCKER,
    FOLLOW_RUN,
    RUN,
    START_HELD,
    START_RUN,
    STATUS,
    CancelRunRequest,
    FollowRunOpening,
    FollowRunRequest,
    GangMember,
    RunRecord,
    RunRequest,
    RunSpec,
    StartRunReply,
    StartRunRequest,
    StatusReply,
    StatusRequest,
)

# name of the wait for a connection to a followed run's server
CUT = "connection lost"


def start(
    context: LabContext,
    server: Server,
    wanted: RunSpec,
    *,
    follow: bool,
    held: bool = False,
    on_start: Callable[[Run, bool], None],
    on_log: Callable[[bytes], None],
    describe_beside: Callable[[Sequence[str]], str] = describe_runs_beside,
) -> Run:
    """Start (or find) the run, and with `follow` pass on its log until it ends.

    If other runs of the lab are active, the user gets what `describe_beside` makes of their ids.

    With `held`, its container is created and waits for `docker start`. After a lost connection, at
    whatever moment, this finds the same run again. KeyboardInterrupt passes through and does not
    stop the run.
    """
    package_file = context.config.image.environment_file
    price = server.offer.price_usd_per_hour
    if text := describe_install(wanted.command, price, package_file):
        context.reporter.emit(Note(text=text))
    if text := describe_unused_dockerfile(context.config):
        context.reporter.emit(Note(text=text))
    with provenance.GitQuery(context.config.root) as git:
        request = StartRunRequest(wanted, read_secrets(context), held)
        return _start(context, server, request, git, follow, on_start, on_log, describe_beside)


def create_held(
    context: LabContext, server: Server, spec: RunSpec, member: GangMember
) -> StartRunReply:
    """Claim and create a server's part of a run on several servers, or find it; start nothing."""
    remote = context.open_agent(server)
    request = StartRunRequest(spec, read_secrets(context), held=True, member=member)
    for _ in range(2):
        reply = remote.call(START_RUN, request)
        if reply.run is not None:
            record_run(context, server, reply.run)
            return reply
        images.ensure_image(context, server, remote, spec.image)
    raise make_missing_image_error(spec.image)


def start_held(context: LabContext, server: Server, run_id: str) -> Run:
    """Start a server's part of a run that `create_held` created; return it as it is then."""
    request = RunRequest(context.config.name, context.lab_id, run_id)
    reply = context.open_agent(server).call(START_HELD, request)
    assert reply.run is not None
    return record_run(context, server, reply.run)


def make_missing_image_error(image: str) -> LabError:
    return LabError(
        f"the server does not have {image}, although it was just built", hint="labctl doctor"
    )


def _start(
    context: LabContext,
    server: Server,
    request: StartRunRequest,
    git: provenance.GitQuery,
    follow: bool,
    on_start: Callable[[Run, bool], None],
    on_log: Callable[[bytes], None],
    describe_beside: Callable[[Sequence[str]], str],
) -> Run:
    remote = context.open_agent(server)
    wanted = request.spec
    log = _LogStream(on_log)

    def on_reply(reply: StartRunReply) -> None:
        context.reporter.emit(Part(name="start", done=True))
        if reply.run is not None:
            run = record_run(context, server, reply.run)
            log.is_started = True
            on_start(run, reply.found)
            if reply.active:
                context.reporter.emit(Note(text=describe_beside(reply.active)))
            provenance.record_origin(context, run, wanted, git)

    for _ in range(2):
        context.reporter.emit(Part(name="start"))
        try:
            if follow:
                closing = remote.stream(RUN, request, on_reply=on_reply, on_bytes=log.feed)
            else:
                closing = remote.call(START_RUN, request)
                on_reply(closing)
        except ConnectError as error:
            if not log.is_started:
                raise
            _report_cut(context, error, "reconnecting")
            return watch(context, server, wanted.id, offset=log.offset, on_log=on_log)
        if closing.run is not None:
            return record_run(context, server, closing.run)
        with report_part(context.reporter, "image"):
            images.ensure_image(context, server, remote, wanted.image)
    raise make_missing_image_error(wanted.image)


def read_secrets(context: LabContext) -> dict[str, str]:
    """Return the values of lab.yaml's secrets; they are sent on standard input only."""
    lab_id = _get_secrets_owner(context)
    values = read_secret_values(context.paths, lab_id, context.config, copy_environment())
    return {name: value.reveal() for name, value in values.items()}


def require_secrets(context: LabContext) -> None:
    """LabError if a secret of lab.yaml has no value, also before the file was approved."""
    lab_id = _get_secrets_owner(context)
    require_secret_names(context.paths, lab_id, context.config, copy_environment())


def _get_secrets_owner(context: LabContext) -> str:
    # The other servers of a lab that has several get the secrets of the lab.
    return context.group if context.rank else context.lab_id


class _LogStream:
    """Passes on a run's log and counts its bytes, so that a new connection can continue it."""

    def __init__(self, on_log: Callable[[bytes], None], offset: int = 0) -> None:
        self.on_log = on_log
        self.offset = offset
        self.is_started = False

    def feed(self, block: bytes) -> None:
        self.offset += len(block)
        self.on_log(block)


def refresh_address(context: LabContext, server: Server) -> None:
    """Record the server's current address from its provider, if the host key is unchanged."""
    try:
        current = context.provider.find(server.id)
    except LabError:
        return  # this machine may be offline; the next lost connection tries again
    if current is not None:
        record_address(context, server, current)


def watch(
    context: LabContext,
    server: Server,
    run_id: str,
    *,
    offset: int = 0,
    tail: int = 0,
    follow: bool = True,
    process: int = 0,
    on_log: Callable[[bytes], None],
    on_cut: Callable[[LabContext, Server], None] = refresh_address,
) -> Run:
    """Follow a run's log from byte `offset` (or `tail` lines before the end), and reconnect.

    `on_cut` is called at each lost connection: it records the server's address if that has changed,
    and may raise to stop. It is called for a wrong host key, too, since a cloud gives the address
    of an ended server to another machine. `process` is that of torchrun on this server. Returns the
    run at the end of its log.
    """
    request = FollowRunRequest(
        *(context.config.name, context.lab_id, run_id, offset, tail, follow), process=process
    )
    log = _FollowedLog(context, server, request, on_log)
    if not follow:
        return log.stream(on_connect=lambda: None)

    def handle_cut(error: LabError, pause_s: float) -> None:
        on_cut(context, log.server)
        if isinstance(error, HostKeyError) and not has_moved(context, log.server):
            raise error
        _report_cut(context, error, f"reconnecting in {pause_s:g} s")

    def handle_connect() -> None:
        policy.reset()
        context.reporter.emit(Step(name=CUT, done=True, brief=True))

    policy = ReconnectPolicy((ConnectError, HostKeyError), on_cut=handle_cut)
    return policy(lambda: log.stream(on_connect=handle_connect))


def _report_cut(context: LabContext, error: LabError, next_step: str) -> None:
    """Say that the connection is lost. What matters comes first: a narrow screen cuts the end."""
    text = f"the run is still active, {next_step}: {error.what}"
    context.reporter.emit(RepeatedNote(text=text, level="warning", name=CUT))


class _FollowedLog(_LogStream):
    """The log of a run that may move to another server; `stream` continues where it ended."""

    def __init__(
        self,
        context: LabContext,
        server: Server,
        request: FollowRunRequest,
        on_log: Callable[[bytes], None],
    ) -> None:
        super().__init__(on_log, request.offset)
        self.server, self._context, self._request = server, context, request

    def stream(self, *, on_connect: Callable[[], None]) -> Run:
        """Pass on the log until it ends, and return the run."""
        context = self._context
        server = self.server = _find_current_server(context, self.server, self._request.run)

        def on_reply(reply: FollowRunOpening) -> None:
            on_connect()
            self.offset = reply.offset
            attempt = record_run(context, server, reply.run).container
            self._request = self._request._replace(tail=0, attempt=attempt)

        request = self._request._replace(offset=self.offset)
        agent = context.open_agent(server)
        closing = agent.stream(FOLLOW_RUN, request, on_reply=on_reply, on_bytes=self.feed)
        return record_run(context, server, closing.run)


def _find_current_server(context: LabContext, server: Server, run_id: str) -> Server:
    """Return the server with its newest address, or the one that the run was recovered on."""
    current = context.state.get_lab_server(context.lab_id)
    run = context.state.get_run(context.lab_id, run_id)
    moved = current and run and run.server_id == current.id
    return current if current and (moved or current.id == server.id) else server


def has_moved(context: LabContext, server: Server) -> bool:
    """Whether the recorded address of a server is no longer the one that `server` has."""
    current = context.state.get_server(server.id)
    return current is not None and current.endpoint != server.endpoint


def record_address(context: LabContext, server: Server, current: Server) -> None:
    """Record the address of a recorded `server` if it runs and its host key is unchanged.

    `current` is the same server as its provider describes it now.
    """
    if current.state != "running" or not current.endpoint.port:
        return
    old, new = server.endpoint, current.endpoint
    same_key = new.host_key in (old.host_key, old.next_host_key)
    if same_key and (new.host, new.port) != (old.host, old.port):
        context.state.save_server(context.assign_alias(current, server))


def cancel(
    context: LabContext, server: Server, run_id: str, grace_s: int, reason: str = ""
) -> tuple[Run, bool]:
    """Send SIGTERM, then SIGKILL after `grace_s` seconds; return (run, whether it had ended).

    With a `reason`, the run counts as failed for that reason.
    """
    remote = context.open_agent(server)
    request = CancelRunRequest(context.config.name, context.lab_id, run_id, grace_s, reason)
    limit = f"at most {duration_text(grace_s)} for a checkpoint"
    with report_wait(context.reporter, f"canceling {run_id}", limit):
        reply = remote.call(CANCEL_RUN, request, timeout_s=grace_s + 60.0)
    return record_run(context, server, reply.run), reply.already


def stop_to_move(context: LabContext, server: Server, run_id: str, grace_s: int) -> Run:
    """Stop a run as `cancel` does, so that another server can resume it: it is lost then.

    A run that ends by itself meanwhile has ended.
    """
    request = CancelRunRequest(context.config.name, context.lab_id, run_id, grace_s, moves=True)
    limit = f"at most {duration_text(grace_s)} for a checkpoint"
    with report_wait(context.reporter, f"stopping {run_id}", limit):
        reply = context.open_agent(server).call(CANCEL_RUN, request, timeout_s=grace_s + 60.0)
    return record_run(context, server, reply.run)


def cancel_interrupted(cancel: Callable[[], Run], name: str) -> InterruptError:
    """Cancel a run that nobody waits for after Ctrl-C, and return the error that says so.

    The server may not have the run yet: Ctrl-C can come while its image is built.
    """
    try:
        cancel()
    except NotFoundError:
        return InterruptError(f"interrupted before the {name} run started")
    return InterruptError(f"interrupted; the {name} run was canceled")


def refresh(context: LabContext, server: Server, remote: AgentClient | None = None) -> StatusReply:
    """Fetch and record all runs of the server in one request; return the full reply."""
    remote = remote or context.open_agent(server)
    reply = remote.call(STATUS, StatusRequest(context.config.name, context.lab_id))
    for record in reply.runs:
        record_run(context, server, record)
    return reply


def fetch_run(context: LabContext, server: Server, run_id: str) -> RunRecord | None:
    """Fetch the run's state from the server; None if the server does not have the run."""
    request = StatusRequest(context.config.name, context.lab_id, (run_id,))
    reply = context.open_agent(server).call(STATUS, request)
    return next((record for record in reply.runs if record.id == run_id), None)


def record_run(context: LabContext, server: Server, record: RunRecord) -> Run:
    """Record a run from the agent's reply and return it."""
    run = to_run(record, server.id)
    context.state.save_run(run)
    return run


def to_run(record: RunRecord, server_id: str) -> Run:
    """Build a Run from the agent's reply; a claimed run that is not launched counts as starting."""
    state = "starting" if record.state == "claimed" else record.state
    return Run(
        id=record.id,
        lab_id=record.lab_id,
        server_id=server_id,
        state=convert_value(state, cast(Any, RunState)),
        command=record.command,
        image=record.image,
        exit_code=record.exit_code,
        summary=record.summary,
        created_at=record.created_at,
        started_at=record.started_at,
        ended_at=record.ended_at,
        container=record.container,
        progress=record.progress,
        new_files=record.new_files,
        seen_at=time.time(),
        stopped_by=record.stopped_by,
        image_id=record.image_id,
        image_digest=record.image_digest,
        gpu_lost_at=record.gpu_lost_at,
        oom_limit_bytes=msgspec.UNSET if record.oom_limit_bytes is None else record.oom_limit_bytes,
        executor=msgspec.UNSET if record.executor == DOCKER else record.executor,
        has_checkpoints=record.has_checkpoints or msgspec.UNSET,
    )


def find_run(context: LabContext, run_id: str = "", *, besides: Collection[str] = ()) -> Run:
    """Return the run with this name, or the lab's latest; NotFoundError if none exists.

    The error suggests none of `besides`, the other runs that the user named.
    """
    run = context.state.get_run(context.lab_id, run_id) if run_id else _find_latest(context)
    if run is not None:
        return run
    if not run_id or context.state.get_latest_run(context.lab_id) is None:
        call = "labctl run" if context.state.get_lab_server(context.lab_id) else "labctl run --up"
        hint = call if context.config.run else f"{call} -- COMMAND"
        raise NotFoundError(f"{context.name} has no runs yet", hint=hint)
    near = find_similar_name(context, run_id, besides)
    what = f"there is no run {run_id}" + (f"; did you mean {near}?" if near else "")
    raise NotFoundError(what, hint="labctl status --all", typed=run_id, near=near)


def require_known_without_server(context: LabContext, run_id: str) -> None:
    """NotFoundError if a run to recover is unknown, resembles another, and has no server.

    With a server, the id is that of a new run.
    """
    if context.state.get_lab_server(context.lab_id) or context.state.get_run(
        context.lab_id, run_id
    ):
        return
    if near := find_similar_name(context, run_id):
        raise NotFoundError(
            f"there is no run {run_id}; did you mean {near}?",
            why=f"{context.name} has no server to start a new run on",
            hint=f"labctl run --recover --id {near}",
            typed=run_id,
            near=near,
        )


def find_similar_name(context: LabContext, typed: str, besides: Collection[str] = ()) -> str:
    """Return the newest run whose name begins with `typed`, or one with a similar name, or "".

    Runs in `besides` are left out.
    """
    recorded = [run.id for run in reversed(context.state.list_runs(context.lab_id))]
    names = [name for name in recorded if name not in besides]
    return next((name for name in names if name.startswith(typed)), find_nearest(typed, names))


def _find_latest(context: LabContext) -> Run | None:
    """Return the latest run; a shell that has ended has no results, and counts if nothing else."""
    newest = context.state.get_latest_run(context.lab_id)
    if newest is None or not (newest.is_auxiliary or _is_ended_shell(newest)):
        return newest
    normal = [run for run in context.state.list_runs(context.lab_id) if not run.is_auxiliary]
    trained = [run for run in normal if not _is_ended_shell(run)]
    return next(reversed(trained or normal), None)


def _is_ended_shell(run: Run) -> bool:
    return run.has_ended and run.is_shell_session
