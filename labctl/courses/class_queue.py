"""The queue of a class whose engine is Slurm: its accounts' limits, hours, jobs and use of GPUs."""

from __future__ import annotations

import time
from collections.abc import Sequence

from labctl.commands import slurm_accounting, slurm_jobs, slurm_nodes, slurm_reservations
from labctl.commands.root import NO_ROOT_EXIT_CODE, as_root
from labctl.commands.slurm_accounting import ClassAccounting, ClassLimits
from labctl.config import CourseConfig
from labctl.courses.records import timetable
from labctl.courses.records.folder import CourseFolder
from labctl.courses.records.gpu_minutes import record_gpu_minutes
from labctl.courses.seat_accounts import SeatAccounts
from labctl.courses.seat_reporter import make_quiet_reporter
from labctl.errors import BusyError, LabError
from labctl.errors.replies import describe_error
from labctl.events import Note, UniqueNote
from labctl.model import Server
from labctl.servers.context import LabContext
from labctl.servers.shared_server import set_up_queue
from labctl.text import add_next
from labctl.transports import Transport

# Seconds for all changes: those of a class of hundreds, and jobs that end first.
APPLY_S = 300.0
QUERY_S = 60.0
# Prints the reservations of a machine that may have no Slurm.
IF_SLURM = f"if command -v scontrol >/dev/null; then {slurm_reservations.build_query()}; fi"


class ClassQueue:
    """The queue on a course's server. The course's folder says who may use it, and how much."""

    def __init__(self, folder: CourseFolder, seating: SeatAccounts) -> None:
        self.folder = folder
        self.seating = seating

    def update(self, context: LabContext, server: Server, new_accounts: Sequence[str] = ()) -> int:
        """Give every account of the roster its association and limits, and nobody else.

        Returns the number of changes; a second call makes none. An account that has ended, or that
        another process brings back, keeps its association, and can submit no jobs: without it, its
        used minutes would be forgotten.
        """
        labs = {seat.lab_id for seat in self.folder.list_seats()}
        accounts = [account for account in self.seating.list_all() if account.lab_id in labs]
        names = {account.account for account in accounts}
        # A student who returns has the same account again.
        there = {account.account for account in accounts if account.state == "there"}
        ended = names - there - set(new_accounts)
        config = self.folder.config
        changes = update_accounting(context, server, config, sorted(names), sorted(ended))
        try:
            return changes + self.reserve_hours(context, server)
        except BusyError:
            raise
        except LabError as error:
            # For example, staff have reserved the machines for maintenance: students still get in.
            text = f"class hours are not reserved in Slurm: {describe_error(error)}"
            context.reporter.emit(Note(text=text, level="warning"))
            return changes

    def reserve_hours(self, context: LabContext, server: Server) -> int:
        """Reserve the machines for the class hours of the next days, and no other hours.

        Returns the number of changes; a second call makes none.
        """
        return self._update_reservations(context, server, None)

    def release_hours(self, context: LabContext, server: Server) -> None:
        """End all reservations of the course. A failure is only reported."""
        try:
            self._update_reservations(context, server, [])
        except LabError as error:
            self.report_reserved(context, error)

    def correct_hours(self, context: LabContext, transport: Transport, *, release: bool) -> None:
        """Remove reservations that should not be there from a machine that is not in use now.

        With `release`, that is all of the course. Others get the right times; none is added. A
        failure is only reported.
        """
        try:
            output = transport.run(as_root(IF_SLURM), timeout_s=QUERY_S).stdout
            changes = self._list_changes(output, [] if release else None, can_create=False)
            if changes:
                transport.run(as_root(" && ".join(changes)), timeout_s=APPLY_S)
        except LabError as error:
            self.report_reserved(context, error)

    def report_reserved(self, context: LabContext, error: LabError) -> None:
        """Say that hours may still be reserved."""
        text = (
            f"class hours may still be reserved in Slurm: {describe_error(error)}; "
            "scontrol show reservation lists them"
        )
        context.reporter.emit(Note(text=text, level="warning"))

    def _update_reservations(
        self, context: LabContext, server: Server, hours: Sequence[tuple[float, float]] | None
    ) -> int:
        output = _run(context, server, slurm_reservations.build_query(), QUERY_S)
        changes = self._list_changes(output, hours)
        if changes:
            _run(context, server, " && ".join(changes), APPLY_S)
        return len(changes)

    def _list_changes(
        self,
        output: str,
        hours: Sequence[tuple[float, float]] | None,
        *,
        can_create: bool = True,
    ) -> list[str]:
        """List the commands that turn the reservations of `output` into these hours.

        If `hours` is None, they are the class hours of the next days.
        """
        config, now = self.folder.config, time.time()
        if hours is None:
            lessons = timetable.list_lessons(config.hours, config.term, now, config.holidays)
            hours = [(lesson.begins, lesson.ends) for lesson in lessons]
        account = slurm_accounting.class_account(config.name)
        present = slurm_reservations.parse_reservations(output, account)
        wanted = slurm_reservations.build_wanted(account, hours, now)
        return slurm_reservations.build_changes(
            account, wanted, present, now, can_create=can_create
        )

    def update_or_repair(
        self, context: LabContext, server: Server, nodes: Sequence[Server] | None = ()
    ) -> None:
        """Run `update`; if Slurm does not answer, start its stopped daemons and try again.

        If `nodes` is None, this starts nothing and raises the error.
        """
        try:
            self.update(context, server)
        except BusyError:
            if nodes is None:
                raise
            set_up_queue(
                server,
                playbooks_dir=context.paths.data_dir / "playbooks",
                connections=context.connections,
                reporter=make_quiet_reporter(context.reporter),
                nodes=nodes,
            )
            self.update(context, server)

    def close(self, context: LabContext, server: Server, names: Sequence[str]) -> None:
        """Let accounts that end submit no jobs, and cancel those they have.

        What they have used stays counted. A failure is only reported: the end of an account kills
        its processes in any case, and the next `update` tries again.
        """
        course = self.folder.config.name
        try:
            users = read_accounting(context, server, course).users or ()
            if known := [name for name in names if any(user.name == name for user in users)]:
                account = slurm_accounting.class_account(course)
                _run(context, server, slurm_accounting.build_close(account, known), APPLY_S)
        except LabError as error:
            text = (
                f"jobs of {', '.join(names)} may still be in the queue: {describe_error(error)}; "
                "labctl course up cancels them"
            )
            context.reporter.emit(Note(text=text, level="warning"))

    def report_unavailable(self, context: LabContext, server: Server) -> None:
        """Name the machines that get no jobs, and why; none if Slurm does not answer.

        LabError if the login fails. `ClusterSession` names those that labctl takes out of the
        cluster.
        """
        nodes = slurm_nodes.parse_nodes(_run(context, server, slurm_nodes.build_query(), QUERY_S))
        for name, state in nodes.unavailable.items():
            if nodes.is_removed(name):
                continue
            why = ", by ".join(part for part in (state.reason, state.user) if part)
            text = f"Slurm starts no jobs on {name} ({state.name})" + (f": {why}" if why else "")
            where = f"as root on {server.endpoint.host}, after you repaired the cause"
            again = f"{slurm_nodes.build_resume(name)}   # {where}"
            context.reporter.emit(UniqueNote(text=add_next(text, again), level="warning"))

    def record_gpu_minutes(self, context: LabContext, server: Server) -> None:
        """Record what each account has used, and its jobs. LabError if Slurm does not answer."""
        account = slurm_accounting.class_account(self.folder.config.name)
        queries = (slurm_accounting.build_query(account), slurm_jobs.build_query(account))
        output = _run(context, server, " && ".join(queries), QUERY_S)
        users = slurm_accounting.parse_accounting(output.partition(slurm_jobs.HEADING)[0]).users
        record_gpu_minutes(self.folder.private, users or (), slurm_jobs.parse_jobs(output))


