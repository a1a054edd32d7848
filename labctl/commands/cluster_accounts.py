"""The accounts of several machines that share their homes: the same name has the same uid.

A machine itself says which accounts it has: one that did not answer may lack some. Pure functions;
nothing runs here.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Mapping, Sequence, Set

from labctl.errors import PolicyError
from labctl.model import Value

# Lines that separate the parts of a script's output.
_HOST, _GROUPS, _PASSWD = "--- host", "--- groups", "--- accounts"
# Of new accounts: beyond the uids that useradd chooses, so that most machines have them free.
FIRST_UID, LAST_UID = 20_000, 59_999


class UidConflict(Value, frozen=True):
    """An account that cannot have one uid on all machines. `machines` have `uids`.

    With `holder`, another account of that name has the uid on `machines[1]`.
    """

    account: str
    machines: tuple[str, str]
    uids: tuple[int, int]
    holder: str = ""


class MachineAccounts(Value, frozen=True):
    """The accounts of a machine. Those of `enabled` may log in by a key of labctl.

    `hostname` is the machine's name in Slurm. `is_prepared` if labctl has ever made accounts there.
    """

    hostname: str
    uids: dict[str, int]
    homes: dict[str, str]
    enabled: frozenset[str]
    is_prepared: bool = False


def build_inspection() -> str:
    """Return the script that prints a machine's accounts, for `parse_inspection`."""
    return (
        f"echo '{_HOST}'; uname -n; echo '{_GROUPS}'; getent group labctl; "
        f"echo '{_PASSWD}'; getent passwd; true"
    )


def parse_inspection(output: str) -> MachineAccounts:
    """Parse what the script of `build_inspection` prints."""
    parts: dict[str, list[str]] = {_HOST: [], _GROUPS: [], _PASSWD: []}
    lines: list[str] = []
    for line in output.splitlines():
        if line in parts:
            lines = parts[line]
        else:
            lines.append(line)
    members = [line.split(":")[3].split(",") for line in parts[_GROUPS] if line.count(":") == 3]
    rows = [line.split(":") for line in parts[_PASSWD]]
    return MachineAccounts(
        hostname="".join(parts[_HOST]).strip().partition(".")[0],
        uids=parse_uids("\n".join(parts[_PASSWD])),
        homes={row[0]: row[5] for row in rows if len(row) == 7},
        enabled=frozenset(name for names in members for name in names if name),
        is_prepared=bool(members),
    )


class HomeOwners(Value, frozen=True):
    """The uids to which the directories of `homes` belong, by name, and all uids seen there."""

    uids: dict[str, int]
    all_uids: frozenset[int]


def build_owner_query(homes: str) -> str:
    """Return the script that prints the owners of the files in `homes`, for `parse_owners`.

    It looks at two levels: below them, files may be millions.
    """
    find = f"find {shlex.quote(homes)} -mindepth"
    return (
        f"{find} 1 -maxdepth 1 -printf '%U %f\\n'; {find} 2 -maxdepth 2 -printf '%U\\n' | sort -u"
    )


def parse_owners(output: str) -> HomeOwners:
    """Parse what the script of `build_owner_query` prints."""
    rows = [line.partition(" ") for line in output.splitlines()]
    rows = [row for row in rows if row[0].isdigit()]
    uids = {name: int(uid) for uid, _, name in rows if name}
    return HomeOwners(uids, frozenset(int(uid) for uid, _, _ in rows))


def build_lookup(keys: Iterable[str | int]) -> str:
    """Return the script that prints the accounts with these names or uids, for `parse_uids`.

    Directory services know accounts that they do not list.
    """
    return f"getent passwd {shlex.join(str(key) for key in keys)}; true"


def build_lock(accounts: Iterable[str]) -> str:
    """Return the script after which nobody logs in to these accounts, and their programs end.

    sshd refuses the group labctl-ended. The accounts keep their uids and homes.
    """
    return (
        f"groupadd -f labctl-ended; for name in {shlex.join(accounts)}; do "
        'usermod --groups labctl-ended "$name" && { crontab -r -u "$name" 2>/dev/null; '
        'pkill -KILL -u "$name"; true; } || exit 1; done'
    )


def build_creation(homes: str) -> str:
    """Return the script that makes an empty file in the directory of homes, and prints its path."""
    return f"mktemp {shlex.quote(homes)}/.labctl-shared-XXXXXXXXXX"


def build_check(path: str) -> str:
    """Return the script that prints `shared` if the machine sees the file, else `apart`."""
    # A network file system may remember for seconds that a file did not exist; listing asks again.
    directory, file = shlex.quote(path.rpartition("/")[0]), shlex.quote(path)
    return f"ls -a {directory} >/dev/null 2>&1; [ -e {file} ] && echo shared || echo apart"


def build_removal(path: str) -> str:
    return f"rm -f {shlex.quote(path)}"


def parse_uids(output: str) -> dict[str, int]:
    """Parse what `getent passwd` prints into uids by account."""
    rows = (line.split(":") for line in output.splitlines())
    return {row[0]: int(row[2]) for row in rows if len(row) > 2 and row[2].isdigit()}


def list_candidates(taken: Set[int], least: int, most: int) -> list[int]:
    """List the first `most` uids for new accounts that nobody has.

    PolicyError if fewer than `least` are left.
    """
    free = (uid for uid in range(FIRST_UID, LAST_UID + 1) if uid not in taken)
    candidates = list(itertools.islice(free, most))
    if len(candidates) < least:
        raise PolicyError(
            f"{len(candidates)} of the uids from {FIRST_UID} to {LAST_UID} are free, and new "
            f"accounts need {least}",
            why="accounts and files on the machines have the others",
            hint="getent passwd   # on each machine",
        )
    return candidates


def choose_uids(
    accounts: Iterable[str],
    uids_by_machine: Mapping[str, Mapping[str, int]],
    free: Sequence[int],
) -> tuple[dict[str, int], list[UidConflict]]:
    """Choose a uid for each account that it has, or can have, on all machines.

    An account that exists on some machines keeps its uid; new ones get those of `free`, which must
    be as many. Returns the uids, and the accounts that cannot have one.
    """
    chosen: dict[str, int] = {}
    conflicts: list[UidConflict] = []
    unused = iter(free)
    for account in sorted(accounts):
        present = [
            (name, uids[account]) for name, uids in uids_by_machine.items() if account in uids
        ]
        if not present:
            chosen[account] = next(unused)
        elif conflict := _find_conflict(account, present, uids_by_machine):
            conflicts.append(conflict)
        else:
            chosen[account] = present[0][1]
    return chosen, conflicts


def _find_conflict(
    account: str,
    present: Sequence[tuple[str, int]],
    uids_by_machine: Mapping[str, Mapping[str, int]],
) -> UidConflict | None:
    first, uid = present[0]
    for machine, other_uid in present[1:]:
        if other_uid != uid:
            return UidConflict(account, (first, machine), (uid, other_uid))
    for machine, uids in uids_by_machine.items():
        holders = [name for name, other_uid in uids.items() if other_uid == uid and name != account]
        if holders and account not in uids:
            return UidConflict(account, (first, machine), (uid, uid), holders[0])
    return None
