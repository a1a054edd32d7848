"""The uids of a cluster's accounts, and why some accounts cannot have the same one everywhere."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field

from labctl.commands.cluster_accounts import UidConflict
from labctl.errors import PolicyError


@dataclass(frozen=True)
class UidChoice:
    """The uids of accounts by name, and why others cannot have one.

    `machines` names, for some of those others, the machine that differs from the rest.
    """

    uids: dict[str, int] = field(default_factory=dict)
    errors: dict[str, PolicyError] = field(default_factory=dict)
    machines: dict[str, str] = field(default_factory=dict)


def find_differing_machine(conflict: UidConflict, unjoined: Set[str]) -> str:
    """Return the machine of the two that has to change: one on which no jobs run yet, if any."""
    first, second = conflict.machines
    return first if first in unjoined and second not in unjoined else second


def make_conflict_error(conflict: UidConflict, machine: str) -> PolicyError:
    """Describe two machines on which an account's uids differ. `machine` is to be changed."""
    first, second = conflict.machines
    if conflict.holder:
        why = f"it has uid {conflict.uids[0]} on {first}, which {conflict.holder} has on {second}"
    else:
        why = f"it has uid {conflict.uids[0]} on {first}, and {conflict.uids[1]} on {second}"
    changed = conflict.holder if conflict.holder and machine == second else conflict.account
    return PolicyError(
        f"{conflict.account} cannot have the same uid on {first} and {second}",
        why=f"{why}; files in shared homes belong to uids. Files outside of its home keep the old "
        "uid after usermod: find them with `find / -xdev -uid OLD` first",
        hint=f"usermod --uid UID {changed}   # on {machine}\nlabctl course up",
    )


def make_home_error(account: str, homes: str, uid: int) -> PolicyError:
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


def make_moved_error(account: str, home: str, homes: str, controller: str) -> PolicyError:
    """Describe an account whose home is in another directory than `homes`."""
    old = home.rpartition("/")[0] or "/"
    return PolicyError(
        f"shared.homes in course.yaml is {homes}, and the home of {account} is in {old}",
        why="students would not find their files any more; nothing was changed",
        hint=f"labctl course up   # after you set shared.homes to {old} again\n"
        f"usermod --home {homes}/{account} --move-home {account}   # or move each "
        f"home while nobody is logged in: on {controller}\n"
        f"usermod --home {homes}/{account} {account}   # and on each other machine",
    )
