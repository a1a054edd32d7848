"""Sweeps on the two servers of a lab, by the commands that a student types."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_directory import LabDirectory, make_lab
from lab_servers import ROOT, engine, inside
from transcripts import Session, make_program, replay

pytestmark = [pytest.mark.engine, pytest.mark.long]

GUIDE = ROOT / "docs" / "sweeps.md"
LAB_YAML = re.search(r"```yaml\n(.*?)```", GUIDE.read_text(), re.DOTALL)
PROGRAM = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def hue(
    tmp_path_factory: pytest.TempPathFactory, base_image: str, server_image: str
) -> Iterator[LabDirectory]:
    """The lab of the page, with a program that needs no packages."""
    lab = make_lab(tmp_path_factory.mktemp("sweep"), "hue", base_image)
    (lab.root / "Dockerfile").unlink()
    assert LAB_YAML is not None
    assert PROGRAM is not None
    (lab.root / "lab.yaml").write_text(LAB_YAML[1])
    (lab.root / "train.py").write_text(PROGRAM[1])
    try:
        yield lab
    finally:
        lab.labctl("down", "--yes", "--discard", code=None)


@pytest.fixture
def started(hue: LabDirectory) -> LabDirectory:
    """The lab with its servers, whichever tests ran before."""
    hue.labctl("up", "--yes")
    return hue


def list_servers(lab: LabDirectory) -> list[str]:
    status = lab.json("status")
    return [server["id"] for server in (status["server"], *status["servers"])]


def count_runs(lab: LabDirectory, study: str) -> dict[str, Counter[str]]:
    """Count the run directories of a study on each server."""
    found = {}
    for name, server in zip(("hue", "hue-1"), list_servers(lab), strict=True):
        _, text = inside(server, f"ls /home/student/labctl/{name}/runs", user="student")
        found[name] = Counter(run for run in text.split() if run.startswith(f"{study}-"))
    return found


def sweep(lab: LabDirectory, *words: str, code: int | None = 0) -> dict[str, Any]:
    told = lab.labctl("sweep", "--yes", "--json", *words, code=code)
    result: dict[str, Any] = json.loads(told.stdout)["sweep"]
    return result


def test_a_sweep_as_the_page_shows(hue: LabDirectory, tmp_path: Path) -> None:
    programs = make_program(tmp_path)
    path = f"{programs}:{hue.environ['PATH']}"
    session = Session(hue.root, {**hue.environ, "PATH": path})
    assert "\n".join(replay(GUIDE, "sweep", session)) == ""
    page = (hue.root / "runs" / "sweep.html").read_text()
    assert "Importance of the parameters" in page
    result = sweep(hue, "--show")
    best = hue.root / "runs" / f"sweep-{result['best']}"
    assert "epoch 3" in (best / "logs" / "run.log").read_text()


def test_a_killed_sweep_repeats_no_trial_and_loses_none(started: LabDirectory) -> None:
    words = ("--study", "killed", "--budget", "3", "--yes")
    process = started.start("sweep", *words)
    process.said("trial 3 starts")
    process.popen.kill()
    process.end(None)
    assert "The servers are free, so the budget is not used." in process.stderr
    again = started.labctl("sweep", *words)
    assert "trial 0 starts" not in again.stderr
    result = sweep(started, *words)
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 8
    assert sorted(trial["number"] for trial in result["trials"]) == list(range(8))
    runs = count_runs(started, "killed")
    assert sum(runs.values(), Counter()) == Counter({f"killed-{n}": 1 for n in range(8)})
    assert min(sum(each.values()) for each in runs.values()) >= 3
    beside = next(iter(runs["hue-1"]))
    assert "epoch 3" in started.labctl("logs", beside).stdout
    assert "already ended" in started.labctl("cancel", beside).stdout
    started.labctl("pull", beside)
    assert (started.root / "runs" / beside / "logs" / "progress.json").is_file()
    assert {run["id"] for run in started.json("status")["runs"]} >= {*runs["hue"], *runs["hue-1"]}
    values = [trial["value"] for trial in result["trials"]]
    assert values == sorted(values)
    assert set(result["importances"]["shares"]) == {"lr", "batch"}


def test_ctrl_c_leaves_the_trials_running_and_names_them(started: LabDirectory) -> None:
    words = ("--study", "halted", "--trials", "2", "--yes")
    process = started.start("sweep", *words)
    process.said("trial 1 starts")
    process.interrupt()
    process.end(130)
    assert "still running (free)" in process.stderr
    assert "labctl sweep --study halted" in process.stderr
    assert "2 of 2 trials" in started.labctl("sweep", *words).stdout


def test_a_bad_trial_is_pruned(started: LabDirectory) -> None:
    # With this seed, the last two trials are those with a bad lr.
    words = ("--study", "pruned", "--param", "lr=0.01,0.011,0.9", "--seed", "19", "--trials", "5")
    command = ("python3", "train.py", "--epochs", "30", "--pause", "1")
    text = (started.root / "lab.yaml").read_text().replace("pruner: none", "startup: 2")
    with started.holding("lab.yaml", text):
        result = sweep(started, *words, "--", *command)
    states = {trial["number"]: trial["state"] for trial in result["trials"]}
    # Trial 2 may be a little worse than the first two.
    assert [states[number] for number in (0, 1)] == ["complete"] * 2
    assert [states[number] for number in (3, 4)] == ["pruned"] * 2
    runs = {run["id"]: run["state"] for run in started.json("status")["runs"]}
    assert (runs["pruned-0"], runs["pruned-3"]) == ("exited", "cancelled")


def test_an_unknown_option_is_told_after_the_first_trial(started: LabDirectory) -> None:
    words = ("--study", "unknown", "--param", "wide=1,2", "--parallel", "1", "--yes")
    told = started.labctl("sweep", *words, code=3)
    assert "trial 0 does not accept its options" in told.stderr
    assert "unrecognized arguments: --wide" in told.stderr
    assert "trial 1" not in told.stderr
    assert "labctl sweep --study unknown-2 --param wide=1,2 --parallel 1\n" in told.stderr
    refused = started.labctl("sweep", "--study", "unknown", "--yes", code=3)
    assert "wide: 1,2 -> not there" in refused.stderr


def test_a_metric_that_no_run_reports_costs_no_trial(started: LabDirectory) -> None:
    words = ("--study", "metric", "--trials", "2", "--parallel", "1", "--yes")
    told = started.labctl("sweep", "--metric", "val_los", *words, code=4)
    assert "run metric-0: it does not report val_los" in told.stderr
    assert "labctl sweep --study metric --metric val_loss --trials 2 --parallel 1\n" in told.stderr
    assert "is still running" not in told.stderr
    assert "did you mean val_loss?" in told.stderr
    assert "trial 1 starts" not in told.stderr
    assert "trial 0 starts" not in started.labctl("sweep", *words).stderr
    assert sum(count_runs(started, "metric").values(), Counter()).total() == 2


def test_a_diverged_trial_fails_alone_and_a_text_as_metric_is_named(
    started: LabDirectory,
) -> None:
    program = """\
