"""What `labctl run --probe` says of the whole run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from labctl.cli.probe import describe_estimate, estimate_text
from labctl.estimate.pace import PredictedTime, StepPace
from labctl.lab import Lab, LabRun
from labctl.model import Endpoint, Offer, Run, Server
from labctl.runs.probe import OfferComparison, ProbeResult
from labctl.state.measured_runs import record_measured

GIB = 1024**3
SPOT = Offer(
    provider="aws",
    type="g4dn.xlarge",
    gpu_name="T4",
    gpu_count=1,
    gpu_memory_bytes=16 * GIB,
    price_usd_per_hour=0.3956,
    spot=True,
)
SERVER = Server(
    id="i-1",
    provider="aws",
    lab="digits",
    lab_id="0f1e2d3c4b5a",
    alias="digits",
    endpoint=Endpoint(host="gpu.example"),
    offer=SPOT,
    created_at=0.0,
)
FOUND = ProbeResult(
    run=Run(id="probe-1", lab_id="0f1e2d3c4b5a", server_id="i-1", state="cancelled"),
    server=SERVER,
    finished=False,
    total_steps=40_000,
    time=PredictedTime(seconds=47 * 60, low_s=44 * 60, high_s=51 * 60),
    pace=StepPace(
        seconds_per_step=0.07,
        low_seconds_per_step=0.066,
        high_seconds_per_step=0.077,
        start_s=21.0,
        steps=400,
        warm_up_steps=31,
        stretches=12,
    ),
    usd=0.31,
    low_usd=0.29,
    high_usd=0.34,
    elsewhere=(
        OfferComparison(msgspec.structs.replace(SPOT, spot=False), 2820.0, 0.41),
        OfferComparison(msgspec.structs.replace(SPOT, type="x", gpu_count=4), None, None),
    ),
    ends_before="ttl",
)


def test_the_question_is_one_line() -> None:
    assert estimate_text(FOUND) == "the whole run will take 47 min, $0.31 on this spot offer"
    dear = msgspec.structs.replace(SERVER, offer=msgspec.structs.replace(SPOT, spot=False))
    assert estimate_text(msgspec.structs.replace(FOUND, server=dear)).endswith(
        "$0.31 on this offer"
    )
    free = msgspec.structs.replace(SERVER, offer=Offer(provider="local", type="container"))
    assert estimate_text(msgspec.structs.replace(FOUND, server=free)).endswith("47 min, free")


def test_the_details_say_how_it_was_measured_and_fit_a_narrow_terminal() -> None:
    text = describe_estimate(FOUND)
    assert max(map(len, text.splitlines())) <= 80
    for said in (
        "measured 400 of 40000 steps after 31 steps of warm-up: 70 ms each",
        "the whole run takes between 44 min and 51 min, 21 s of it to start",
        "it costs between $0.29 and $0.34",
        "the server's ttl ends it before that",
        "g4dn.xlarge",
        "$0.3956/h",
        "$0.41",
        "1 x T4",
        "the time on the other offers is unknown: labctl offers",
    ):
        assert said in text, said
    assert "other GPUs" not in text
    fast = msgspec.structs.replace(SPOT, type="p5", gpu_name="H100", gpu_count=1)
    rows = (*FOUND.elsewhere, OfferComparison(fast, 200.0, 0.2))
    assert "by their peak in half" in describe_estimate(
        msgspec.structs.replace(FOUND, elsewhere=rows)
    )


def test_bad_amounts_and_a_terminal_are_refused_before_anything_starts(labctl: Any) -> None:
    for words in (("--probe", "much"), ("--probe", "120%"), ("--probe", "1%", "-it")):
        said = labctl("run", *words)
        assert said.code == 255
        assert "next: labctl run --probe 1%" in said.err


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The whole runs that were begun, after a probe that found FOUND."""
    begun: list[tuple[str, ...]] = []

    def run(self: Lab, command: tuple[str, ...], **words: Any) -> LabRun:
        assert words["push"] is False  # what was probed is what runs
        begun.append(command)
        done = msgspec.structs.replace(FOUND.run, id="whole", state="exited", exit_code=7)
        return LabRun(self, done)

    monkeypatch.setattr(Lab, "probe", lambda self, command, **words: FOUND)
    monkeypatch.setattr(Lab, "run", run)
    return begun


def test_without_a_yes_nothing_more_is_started(labctl: Any, started: list[Any]) -> None:
    said = labctl("run", "--probe", "1%", "--", "python", "train.py")
    assert said.code == 0
    assert "measured 400 of 40000 steps" in said.err
    assert (
        f"{estimate_text(FOUND)}; continue? no (not a terminal; use --yes to answer yes)"
        in said.err
    )
    assert "nothing more was started" in said.err
    assert not started


def test_with_a_yes_the_whole_run_is_started(labctl: Any, started: list[Any]) -> None:
    said = labctl("run", "--probe", "1%", "--yes", "--", "python", "train.py")
    assert said.code == 7
    assert f"{estimate_text(FOUND)}; continue? yes" in said.err
    assert started == [("python", "train.py")]


def test_with_json_there_is_the_figure_alone(labctl: Any, started: list[Any]) -> None:
    said = labctl("run", "--probe", "1%", "--json", "--yes")
    found = json.loads(said.out)["probe"]
    assert (found["time"]["seconds"], found["usd"]) == (47 * 60, 0.31)
    assert not started


def test_a_run_that_is_over_already_is_not_begun_again(
    labctl: Any, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = msgspec.structs.replace(FOUND, finished=True, pace=None)
    monkeypatch.setattr(Lab, "probe", lambda self, command, **words: over)
    said = labctl("run", "--probe", "1%", "--yes")
    assert said.code == 0
    assert "finished during the probe: it took 47 min" in said.err
    assert "labctl pull probe-1" in said.err
    assert not started


def test_status_tells_a_planned_end_from_an_interruption(home: Path, labctl: Any) -> None:
    lab = Lab.load(home / "digits", environ={"HOME": str(home)})
    for name in ("probe-1", "probe-2"):
        run = Run(
            id=name,
            lab_id=lab.id,
            server_id="i-1",
            state="cancelled",
            summary="canceled (SIGTERM)",
        )
        lab.context.state.save_run(run)
    record_measured(lab.context.state, msgspec.structs.replace(run, id="probe-1"))
    lines = [" ".join(line.split()) for line in labctl("status").out.splitlines()]
    assert "probe-1 measured - - probe ended as planned" in lines
    assert "probe-2 canceled - - canceled (SIGTERM)" in lines
    assert json.loads(labctl("status", "--json").out)["measured"] == ["probe-1"]
