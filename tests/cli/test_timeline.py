"""`--timings`: which parts are timed, and how the table reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from click import unstyle

from labctl.cli.timeline import FIRST_LINE, TimedPart, Timeline, Timings, describe_timings
from labctl.errors import CapacityError
from labctl.events import Note, Part, Question, Reporter, SilentReporter, report_part
from labctl.lab import Lab, LabRun, LabServer
from labctl.model import Endpoint, Offer, Run, Server


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Slow(SilentReporter):
    """A Reporter whose user thinks for a minute."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.events: list[object] = []

    def emit(self, event: object) -> None:
        self.events.append(event)

    def confirm(self, decision: Question) -> bool:
        self.clock.now_s += 60
        return True


def emit_first_run(timeline: Timeline, clock: Clock) -> None:
    """Boot 4 s; then code 1 s, data 6 s, image 9 s after the code, start 1 s."""
    for moment_s, name, done in (
        (0, "boot", False),
        (4, "boot", True),
        (4, "code", False),
        (4, "data", False),
        (5, "code", True),
        (5, "image", False),
        (10, "data", True),
        (14, "image", True),
        (14, "start", False),
        (15, "start", True),
    ):
        clock.now_s = 100.0 + moment_s
        timeline.emit(Part(name=name, done=done))


def test_parts_that_overlap_and_the_ratio_to_the_longest() -> None:
    clock = Clock()
    timeline = Timeline(SilentReporter(), clock)
    emit_first_run(timeline, clock)
    timings = timeline.summarize()
    assert [(p.name, p.start_s, p.duration_s) for p in timings.parts] == [
        ("boot", 0, 4),
        ("code", 4, 1),
        ("data", 4, 6),
        ("image", 5, 9),
        ("start", 14, 1),
    ]
    assert (timings.total_s, timings.longest) == (15, "image")
    assert timings.ratio == pytest.approx(15 / 9)


def test_the_first_bytes_of_the_log_end_the_first_line() -> None:
    clock, log, shown = Clock(), bytearray(), []
    timeline = Timeline(SilentReporter(), clock)
    on_log = timeline.watch_log(log.extend, lambda: shown.append(bytes(log)))
    on_log(b"the log of an earlier run")
    emit_first_run(timeline, clock)
    on_log(b"")
    for moment_s, block in ((117, b"epoch 1\n"), (120, b"epoch 2\n")):
        clock.now_s = moment_s
        on_log(block)
    assert timeline.summarize().parts[-1] == TimedPart(FIRST_LINE, 15, 2)
    assert shown == [b"the log of an earlier run"], "before the line is written, and once"
    assert log.endswith(b"epoch 1\nepoch 2\n")


def test_everything_is_passed_on_and_thinking_does_not_count() -> None:
    clock = Clock()
    inner = Slow(clock)
    timeline = Timeline(inner, clock)
    events = [Part(name="boot"), Note(text="note"), Part(name="boot", done=True)]
    with report_part(timeline, "prepare"):
        assert timeline.confirm(Question(question="pay it?"))
        clock.now_s += 1
    for event in events:
        timeline.emit(event)
    assert [event for event in inner.events if event in events] == events
    assert timeline.summarize().parts[0] == TimedPart("prepare", 0, 1)


def test_a_part_that_ends_before_it_began_is_ignored() -> None:
    timeline = Timeline(SilentReporter())
    timeline.emit(Part(name="start", done=True))
    assert timeline.summarize() == Timings((), 0, "", 1)
    assert len(describe_timings(timeline.summarize())) == 1


@pytest.mark.parametrize("columns", [80, 120])
def test_the_table_fits_on_the_screen(columns: int) -> None:
    clock = Clock()
    timeline = Timeline(SilentReporter(), clock)
    on_log = timeline.watch_log(lambda block: None, lambda: None)
    emit_first_run(timeline, clock)
    clock.now_s += 2
    on_log(b"x")
    lines = [unstyle(line) for line in describe_timings(timeline.summarize(), columns)]
    assert max(map(len, lines)) <= columns
    assert [line.split()[0] for line in lines] == [
        "part",
        *("boot", "code", "data", "image", "start", "first", "total"),
    ]
    boot, code, data, image = lines[1:5]
    assert boot.split()[1:5] == ["0.0", "s", "4.0", "s"]
    assert boot.rindex("━") < code.index("━") == data.index("━")
    assert code.rindex("━") <= image.index("━") < data.rindex("━")
    assert lines[-1].endswith("17.0 s  1.89 times the longest part (image)")