import json, os, sys, time
value = {"nan": float("nan"), "text": "0.5"}.get(sys.argv[sys.argv.index("--v") + 1], 1.0)
with open(os.environ["LABCTL_LOG_DIR"] + "/progress.json", "w") as file:
    json.dump({"epoch": 1, "val_loss": value}, file)
time.sleep(2.5)
"""
    (started.root / "report.py").write_text(program)
    words = ("--parallel", "1", "--trials", "2")
    command = ("--", "python3", "report.py")
    result = sweep(started, "--study", "diverged", "--param", "v=nan,well", *words, *command)
    reasons = {trial["params"]["v"]: (trial["state"], trial["why"]) for trial in result["trials"]}
    assert reasons == {"well": ("complete", ""), "nan": ("failed", "its metric ended as nan")}
    texts = ("--study", "text", "--param", "v=text,text2")
    told = started.labctl("sweep", "--yes", *texts, *words, *command)
    assert "reports val_loss as '0.5', which is not a number" in told.stderr


def test_failures_in_a_row_end_the_sweep_and_name_the_logs(started: LabDirectory) -> None:
    words = ("--study", "failing", "--parallel", "1", "--yes")
    told = started.labctl("sweep", *words, "--", "sh", "-c", "echo broken; exit 1", code=3)
    assert "3 trials in a row failed" in told.stderr
    assert "log: runs/failing-2/logs/run.log" in told.stderr
    assert "broken" in (started.root / "runs" / "failing-2" / "logs" / "run.log").read_text()
    shown = sweep(started, "--show", "--study", "failing")
    assert [trial["state"] for trial in shown["trials"]] == ["failed"] * 3


def test_trials_run_side_by_side_on_one_server(started: LabDirectory) -> None:
    process = started.labctl("sweep", "--study", "beside", "--parallel", "4", "--yes")
    runs = count_runs(started, "beside")
    assert sum(runs.values(), Counter()).total() == 8
    first = process.stderr.split("trial 3 starts")[0]
    assert "val_loss" not in first


def test_the_trials_of_a_lost_server_are_tried_again(started: LabDirectory) -> None:
    words = ("--study", "lost", "--trials", "6", "--yes")
    process = started.start("sweep", *words, "--", "python3", "train.py", "--pause", "2")
    process.said("trial 3 starts")
    lost = list_servers(started)[1]
    with engine.connect() as docker:
        docker.containers.get(lost).remove(force=True)
    process.end()
    assert "to be tried again: trial" in process.stderr
    result = sweep(started, "--show", "--study", "lost")
    assert [trial["state"] for trial in result["trials"]] == ["complete"] * 6
    assert any(trial["placement"]["attempt"] == 2 for trial in result["trials"])
    more = ("--study", "lost", "--trials", "8", "--up", "--yes")
    command = ("--", "python3", "train.py", "--pause", "2")
    assert "8 of 8 trials" in started.labctl("sweep", *more, *command).stdout
    assert len(list_servers(started)) == 2
