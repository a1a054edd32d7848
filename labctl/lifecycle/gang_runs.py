"""A run on all servers of a lab: claimed on each, then started, and cancelled on all of them.

The part on the server of rank 0 is the run that users see. It is created first and chooses the port
at which the processes meet, so that a repeated start uses the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from labctl.errors import ConnectError, LabError, NotFoundError, UsageError
from labctl.events import Part
from labctl.lifecycle import gang, gang_network, restore
from labctl.lifecycle.fleet import run_for_each
from labctl.model import Run, Server
from labctl.runs import first_run, provenance, run_specs, runs
from labctl.servers import adoption
from labctl.servers.context import LabContext
from labctl.state import LedgerEntry
from labctl.state.ledgers import CANCELED, HANDED, KEPT
from labctl.sync import lab_files, transfer_lock
from labctl.sync.transfer_lock import share_transfers
from labctl.text import names_text
from labctl.wire.runs import GangMember, RunSpec, StartRunReply

# seconds between SIGTERM and SIGKILL: the others can save nothing, since they wait for one another
GRACE_S = 10
# Kind of the ledger's line that says on how many servers a run is.
PARTS = "parts"
# Creates, or finds, a server's part of a run.
CreatePart = Callable[[LabContext, Server, RunSpec, GangMember], GangMember]


def require_one_server(context: LabContext, what: str, instead: str) -> None:
    """UsageError if the lab has several servers, and `what` can only use one."""
    if gang.has_several_servers(context):
        raise UsageError(
            f"{what} needs a lab with one server",
            why="lab.yaml has `count:` under `server`",
            hint=instead,
        )


def require_supported(context: LabContext, *, tty: bool, gpus: int) -> None:
    """UsageError for options of `labctl run` that only a run on one server can have."""
    for option, is_set, instead in (
        ("-it", tty, "labctl run --detach\nlabctl exec -- bash   # a terminal beside the run"),
        ("--gpus", bool(gpus), f"write `launch: {{with: torchrun, per_server: {gpus}}}`"),
    ):
        if is_set:
            require_one_server(context, option, instead)


@contextmanager
def hold_watch(context: LabContext, what: str) -> Iterator[None]:
    """Hold the lock of the one process here that ends, restarts and recovers the lab's runs.

    LockHeldError, without a wait, if another process has it.
    """
    with context.state.lock(f"{context.lab_id}-watch", what, wait_s=0.0):
        yield


def count_parts(context: LabContext, run_id: str) -> int:
    """Return on how many servers the run was started; 1 for any other run."""
    lines = context.state.list_events(lab_id=context.lab_id, run_id=run_id, kind=PARTS, limit=1)
    return int(lines[0].detail["count"]) if lines else 1


def needs_restart(context: LabContext, run: Run, *, recover: bool) -> bool:
    """Whether the next attempt of a run must start on all servers, instead of the first one.

    That is so if only some parts have ended, since a process died while it started the run again;
    with `recover`, also after a failure that ended all.
    """
    count = count_parts(context, run.id)
    if count == 1:
        return False

    def fetch(one: LabContext) -> Run | None:
        server = one.state.get_lab_server(one.lab_id)
        record = runs.fetch_run(one, server, run.id) if server else None
        return runs.record_run(one, server, record) if server and record else None

    parts = [outcome.value for outcome in run_for_each(gang.build_members(context, count), fetch)]
    first = parts[0]
    if first is not None and first.state == "starting" and None in parts:
        return False  # the first start was interrupted, and can be completed
    if first is not None and (first.exit_code == 0 or first.state == "cancelled"):
        return False
    have_ended = [part is None or part.has_ended for part in parts]
    return recover if all(have_ended) else any(have_ended)


def start(
    context: LabContext,
    command: tuple[str, ...],
    run_id: str,
    *,
    push: bool,
    on_start: Callable[[Run, bool], None],
) -> Run:
    """Start the run on all servers exactly once, or find it; return the part of rank 0.

    Repeated after an interrupt at whatever moment, this completes the start.
    """
    members = gang.build_members(context)
    first = members[0]
    specs = gang.call_for_each(members, partial(_build_spec, command=command, run_id=run_id))
    by_id = {spec.lab_id: spec for spec in specs}
    if push:
        with share_transfers():
            gang.call_for_each(members, lambda one: _push(one, by_id[one.lab_id]))
    replies: dict[str, StartRunReply] = {}
    with provenance.GitQuery(context.config.root) as git:

        def create(
            one: LabContext, server: Server, spec: RunSpec, member: GangMember
        ) -> GangMember:
            reply = replies[one.lab_id] = runs.create_held(one, server, spec, member)
            if one is first and not reply.found:
                # What a restart needs is the code of the run, whatever is edited meanwhile.
                restore.keep_code(first, spec)
                detail = {"count": len(members)}
                context.state.record(PARTS, lab_id=first.lab_id, run_id=run_id, detail=detail)
                provenance.record_origin(first, runs.find_run(first, run_id), spec, git)
            return reply.member or member

        context.reporter.emit(Part(name="start"))
        run = start_parts(members, by_id, create)
        context.reporter.emit(Part(name="start", done=True))
    on_start(run, replies[first.lab_id].found)
    return run


def _build_spec(context: LabContext, command: tuple[str, ...], run_id: str) -> RunSpec:
    server = context.get_server()
    adoption.renew(context, server)
    return run_specs.build_spec(context, server, command, run_id, tty=False)


def _push(context: LabContext, spec: RunSpec) -> None:
    server = context.get_server()
    with transfer_lock.name_command("run"):
        if first_run.has_run_on_server(context, server, spec.image):
            lab_files.push(context, server, force=False)
        else:
            first_run.push_with_image(context, server, spec.image)


def start_parts(
    members: Sequence[LabContext], specs: dict[str, RunSpec], create: CreatePart
) -> Run:
    """Create the next attempt on every server, then start all of them; return that of rank 0.

    `specs` are by lab id. Nothing starts before all of them exist, that of rank 0 starts last, and
    if one cannot start, all are ended.
    """
    first, *others = members
    run_id = specs[first.lab_id].id
    addresses = gang_network.connect(members)
    meeting = GangMember(0, len(members), addresses[0].address, addresses[0].port)

    def create_part(one: LabContext, meeting: GangMember) -> GangMember:
        rank = one.rank or 0
        part = meeting._replace(rank=rank, interface=addresses[rank].interface)
        return create(one, one.get_server(), specs[one.lab_id], part)

    def start_part(one: LabContext) -> Run:
        return runs.start_held(one, one.get_server(), run_id)

    # A part of rank 0 that exists already has its port. If it has begun, all others had before it.
    meeting = create_part(first, meeting)
    run = runs.find_run(first, run_id)
    if run.state != "starting":
        return run
    if meeting.address != addresses[0].address:
        _end_outdated_start(members, run_id, meeting.address, addresses[0].address)
    try:
        gang.call_for_each(others, lambda one: create_part(one, meeting))
        gang.call_for_each(others, start_part)
        return start_part(first)
    except ConnectError:
        raise  # a repeated call completes the start
    except LabError as error:
        end_parts(members, run_id, f"not all servers could start it: {error.what}")
        raise


def _end_outdated_start(members: Sequence[LabContext], run_id: str, old: str, new: str) -> None:
    """End a start that was interrupted before the servers' network changed; raise LabError."""
    end_parts(members, run_id, "the network of the servers has changed")
    raise LabError(
        f"run {run_id} cannot start",
        why=f"its first start was interrupted, and the servers meet at {new} now instead of {old}",
        hint="labctl run   # starts it under another id",
    )


