"""Reports of watchdogs on students' servers, which their root may forge."""

from __future__ import annotations

import math
import os
from subprocess import CompletedProcess

import msgspec
import pytest

from labctl.agent.watchdog import activity
from labctl.agent.watchdog.activity import (
    ActivityReader,
    ActivitySnapshot,
    LabAccount,
    read_gpu_signs,
)
from labctl.agent.watchdog.processes import ActivitySign
from labctl.courses.watch_reports import DatedWatchReport, WatchReport, read_report
from labctl.model import Offer
from labctl.state import LedgerEntry
from labctl.web.server_load import load_from_watchdog

TWO_GPUS = Offer(provider="aws", type="g5.12xlarge", gpu_count=2)


def heard(detail: dict[str, object]) -> DatedWatchReport:
    return read_report(LedgerEntry(number=1, at=5.0, kind="watch", detail=detail))


def test_a_report_is_read_as_far_as_staff_is_shown_it() -> None:
    watch = {"alive": True, "ttl_left_s": 60, "idle_for_s": 1.5, "busy": ["a run"], "pid": 7}
    assert heard({"watch": watch, "idle_share": None}) == DatedWatchReport(
        watch=WatchReport(alive=True, ttl_left_s=60, idle_for_s=1.5, busy=("a run",)), at=5.0
    )


@pytest.mark.parametrize(
    "watch", [None, {}, [1], "x", {"ttl_left_s": "soon"}, {"busy": {"a": 1}}, {"alive": 1}]
)
def test_a_forged_report_stops_nothing(watch: object) -> None:
    assert heard({"watch": watch}) == DatedWatchReport(watch=WatchReport(), at=5.0)


def test_a_report_without_an_end_is_one() -> None:
    nothing = {"alive": False, "ttl_left_s": None, "idle_for_s": None, "busy": None}
    assert heard({"watch": nothing}).watch == WatchReport(busy=None)


@pytest.mark.parametrize(
    ("rows", "percent"), [("0, 90\n1, 30.5\n", 120.5), ("0, 1\n1, 0\n", 0.0), ("0, [N/A]\n", None)]
)
def test_the_use_of_gpus_is_a_number_beside_the_sentences(
    rows: str, percent: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def query(words: list[str]) -> CompletedProcess[str]:
        return CompletedProcess(words, 0, rows if "--query-gpu" in words[-1] else "17\n", "")

    monkeypatch.setattr(activity, "_run_query", query)
    monkeypatch.setattr(activity.shutil, "which", lambda name: f"/usr/bin/{name}")
    signs = [ActivitySign("a run", run="night"), *(read_gpu_signs() or [])]
    assert ActivitySnapshot(0.0, signs).gpu_percent == percent


@pytest.mark.parametrize("program", [None, "/usr/bin/nvidia-smi"])
def test_a_server_without_a_gpu_reports_no_use_of_one(
    program: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(words: list[str]) -> CompletedProcess[str]:
        return CompletedProcess(words, 9, "", "couldn't communicate with the NVIDIA driver")

    monkeypatch.setattr(activity, "_run_query", fail)
    # Only this program: the containers of this machine's engine are none of this test's.
    found = {"nvidia-smi": program}
    monkeypatch.setattr(activity.shutil, "which", found.get)
    snapshot = ActivityReader(LabAccount(os.getuid(), os.getgid())).read_activity()
    assert not [sign for sign in snapshot.signs if "GPU" in sign.text]
    assert snapshot.gpu_percent is None


@pytest.mark.parametrize(
    ("reported", "shown"),
    [(150.0, 75), (0, 0), (None, None), (1e9, None), (-1.0, None), (math.nan, None)],
)
def test_the_load_of_a_server_is_the_mean_of_its_gpus(
    reported: float | None, shown: int | None
) -> None:
    watch = heard({"watch": {"gpu_percent": reported, "busy": ["GPU 0 is at 9%"]}}).watch
    load = load_from_watchdog(TWO_GPUS, watch.gpu_percent, 5.0)
    assert (load.gpu_percent if load else None) == shown


def test_a_server_without_a_gpu_shows_no_gpu_load() -> None:
    without = msgspec.structs.replace(TWO_GPUS, gpu_count=0)
    assert load_from_watchdog(without, 0.0, 5.0) is None
