"""The contents of seats' servers: their labs, their runs, and saving their results."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from labctl.courses.shared_seats import SharedSeats
from labctl.errors import AuthenticationError, LabError
from labctl.lifecycle import down, unsaved_server, up
from labctl.model import NAME_PATTERN, Run, Server, Value
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import LabContext

# Below a seat's directory: the results of labs that the student created.
LABS = Path("labs")
_LIST_SCRIPT = (
    'cd "$HOME/labctl" 2>/dev/null || exit 0; for i in */.labctl/id; do '
    '[ -f "$i" ] && [ ! -L "$i" ] && printf "%s %s\\n" "${i%%/*}" "$(head -c 64 "$i")"; done; true'
)
_LINE = re.compile(r"(\S+) ([0-9a-f]{12})\Z")


class SavedSeat(Value, frozen=True):
    """What was saved of one seat before its server ended."""

    labs: tuple[str, ...] = ()
    files: int = 0
    edits: int = 0
    home_files: int = 0


def list_labs(context: LabContext, server: Server) -> list[LabContext]:
    """Build a context for every lab on the seat's server, the seat's own first.

    Results of a student's own lab go below the seat's directory. Invalid names are skipped.
    """
    output = context.connections.reopen(server).run(_LIST_SCRIPT, timeout_s=30.0).stdout
    labs = [context]
    for line in output.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match[2] == context.lab_id:
            continue
        # A second lab of the same name is in <lab>-<start of its id>; requests name it <lab>.
        name = match[1].removesuffix(f"-{match[2][:6]}")
        if NAME_PATTERN.fullmatch(name):
            labs.append(_nested_context(context, name, match[2]))
    return labs


class LabOnSeat(LabContext, frozen=True):
    """A student's own lab on a seat's server, which is recorded under the seat."""

    seat_lab_id: str = ""

    def get_server(self) -> Server:
        recorded = self.state.get_lab_server(self.seat_lab_id)
        return super().get_server() if recorded is None else recorded


def _nested_context(context: LabContext, name: str, lab_id: str) -> LabContext:
    root = context.config.root / LABS / f"{name}-{lab_id[:6]}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return LabOnSeat(
        msgspec.structs.replace(context.config, name=name, root=root),
        lab_id,
        context.paths,
        context.state,
        context.reporter,
        group=context.group,
        owner=context.owner,
        place=context.place,
        subject=context.subject,
        shared_provider=context.provider,
        shared_connections=context.connections,
        seat_lab_id=context.lab_id,
    )


def save_server(
    context: LabContext, server: Server, *, discard: bool, saves_home: bool = True
) -> SavedSeat:
    """Stop the runs on the seat's server, then download and verify everything.

    With `saves_home` that includes what people put into the home directory, outside the labs.
    PolicyError if not everything could be saved: compute ends then, and the disk stays.
    """
    if adoption.is_fresh(context, server):
        return SavedSeat()  # nobody can log in before it is ready
    try:
        if server.state == "stopped" and not discard:
            server = up.make_ready(context, server)  # its labs can be listed only while it runs
        labs = [context] if server.state == "stopped" else list_labs(context, server)
    except LabError as error:
        if discard or _has_closed_login(context, server, error):
            return SavedSeat()
        raise unsaved_server.stop_and_keep_disk(
            context, server, error, home_is_saved=False
        ) from error
    # The home directory is that of the whole server, and is saved with the seat's own lab.
    saved = [
        down.drain_server(lab, server, discard=discard, saves_home=saves_home and lab is context)
        for lab in labs
    ]
    return SavedSeat(
        labs=tuple(lab.config.name for lab in labs),
        files=sum(one.results for one in saved),
        edits=sum(one.edits for one in saved),
        home_files=sum(one.home_files for one in saved),
    )


def _has_closed_login(context: LabContext, server: Server, error: LabError) -> bool:
    """Whether an account on a shared server can no longer log in; its results were saved before."""
    provider = context.provider
    return (
        isinstance(error, AuthenticationError)
        and isinstance(provider, SharedSeats)
        and provider.is_leaving(server.id)
    )


def find_latest_run(
    labs: Sequence[LabContext], server: Server, run_id: str = ""
) -> tuple[LabContext, Run]:
    """Return a run by id, or the newest of all labs on the server, with its lab."""
    for lab in labs:
        runs.refresh(lab, server)
    latest: list[tuple[LabContext, Run]] = []
    for lab in labs:
        try:
            latest.append((lab, runs.find_run(lab, run_id)))
        except LabError:
            continue
    if not latest:
        return labs[0], runs.find_run(labs[0], run_id)
    return max(latest, key=lambda pair: pair[1].created_at)