def test_a_part_in_two_pieces_has_one_row() -> None:
    parts = (TimedPart("boot", 0, 1), TimedPart("code", 1, 1), TimedPart("boot", 3, 1))
    lines = describe_timings(Timings(parts, 4, "boot", 2), 72)
    assert len(lines) == 4
    assert lines[1].split()[:5] == ["boot", "0.0", "s", "2.0", "s"]
    assert lines[1].endswith(f"{'━' * 10}{' ' * 20}{'━' * 10}")


SERVER = Server(
    id="srv-1",
    provider="local",
    lab="digits",
    lab_id="0f1e2d3c4b5a",
    alias="digits",
    endpoint=Endpoint(host="127.0.0.1"),
    offer=Offer(provider="local", type="container"),
    created_at=1.0,
    state="running",
)
RUN = Run(id="first", lab_id="0f1e2d3c4b5a", server_id="srv-1", state="exited", exit_code=0)


def walk(reporter: Reporter, *names: str) -> None:
    for name in names:
        with report_part(reporter, name):
            pass


@pytest.fixture
def flows(monkeypatch: pytest.MonkeyPatch) -> None:
    def up(lab: Lab, need: Any) -> LabServer:
        walk(lab.context.reporter, "boot", "prepare")
        return LabServer(lab, SERVER)

    def run(
        lab: Lab, command: Any, *, follow: bool, on_log: Callable[[bytes], None], **_: Any
    ) -> LabRun:
        walk(lab.context.reporter, "code", "start")
        if follow:
            on_log(b"epoch 1\n")
        return LabRun(lab, RUN)

    monkeypatch.setattr(Lab, "up", up)
    monkeypatch.setattr(Lab, "run", run)


def names_of(text: str) -> list[str]:
    table = text[text.index("part  ") :].splitlines()[1:]
    return [line.split()[0] for line in table if " s  " in line]


@pytest.mark.usefixtures("flows")
def test_up_and_run_print_timings_on_standard_error_only_with_the_option(labctl: Any) -> None:
    assert names_of(labctl("up", "--timings").err) == ["boot", "prepare", "total"]
    assert "total" not in labctl("up").err
    said = labctl("run", "--timings")
    assert names_of(said.err) == ["code", "start", "first", "total"]
    assert said.out == "epoch 1\n"
    assert "total" not in labctl("run").err
    assert names_of(labctl("run", "--timings", "--detach").err) == ["code", "start", "total"]


def test_a_failure_before_the_first_part_prints_no_table(labctl: Any) -> None:
    said = labctl("run", "--timings")
    assert said.err.startswith("labctl: digits has no server")
    assert "part  " not in said.err


def test_a_failed_up_prints_the_parts_that_have_ended(
    labctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def up(lab: Lab, need: Any) -> LabServer:
        walk(lab.context.reporter, "boot")
        raise CapacityError("no machine left")

    monkeypatch.setattr(Lab, "up", up)
    assert names_of(labctl("up", "--timings").err) == ["boot", "total"]
    assert labctl("up", "--timings", "--json").err == "labctl: no machine left\n"


@pytest.mark.usefixtures("flows")
def test_json_has_the_same_parts(labctl: Any) -> None:
    timings = json.loads(labctl("up", "--timings", "--json").out)["timings"]
    assert [part["name"] for part in timings["parts"]] == ["boot", "prepare"]
    report = json.loads(labctl("run", "--timings", "--json").out)
    assert report["run"]["id"] == "first"
    assert [part["name"] for part in report["timings"]["parts"]] == ["code", "start", FIRST_LINE]
    assert {"total_s", "longest", "ratio"} < report["timings"].keys()
    assert report["timings"]["ratio"] >= 1
    assert "timings" not in json.loads(labctl("run", "--json").out)
