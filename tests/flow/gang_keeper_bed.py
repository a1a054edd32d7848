"""A lab with two servers, and a keeper of it, on the machines of keeper_context."""

from __future__ import annotations

import json
import time
from pathlib import Path

import msgspec
import pytest
from keeper_context import NAME, Pair, pair
from lab_world import LAB_ID, world

from labctl.config.member_ids import make_member_id
from labctl.keeper.labs import check_lab
from labctl.lifecycle import gang_runs, kept_labs
from labctl.model import Run, RunState, Server
from labctl.state import State

SECOND_ID = make_member_id(LAB_ID, 1)
RESTARTS = 2
LAB_YAML = f"""\
lab: digits
run: [python, train.py]
server: {{count: 2}}
launch: {{restarts: {RESTARTS}}}
"""


def make_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """A lab with two servers and a run on both, which no keeper has yet."""
    lab = world(tmp_path)
    lab.cloud.settle_s = 0.0
    root = lab.home / "lab"
    (root / "lab.yaml").write_text(LAB_YAML)
    (root / ".labctl").mkdir()
    (root / ".labctl" / "lab.json").write_text(json.dumps({"id": LAB_ID}))
    made = pair(lab, tmp_path / "keeper", monkeypatch)
    state = lab.context().state
    state.record(gang_runs.PARTS, lab_id=LAB_ID, run_id="night", detail={"count": 2})
    save_part(state, 1, "running")
    return made


def save_part(
    state: State,
    rank: int,
    run_state: str,
    code: int | None = None,
    by: str = "",
    run_id: str = "night",
) -> None:
    """Put on record how the part of a server was last seen."""
    lab_id = make_member_id(LAB_ID, rank)
    server = state.get_lab_server(lab_id)
    part = Run(
        id=run_id,
        lab_id=lab_id,
        server_id=server.id if server else "srv",
        state=msgspec.convert(run_state, RunState),
        exit_code=code,
        stopped_by=by,
        seen_at=time.time(),
    )
    state.save_run(part)


def second(two: Pair) -> Server:
    server = two.lab.context().state.get_lab_server(SECOND_ID)
    assert server is not None
    return server


def check(two: Pair, *, swept: bool = False) -> str:
    kept = kept_labs.find_kept_lab(two.places, NAME)
    return check_lab(two.kept(), kept, swept=swept)


def put_parts(two: Pair, *codes: int) -> None:
    """Have the parts of both servers ended with these exit codes."""
    for rank, code in enumerate(codes):
        name, lab_id = ("digits-1", SECOND_ID) if rank else ("digits", LAB_ID)
        lab = two.lab.machine.home / "labctl" / name
        own = lab / "runs" / "night" / ".labctl"
        for directory in (lab / ".labctl", own):
            directory.mkdir(parents=True, exist_ok=True)
        (lab / ".labctl" / "id").write_text(lab_id)
        record = {"id": "night", "lab_id": lab_id, "state": "exited", "exit_code": code}
        (own / "record.json").write_text(json.dumps({**record, "told": f"exit code {code}"}))
        (own / "spec.json").write_text('{"outputs": ["checkpoints", "logs"]}')
