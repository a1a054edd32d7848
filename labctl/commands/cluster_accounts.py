"""The accounts of several machines that share their homes: the same name has the same uid.

Pure functions; nothing runs here.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence

from labctl.model import Value

# Prints the accounts of a machine, for `parse_uids`. Those of a directory service may be missing.
LIST_ACCOUNTS = "getent passwd"
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


def choose_uids(
    accounts: Iterable[str], uids_by_machine: Mapping[str, Mapping[str, int]]
) -> tuple[dict[str, int], list[UidConflict]]:
    """Choose a uid for each account that it has, or can have, on all machines.

    An account that exists on some machines keeps its uid. Returns the uids, and the accounts
    that cannot have one.
    """
    chosen: dict[str, int] = {}
    conflicts: list[UidConflict] = []
    taken = {uid for uids in uids_by_machine.values() for uid in uids.values()}
    free = (uid for uid in range(FIRST_UID, LAST_UID) if uid not in taken)
    for account in sorted(accounts):
        present = [
            (name, uids[account]) for name, uids in uids_by_machine.items() if account in uids
        ]
        if not present:
            chosen[account] = next(free)
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
