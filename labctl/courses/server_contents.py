"""What lies on seats' servers: which labs, their results, and getting those home."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from labctl.errors import LabError
from labctl.lifecycle import down, up
from labctl.model import NAME_PATTERN, Run, Server, Value
from labctl.runs import runs
from labctl.servers import adoption
from labctl.servers.context import Ground

# Below a seat's directory: what came home of labs that are the student's own.
LABS = Path("labs")
_LIST = (
    'cd "$HOME/labctl" 2>/dev/null || exit 0; for i in */.labctl/id; do '
    '[ -f "$i" ] && [ ! -L "$i" ] && printf "%s %s\\n" "${i%%/*}" "$(head -c 64 "$i")"; done; true'
)
_LINE = re.compile(r"(\S+) ([0-9a-f]{12})\Z")


class SavedSeat(Value, frozen=True):
    """What was brought home of one seat before its server went."""

    labs: tuple[str, ...] = ()
    files: int = 0
    edits: int = 0


def labs_on(ground: Ground, server: Server) -> list[Ground]:
    """A ground for every lab on the seat's server, the seat's own first.

    A student's own lab comes home below the seat's directory. Names that are none are left out.
    """
    said = ground.connections.reopen(server).run(_LIST, timeout_s=30.0).stdout
    found = [ground]
    for line in said.splitlines():
        match = _LINE.fullmatch(line.strip())
        if match is None or match[2] == ground.lab_id:
            continue
        # A second lab of one name lies in <lab>-<the first of its id>, and is asked for by <lab>.
        name = match[1].removesuffix(f"-{match[2][:6]}")
        if NAME_PATTERN.fullmatch(name):
            found.append(_inside(ground, name, match[2]))
    return found


@dataclass(frozen=True)
class LabOnSeat(Ground):
    """A student's own lab on a seat's server, which is on record as the seat's."""

    seat_lab_id: str = ""

    def server(self) -> Server:
        known = self.state.server_of_lab(self.seat_lab_id)
        return super().server() if known is None else known


def _inside(ground: Ground, name: str, lab_id: str) -> Ground:
    root = ground.config.root / LABS / f"{name}-{lab_id[:6]}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    made = LabOnSeat(
        msgspec.structs.replace(ground.config, name=name, root=root),
        lab_id,
        ground.paths,
        ground.state,
        ground.reporter,
        group=ground.group,
        owner=ground.owner,
        place=ground.place,
        seat_lab_id=ground.lab_id,
    )
    made.__dict__.update(provider=ground.provider, connections=ground.connections)
    return made


def save(ground: Ground, server: Server, *, discard: bool) -> SavedSeat:
    """Stop what runs on the seat's server and bring all of it home, verified.

    PolicyError where not everything could be saved: compute ends then, and the disk stays.
    """
    if adoption.is_fresh(ground, server):
        return SavedSeat()  # nobody was let in before it was ready
    try:
        if server.state == "stopped" and not discard:
            server = up.make_ready(ground, server)  # whose labs are on it is not known else
        labs = [ground] if server.state == "stopped" else labs_on(ground, server)
    except LabError as error:
        if discard:
            return SavedSeat()
        raise down.kept_there(ground, server, error) from error
    files = edits = 0
    for lab in labs:
        came, changed = down.emptied(lab, server, discard=discard)
        files, edits = files + came, edits + changed
    return SavedSeat(labs=tuple(lab.config.name for lab in labs), files=files, edits=edits)


def latest_run(labs: Sequence[Ground], server: Server, run_id: str = "") -> tuple[Ground, Run]:
    """The run named, or the youngest of all labs on the server, and the lab that it belongs to."""
    for lab in labs:
        runs.refresh(lab, server)
    found: list[tuple[Ground, Run]] = []
    for lab in labs:
        try:
            found.append((lab, runs.latest(lab, run_id)))
        except LabError:
            continue
    if not found:
        return labs[0], runs.latest(labs[0], run_id)
    return max(found, key=lambda one: one[1].created_at)
