"""The machines of a cluster that answer at the moment, as root, and what they say of themselves.

A machine is named as in course.yaml, where that is its host for SSH. A node is a machine as Slurm
has it, by its host name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from labctl.commands import cluster_accounts, slurm_nodes
from labctl.commands.cluster_accounts import HomeOwners, MachineAccounts, UidConflict
from labctl.commands.slurm_nodes import ClusterNodes
from labctl.errors import HostKeyError, LabError, PolicyError
from labctl.errors.replies import describe_error
from labctl.events import Reporter, UniqueNote
from labctl.text import add_next, count_text, names_text

NAMED = 8
END_ACCOUNTS = (
    "systemctl disable --now slurmd; rm -f /etc/slurm/slurm.conf; "
    "for name in $(getent group labctl | cut -d: -f4 | tr , ' '); do "
    'usermod --groups labctl-ended "$name"; pkill -KILL -u "$name" || true; done'
)
# Uids that are looked up at once: a directory service may have many in a row.
LOOKUP_UIDS = 100

CHECK_COMMAND = "labctl course plan"

# Runs a script as root on one machine, and returns what it prints.
RunAsRoot = Callable[[str], str]


@dataclass(frozen=True)
class UidChoice:
    """The uids of accounts by name, and why others cannot have one.

    `machines` names, for some of those others, the machine that differs from the rest.
    """

    uids: dict[str, int] = field(default_factory=dict)
    errors: dict[str, PolicyError] = field(default_factory=dict)
    machines: dict[str, str] = field(default_factory=dict)


class ClusterSession:
    """The machines of a cluster: `roots` are those that answer, `failures` say why others do not.

    `machines` are the accounts of those that answer, and `slurm` is what the controller has.
    """

    def __init__(self, controller: str) -> None:
        self.controller = controller
        self.roots: dict[str, RunAsRoot] = {}
        self.machines: dict[str, MachineAccounts] = {}
        self.failures: dict[str, LabError] = {}
        self.slurm = ClusterNodes()
        # Of `removed_nodes`, those on which no jobs run any more.
        self.drained_nodes: set[str] = set()

    def add(self, name: str, open_root: Callable[[], RunAsRoot]) -> None:
        """Log in to a machine. An error is raised for the controller, and else recorded."""
        try:
            root = open_root()
            output = root(cluster_accounts.build_inspection())
        except HostKeyError:
            raise  # perhaps it is another machine
        except LabError as error:
            if name == self.controller:
                raise
            self.failures[name] = error
            return
        self.roots[name] = root
        self.machines[name] = cluster_accounts.parse_inspection(output)
        if name == self.controller:
            self.slurm = slurm_nodes.parse_nodes(root(slurm_nodes.build_query()))

    def set_aside(self, machine: str, error: LabError) -> None:
        """Go on without a machine that answers, and cannot be used."""
        self.failures[machine] = error
        del self.roots[machine], self.machines[machine]

    @property
    def is_controller_prepared(self) -> bool:
        return self.machines[self.controller].is_prepared

    def skip_unprepared(self, reporter: Reporter) -> None:
        """Go on without machines that labctl has never prepared: they have no accounts to end."""
        for machine in self.other_machines:
            if not self.machines[machine].is_prepared:
                del self.roots[machine], self.machines[machine]
                text = (
                    f"{machine} was left out: it has never been prepared, so no accounts end there"
                )
                again = f"labctl course up   # prepares {machine}, if the course goes on"
                reporter.emit(UniqueNote(text=add_next(text, again)))

    @property
    def other_machines(self) -> tuple[str, ...]:
        """The machines that answer, without the controller."""
        return tuple(name for name in self.roots if name != self.controller)

    @property
    def unknown_nodes(self) -> list[str]:
        """The nodes of Slurm that are none of the machines that answer."""
        hostnames = {machine.hostname for machine in self.machines.values()}
        return sorted(self.slurm.configured - hostnames)

    @property
    def removed_nodes(self) -> list[str]:
        """The nodes that Slurm has, and course.yaml no longer.

        Empty while a machine of course.yaml does not answer: a node may be that machine.
        """
        return [] if self.failures else self.unknown_nodes

    @property
    def can_configure(self) -> bool:
        """Whether Slurm's configuration would lose no machine by a change, except drained ones."""
        return self.drained_nodes.issuperset(self.unknown_nodes)

    def drain_removed(self, reporter: Reporter) -> None:
        """Drain nodes that course.yaml no longer has; `drained_nodes` are those without jobs."""
        for name in self.removed_nodes:
            script = slurm_nodes.build_drain(name)
            count = int(self.roots[self.controller](script).strip() or 0)
            if not count:
                self.drained_nodes.add(name)
                continue
            text = (
                f"{name} is no longer in hosts: it takes no new jobs, and waits for "
                f"{count_text(count, 'job')} to end"
            )
            again = f"labctl course up   # takes {name} out of the cluster after they have ended"
            reporter.emit(UniqueNote(text=add_next(text, again), level="warning"))

    def resume_returned(self, reporter: Reporter) -> None:
        """Let machines take jobs again that were deleted from course.yaml, and are back."""
        for name, machine in self.machines.items():
            if self.slurm.is_removed(machine.hostname):
                self.roots[self.controller](slurm_nodes.build_resume(machine.hostname))
                reporter.emit(UniqueNote(text=f"{name} is in hosts again, and takes jobs again"))

    def report_removed(self, reporter: Reporter) -> None:
        """Say what is left on machines that were taken out of the cluster."""
        for name in sorted(self.drained_nodes):
            text = (
                f"{name} is no longer in hosts, and was taken out of the cluster. Its accounts can "
                "still log in there; its lease ends by itself"
            )
            end = f"{END_ACCOUNTS}   # as root on {name}, ends them; their files stay"
            reporter.emit(UniqueNote(text=add_next(text, end), level="warning"))

    def list_unjoined(self) -> list[str]:
        """List the machines that answer, and run no jobs although nobody has drained them.

        Empty if Slurm does not answer: nothing is known then.
        """
        if not self.slurm.states:
            return []
        return [
            name
            for name, machine in self.machines.items()
            if not self.slurm.has_joined(machine.hostname)
        ]

    def choose_uids(self, accounts: Sequence[str], homes: str) -> UidChoice:
        """Choose each account's uid, the same on all machines.

        A new account gets one that no account has, also none of a directory service, and no file
        in `homes`. An account gets none on a conflict, if its home is elsewhere, or if it is new
        and another one left its home.
        """
        uids = {name: dict(machine.uids) for name, machine in self.machines.items()}
        self._look_up(accounts, uids)
        new = [name for name in accounts if not any(name in each for each in uids.values())]
        free: list[int] = []
        errors = self._find_moved_homes(accounts, homes)
        if new:
            owners = self._read_owners(homes)
            for name in new:
                if uid := owners.uids.get(name, 0):
                    errors[name] = _make_home_error(name, homes, uid)
            free = self._find_free_uids(len(set(new) - errors.keys()), uids, owners)
        possible = [name for name in accounts if name not in errors]
        chosen, conflicts = cluster_accounts.choose_uids(possible, uids, free)
        errors.update((conflict.account, _make_conflict_error(conflict)) for conflict in conflicts)
        machines = {conflict.account: conflict.machines[1] for conflict in conflicts}
        return UidChoice(chosen, errors, machines)

    def set_aside_conflicting(self, accounts: Sequence[str], homes: str) -> UidChoice:
        """Choose the uids of accounts that exist, without the machines that cannot join with them.

        A machine that has joined stays, and the choice says which accounts differ there.
        """
        while True:
            choice = self.choose_uids(accounts, homes)
            unjoined = set(self.list_unjoined()) - {self.controller}
            for account, machine in choice.machines.items():
                if machine in unjoined and machine in self.machines:
                    self.set_aside(machine, choice.errors[account])
            if unjoined <= self.machines.keys():
                return choice

    def _look_up(self, keys: Sequence[str | int], uids: dict[str, dict[str, int]]) -> None:
        """Add the accounts with these names or uids, which directory services may not list."""
        script = cluster_accounts.build_lookup(keys)
        for name, root in self.roots.items() if keys else ():
            uids[name].update(cluster_accounts.parse_uids(root(script)))

    def _find_free_uids(
        self, count: int, uids: dict[str, dict[str, int]], owners: HomeOwners
    ) -> list[int]:
        while True:
            present = {uid for each in uids.values() for uid in each.values()}
            taken = present | owners.all_uids
            candidates = cluster_accounts.list_candidates(taken, count, max(count, LOOKUP_UIDS))
            self._look_up(candidates, uids)
            present = {uid for each in uids.values() for uid in each.values()}
            free = [uid for uid in candidates if uid not in present]
            if len(free) >= count:
                return free

    def _read_owners(self, homes: str) -> HomeOwners:
        script = cluster_accounts.build_owner_query(homes)
        return cluster_accounts.parse_owners(self.roots[self.controller](script))

    def require_homes(self, accounts: Iterable[str], homes: str) -> None:
        """PolicyError if an account of the course has its home in another directory."""
        for error in self._find_moved_homes(accounts, homes).values():
            raise error

    def _find_moved_homes(self, accounts: Iterable[str], homes: str) -> dict[str, PolicyError]:
        """Describe the accounts that have their homes in another directory."""
        present = self.machines[self.controller].homes
        return {
            account: self._make_moved_error(account, present[account], homes)
            for account in sorted(accounts)
            if present.get(account, "") not in ("", f"{homes}/{account}")
        }

    def _make_moved_error(self, account: str, home: str, homes: str) -> PolicyError:
        old = home.rpartition("/")[0] or "/"
        return PolicyError(
            f"shared.homes in course.yaml is {homes}, and the home of {account} is in {old}",
            why="students would not find their files any more; nothing was changed",
            hint=f"labctl course up   # after you set shared.homes to {old} again\n"
            f"usermod --home {homes}/{account} --move-home {account}   # or move each "
            f"home while nobody is logged in: on {self.controller}\n"
            f"usermod --home {homes}/{account} {account}   # and on each other machine",
        )

    def has_account(self, name: str) -> bool:
        """Whether a machine that answers has the account."""
        return any(name in machine.uids for machine in self.machines.values())

    def list_incomplete(self, present: Iterable[str], ended: Iterable[str]) -> list[str]:
        """List the machines that lack an account of `present`, or still have one of `ended`."""
        wanted, unwanted = set(present), set(ended)
        return [
            name
            for name, machine in self.machines.items()
            if not wanted <= machine.enabled or unwanted & machine.enabled
        ]

    def list_lingering(self, ended: Iterable[str]) -> list[str]:
        """List the accounts of `ended` that a machine still has."""
        enabled = {name for machine in self.machines.values() for name in machine.enabled}
        return sorted(enabled & set(ended))

    def check_homes(self, homes: str) -> None:
        """Move machines that do not share the homes to `failures`. Leaves nothing on a disk."""
        root = self.roots[self.controller]
        path = root(cluster_accounts.build_creation(homes)).strip()
        try:
            for machine in self.other_machines:
                if error := self._find_homes_error(machine, homes, path):
                    self.set_aside(machine, error)
        finally:
            root(cluster_accounts.build_removal(path))

    def _find_homes_error(self, machine: str, homes: str, path: str) -> LabError | None:
        try:
            if self.roots[machine](cluster_accounts.build_check(path)).strip() == "shared":
                return None
        except LabError as error:
            return error  # for example, a file system whose server does not answer
        return PolicyError(
            f"{homes} on {machine} is not the {homes} of {self.controller}",
            why=f"a job must find its student's files on every machine; {machine} does not see a "
            f"file that {self.controller} wrote",
            hint=f"{CHECK_COMMAND}   # after you mounted {homes} of {self.controller} on "
            f"{machine}, for example by NFS",
        )

    def report_failures(self, reporter: Reporter) -> None:
        """Name the machines that cannot be used, and what was not done there."""
        for name, error in self.failures.items():
            text = (
                f"{name} cannot be used now ({describe_error(error)}): nothing was changed there, "
                "neither accounts nor Slurm"
            )
            again = f"labctl course up   # again, after you repaired {name}"
            reporter.emit(UniqueNote(text=add_next(text, again), level="warning"))

    def report_conflicts(self, reporter: Reporter, choice: UidChoice) -> None:
        """Name the accounts that were left as they are, and why."""
        for account, error in choice.errors.items():
            text = f"{account} was left as it is on all machines: {describe_error(error)}"
            reporter.emit(UniqueNote(text=add_next(text, error.hint), level="warning"))

    def report_unjoined(self, reporter: Reporter, names: Sequence[str]) -> None:
        """Say why machines that answer cannot join the cluster."""
        text = (
            f"{names_text(list(names), NAMED)} cannot join the cluster while another machine does "
            "not answer: Slurm's configuration describes all machines"
        )
        hosts = names_text(list(self.failures), NAMED) or names_text(self.unknown_nodes, NAMED)
        again = f"labctl course up   # after you repaired {hosts}, or took it out of hosts"
        reporter.emit(UniqueNote(text=add_next(text, again), level="warning"))


