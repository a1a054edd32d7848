"""Upkeep of the queue of a course whose engine is Slurm: machines, limits, hours and minutes."""

from __future__ import annotations

from collections.abc import Iterator

from labctl.courses.cluster_session import ClusterSession
from labctl.courses.seat_accounts import SharedServerAccount
from labctl.courses.shared_servers import SharedServers, make_account
from labctl.errors import LabError
from labctl.model import Server
from labctl.servers import guard
from labctl.servers.context import LabContext
from labctl.servers.named_machines import list_machine_names, open_machine
from labctl.servers.shared_server import SharedAccount


class QueueUpkeep:
    """Repeated tasks for shared servers whose engine is Slurm; does nothing for other servers."""

    def __init__(self, hosts: SharedServers) -> None:
        self.hosts = hosts

    def update_limits(self) -> None:
        """Give the accounts that exist the limits of course.yaml, if Slurm enforces them.

        Accounts of students who have left the course lose their association in Slurm.
        """
        for number, context, server in self._list_queues():
            with self.hosts.hold_server(number), self.hosts.hold_queue():
                accounts = [each for each in self.hosts.seating.list_all() if each.host == number]
                # Otherwise the first account sets everything up.
                if any(account.state == "there" for account in accounts):
                    others = self._complete_machines(context, server, accounts)
                    self.hosts.queue.update_or_repair(context, server, others)
                    self.hosts.queue.report_unavailable(context, server)

    def _complete_machines(
        self, context: LabContext, server: Server, accounts: list[SharedServerAccount]
    ) -> list[Server] | None:
        """Give machines that lack them Slurm and the accounts: new ones, and those that failed.

        Returns the servers on the other machines of the cluster; None if Slurm cannot be configured
        without one that does not answer.
        """
        if self.hosts.cluster is None:
            return []
        session = self.hosts.cluster.connect()
        there = [account for account in accounts if account.state == "there"]
        ended = {each.account for each in accounts if each.state in ("leaving", "gone")}
        lingering = session.list_lingering(ended - {each.account for each in there})
        incomplete = session.list_incomplete([each.account for each in there], lingering)
        unjoined = session.list_unjoined()
        session.drain_removed(context.reporter)
        if unjoined or incomplete or session.drained_nodes or session.list_returned():
            self._complete_accounts(context, server, session, there, lingering)
        else:
            session.report_failures(context.reporter)
        # Only now: a job that starts where its account does not exist fails.
        session.resume_returned(context.reporter)
        if session.can_configure:
            session.report_removed(context.reporter)
        elif unjoined := session.list_unjoined():
            session.report_unjoined(context.reporter, unjoined)
        # As after `extend` while a machine did not answer.
        watch = guard.read_watchdog(context, server)
        self.hosts.cluster.extend_others(context, watch, session.other_machines)
        if not session.can_configure:
            return None
        servers = self.hosts.cluster.list_other_servers(context)
        recorded = {other.offer.type: other for _, other in servers}
        if recorded.keys() >= set(session.other_machines):
            return [recorded[name] for name in session.other_machines]
        others = self.hosts.cluster.bring_up_others(context, session)
        session.report_failures(context.reporter)
        return others if session.can_configure else None

    def _complete_accounts(
        self,
        context: LabContext,
        server: Server,
        session: ClusterSession,
        there: list[SharedServerAccount],
        lingering: list[str],
    ) -> None:
        """Set up the machines that answer, with the accounts that exist and without ended ones."""
        names = [*(each.account for each in there), *lingering]
        choice = session.set_aside_conflicting(names, self.hosts.sharing.homes)
        choice = session.lock_conflicting(choice, lingering)
        session.report_conflicts(context.reporter, choice)
        self.hosts.ensure_server(1)
        uids = choice.uids
        changes = [make_account(each, uids) for each in there if each.account in uids]
        changes += [SharedAccount(name=name, uid=uids[name]) for name in lingering if name in uids]
        self.hosts.share_accounts(context, server, changes, session, sets_up=True)

    def reserve_hours(self) -> None:
        """Reserve the class hours of the next days in Slurm. LabError if it does not answer.

        Between classes no server may be in use: then hours that changed are only corrected.
        """
        in_use = False
        for _, context, server in self._list_queues():
            in_use = True
            with self.hosts.hold_queue():
                self.hosts.queue.reserve_hours(context, server)
        if not in_use:
            self.correct_hours(release=False)

    def correct_hours(self, *, release: bool) -> None:
        """Correct the reservations on machines that are not in use; with `release`, end them."""
        if not (self.hosts.sharing.has_queue and self.hosts.seating.list_all()):
            return  # nothing was ever reserved
        context = self.hosts.build_context(1)
        with self.hosts.hold_queue():
            for name in list_machine_names(context.provider):
                try:
                    transport = open_machine(context.provider, name)
                except LabError as error:
                    self.hosts.queue.report_reserved(context, error)
                else:
                    self.hosts.queue.correct_hours(context, transport, release=release)

    def record_gpu_minutes(self) -> None:
        """Record what each account has used, and its jobs. LabError if Slurm does not answer."""
        for _, context, server in self._list_queues():
            self.hosts.queue.record_gpu_minutes(context, server)

    def report_unavailable(self) -> None:
        """Name the machines that get no jobs, and why; none if Slurm does not answer."""
        for _, context, server in self._list_queues():
            self.hosts.queue.report_unavailable(context, server)

    def _list_queues(self) -> Iterator[tuple[int, LabContext, Server]]:
        """List the servers on which Slurm runs, with their numbers and contexts."""
        if not self.hosts.sharing.has_queue:
            return
        for number, server in self.hosts.list_servers_by_number(now=True).items():
            context = self.hosts.build_context(number)
            # The record has the alias, and the host key that was pinned.
            yield number, context, context.state.get_server(server.id) or server