def cancel(members: Sequence[LabContext], run_id: str, grace_s: int) -> tuple[Run, bool]:
    """Cancel the run on all of these servers; return the part of rank 0, and whether it had ended.

    A process that starts it again meanwhile learns of it from the ledger. An error is raised after
    all servers have been tried, and names those on which the run may go on.
    """
    first = members[0]
    first.state.record(CANCELED, lab_id=first.lab_id, run_id=run_id)

    def cancel_part(one: LabContext) -> tuple[Run, bool]:
        return runs.cancel(one, one.get_server(), run_id, grace_s)

    outcomes = run_for_each(members, cancel_part)
    parts = [outcome.value for outcome in outcomes if outcome.value is not None]
    failed = [outcome for outcome in outcomes if outcome.error is not None]
    if parts:
        # A start that was interrupted has created the run on some servers only.
        failed = [each for each in failed if not isinstance(each.error, NotFoundError)]
    if failed:
        error = next(each.error for each in failed if each.error is not None)
        names = [each.context.config.name for each in failed]
        text = f"the run may still be active on {names_text(names, 5)}"
        error.why = "\n".join(filter(None, [error.why, text]))
        raise error
    return parts[0]


def find_last_line(context: LabContext, run_id: str, kind: str) -> LedgerEntry | None:
    """Find the last line of this kind about the run in the ledger."""
    lines = context.state.list_events(lab_id=context.lab_id, run_id=run_id, kind=kind, limit=1)
    return lines[0] if lines else None


def is_canceled(context: LabContext, run_id: str) -> bool:
    """Whether a user has canceled the run since it was handed over to a keeper."""
    canceled = find_last_line(context, run_id, CANCELED)
    handed_over = [find_last_line(context, run_id, kind) for kind in (HANDED, KEPT)]
    return canceled is not None and all(
        line is None or line.number < canceled.number for line in handed_over
    )


def is_canceled_since(context: LabContext, run_id: str, at: float) -> bool:
    """Whether a user has canceled the run here after `at` (Unix time)."""
    line = find_last_line(context, run_id, CANCELED)
    return line is not None and line.at >= at


def end_parts(members: Sequence[LabContext], run_id: str, reason: str) -> None:
    """End the parts of a run that has failed elsewhere, on the servers that answer."""

    def end(context: LabContext) -> None:
        server = context.state.get_lab_server(context.lab_id)
        with suppress(LabError):
            if server is not None:
                runs.cancel(context, server, run_id, GRACE_S, reason)

    run_for_each(members, end)