def _make_home_error(account: str, homes: str, uid: int) -> PolicyError:
    """Describe files of an account that no longer exists, where the new one's would be."""
    return PolicyError(
        f"{homes}/{account} exists, and no machine has an account {account}",
        why=f"it belongs to uid {uid}; what is in it may be another person's",
        hint=f"mv {homes}/{account} {homes}/{account}.old   # as root on the controller, if "
        "it belongs to another person\n"
        f"useradd --uid {uid} --home-dir {homes}/{account} {account}   # as root on the "
        "controller, if it belongs to the same person\n"
        "labctl course up   # after one of these",
    )


def _make_conflict_error(conflict: UidConflict) -> PolicyError:
    first, second = conflict.machines
    if conflict.holder:
        why = f"it has uid {conflict.uids[0]} on {first}, which {conflict.holder} has on {second}"
    else:
        why = f"it has uid {conflict.uids[0]} on {first}, and {conflict.uids[1]} on {second}"
    return PolicyError(
        f"{conflict.account} cannot have the same uid on {first} and {second}",
        why=f"{why}; files in shared homes belong to uids. Files outside of its home keep the old "
        "uid after usermod: find them with `find / -xdev -uid OLD` first",
        hint=f"usermod --uid UID {conflict.holder or conflict.account}   # on {second}\n"
        "labctl course up",
    )