def build_limits(config: CourseConfig) -> ClassLimits:
    """Return the limits that course.yaml gives each account."""
    shared = config.shared
    assert shared is not None, "used only for courses with shared servers"
    return ClassLimits(gpus=shared.gpus, gpu_minutes=shared.gpu_minutes, wall_s=shared.wall)


def read_accounting(context: LabContext, server: Server, course: str) -> ClassAccounting:
    """Return what Slurm on the server has of the class. LabError if it does not answer."""
    account = slurm_accounting.class_account(course)
    output = _run(context, server, slurm_accounting.build_query(account), QUERY_S)
    return slurm_accounting.parse_accounting(output)


def update_accounting(
    context: LabContext,
    server: Server,
    config: CourseConfig,
    names: Sequence[str],
    ended: Sequence[str] = (),
) -> int:
    """Give these accounts their associations and limits, and take them from all others.

    Those of `ended` can submit no jobs. Returns the number of changes; a second call makes none.
    LabError if Slurm refuses one.
    """
    account, limits = slurm_accounting.class_account(config.name), build_limits(config)
    present = read_accounting(context, server, config.name)
    changes = slurm_accounting.build_changes(account, limits, names, present, ended)
    if changes:
        _run(context, server, " && ".join(changes), APPLY_S)
        present = read_accounting(context, server, config.name)
        if slurm_accounting.build_changes(account, limits, names, present, ended):
            raise LabError(
                f"Slurm on {server.alias} did not take over the limits of {config.name}",
                why="its accounting differs from course.yaml after the change",
                hint=f"sacctmgr show assoc account={account}   # on {server.endpoint.host}",
            )
    return len(changes)


def _run(context: LabContext, server: Server, script: str, timeout_s: float) -> str:
    """Run a script on the server as root, and return what it prints.

    BusyError if Slurm does not answer there, LabError if the script fails for another reason.
    """
    transport = context.connections.open(server)
    result = transport.run(as_root(script), timeout_s=timeout_s, check=False)
    if result.code:
        why = result.stderr.strip()[-1000:] or result.stdout.strip()[-1000:]
        if result.code == NO_ROOT_EXIT_CODE:
            raise LabError(
                f"{server.endpoint.user} is not root on {server.alias}",
                why=f"{why}\nthe account there must be root, or use sudo without a password",
                hint=f"sudo -n true   # as {server.endpoint.user} on {server.endpoint.host}",
            )
        answer = transport.run(as_root(slurm_accounting.PROBE), timeout_s=QUERY_S, check=False)
        if answer.code == slurm_accounting.NO_ANSWER:
            raise BusyError(
                f"Slurm on {server.alias} does not answer",
                why=answer.stderr.strip()[-1000:] or why,
                hint=f"systemctl status slurmctld slurmdbd   # on {server.endpoint.host}",
            )
        raise LabError(
            f"Slurm on {server.alias} does not do what {context.name} needs",
            why=why,
            hint=f"sacctmgr show assoc; squeue   # as root on {server.endpoint.host}",
        )
    output: str = result.stdout
    return output
