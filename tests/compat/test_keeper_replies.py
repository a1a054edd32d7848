"""What laptops and keepers of labs of different versions say to each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import pytest

from labctl.errors import BusyError, LabError
from labctl.errors.replies import as_reply, decode_reply
from labctl.lifecycle.keeper_host import KeeperReport
from labctl.lifecycle.kept_labs import KeeperCheck
from labctl.model import Run, make_record, parse_record
from labctl.state.ledgers import LedgerLine
from labctl.wire import kept_labs as wire
from labctl.wire.codec import encode
from labctl.wire.mirrors import StoredFile

REPORT = KeeperReport(
    lines=(
        LedgerLine(
            ledger="1.5",
            number=3,
            at=2.5,
            kind="recovered",
            server_id="srv-2",
            run_id="night",
            detail={"step": 7},
        ),
    ),
    runs=(
        Run(
            id="night",
            lab_id="0f1e2d3c4b5a",
            server_id="srv-2",
            state="running",
            command=("python", "train.py"),
            progress={"loss": 1.0},
            seen_at=9.5,
        ),
    ),
    round=KeeperCheck(at=3.5, state="well"),
    running=True,
)
# What keepers replied before their messages were values of labctl.wire.
LINE = (
    '{"ledger": "1.5", "number": 3, "at": 2.5, "kind": "recovered", "server_id": "srv-2", '
    '"run_id": "night", "detail": {"step": 7}}'
)
RUN = (
    '{"id": "night", "lab_id": "0f1e2d3c4b5a", "server_id": "srv-2", "state": "running", '
    '"command": ["python", "train.py"], "image": "", "exit_code": null, "told": "", '
    '"created_at": 0.0, "started_at": null, "ended_at": null, "container": "", '
    '"progress": {"loss": 1}, "new_files": [], "seen_at": 9.5, "stopped_by": "", "image_id": "", '
    '"image_digest": "", "gpu_lost_at": null}'
)
ROUND = '{"at": 3.5, "state": "well", "error": "", "hint": "", "next_at": 0.0}'
KNOWN = '{"version": "0.1", "host": "login", "running": true, "have": {"lab.yaml": "ab"}}'
EARLIER: list[tuple[str, NamedTuple]] = [
    (
        f'{{"version": 1, "known": {KNOWN}}}',
        wire.GreetLabKeeperReply(wire.KeeperInfo("0.1", "login", True, {"lab.yaml": "ab"})),
    ),
    (
        '{"version": 1, "taken": {"name": "digits-1", "runs": ["night"], "running": false}}',
        wire.ImportLabReply(wire.ImportedLab("digits-1", ("night",), False)),
    ),
    (
        f'{{"version": 1, "told": {{"lines": [{LINE}], "runs": [{RUN}], "round": {ROUND}, '
        '"running": true}}',
        wire.DescribeKeptLabReply(make_record(wire.KeeperReportRecord, REPORT)),
    ),
    (
        '{"version": 1, "told": {"lines": [], "runs": [], "round": null, "running": false}}',
        wire.DescribeKeptLabReply(wire.KeeperReportRecord()),
    ),
    (
        '{"version": 1, "files": {"checkpoints/model.pt": [7, "00ff"]}}',
        wire.SendRunReply({"checkpoints/model.pt": StoredFile(7, "00ff")}),
    ),
    ('{"version": 1, "dropped": "digits-1"}', wire.DropKeptLabReply("digits-1")),
    ('{"version": 1}', wire.RecoverRunsReply()),
]


def keep_keys(later: Any, earlier: Any) -> Any:
    """Return what an earlier laptop reads: it ignores the keys that it does not know."""
    if isinstance(later, dict) and isinstance(earlier, dict):
        return {key: keep_keys(later[key], earlier[key]) for key in earlier if key in later}
    if isinstance(later, list) and isinstance(earlier, list):
        return [keep_keys(*both) for both in zip(later, earlier, strict=True)]
    return later


@pytest.mark.parametrize(("text", "reply"), EARLIER)
def test_a_reply_of_an_earlier_keeper_is_read(text: str, reply: NamedTuple) -> None:
    assert decode_reply(type(reply), text) == reply


@pytest.mark.parametrize(("text", "reply"), EARLIER)
def test_an_earlier_laptop_finds_the_same_keys(text: str, reply: NamedTuple) -> None:
    later = msgspec.json.decode(encode(reply))
    assert keep_keys(later, msgspec.json.decode(text)) == msgspec.json.decode(text)


@pytest.mark.parametrize(("text", "reply"), EARLIER)
def test_what_a_later_keeper_adds_is_ignored(text: str, reply: NamedTuple) -> None:
    later = text.replace('"version": 1', '"version": 2, "mood": {"good": true}')
    assert decode_reply(type(reply), later)[:-1] == reply[:-1]


@pytest.mark.parametrize("report", [REPORT, KeeperReport()])
def test_a_report_comes_back_as_it_was(report: KeeperReport) -> None:
    record = make_record(wire.KeeperReportRecord, report)
    assert parse_record(KeeperReport, record) == report


def test_an_error_of_an_earlier_keeper_is_raised_and_an_earlier_laptop_reads_ours() -> None:
    text = '{"version": 1, "error": {"kind": "BusyError", "what": "a", "why": "b", "hint": "c"}}'
    with pytest.raises(BusyError) as caught:
        decode_reply(wire.DropKeptLabReply, text)
    error: LabError = caught.value
    assert (error.what, error.why, error.hint) == ("a", "b", "c")
    sent = msgspec.json.decode(encode(as_reply(error)))["error"]
    assert sent == {**sent, "kind": "BusyError", "what": "a", "why": "b", "hint": "c"}
