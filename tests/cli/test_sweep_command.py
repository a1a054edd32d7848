"""`labctl sweep` and `labctl run --from-trial` without a server."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from labctl import Lab
from labctl.lifecycle.sweeps import page
from labctl.lifecycle.sweeps import study as study_module
from labctl.lifecycle.sweeps.costs import compute_cost
from labctl.lifecycle.sweeps.endings import make_metric_error
from labctl.lifecycle.sweeps.metric import Reading
from labctl.lifecycle.sweeps.plan import SweepOptions, build_plan
from labctl.lifecycle.sweeps.study import Study
from labctl.lifecycle.sweeps.sweep import find_study_file
from labctl.lifecycle.sweeps.trials import Placement
from labctl.model import Endpoint, Offer, Run, Server

HOUR_S = 3600.0
LAB = """\
lab: digits
run: [python, train.py]
sweep: {parameters: {lr: 1e-3..1.0:log, opt: [adam, sgd]}, metric: loss, direction: minimize}
"""


@pytest.fixture
def lab(home: Path) -> Lab:
    (home / "digits" / "lab.yaml").write_text(LAB)
    return Lab.load(home / "digits", environ={"HOME": str(home)})


def write_study(lab: Lab, values: list[float]) -> Study:
    plan = build_plan(lab.config, SweepOptions())
    study = Study(find_study_file(lab.context, "sweep"), plan, "sweep")
    for value in values:
        number = study.add_trial().number
        study.place(number, Placement(1, 0, "box", 0, f"sweep-{number}"))
        study.finish(number, "complete", value=value, seconds=61.0)
    return study


def test_show_prints_the_trials_best_first_and_writes_the_page(lab: Lab, labctl: Any) -> None:
    write_study(lab, [0.5, 0.25, 0.75])
    told = labctl("sweep", "--show")
    assert told.code == 0
    rows = [line.split()[:5] for line in told.out.splitlines()[1:4]]
    assert rows[0] == ["1", "0.25", "complete", "61", "s"]
    assert [row[0] for row in rows] == ["1", "0", "2"]
    assert "3 of 20 trials (free); results: runs/sweep.html" in told.out
    assert "labctl run --from-trial 1 " in told.err
    result = json.loads(labctl("sweep", "--show", "--json").out)["sweep"]
    assert result["best"] == 1
    assert Path(result["page"]).is_file()


def test_a_trial_runs_again_with_its_parameters(
    lab: Lab, labctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = write_study(lab, [0.5]).trials[0]
    commands: list[tuple[str, ...]] = []

    def record(self: Lab, command: tuple[str, ...], **options: Any) -> None:
        commands.append(command)
        raise KeyboardInterrupt

    monkeypatch.setattr(Lab, "run", record)
    assert labctl("run", "--from-trial", "0").code == 130
    assert labctl("run", "--from-trial", "sweep:0").code == 130
    words = ("python", "train.py", "--lr", trial.params["lr"], "--opt", trial.params["opt"])
    assert commands == [words, words]


def test_a_trial_that_was_only_begun_is_not_run_with_half_of_its_parameters(
    lab: Lab, labctl: Any
) -> None:
    study = write_study(lab, [])
    study._study.ask()  # as a process leaves it that ends before it has chosen parameters
    told = labctl("run", "--from-trial", "0")
    assert told.code == 255
    assert "trial 0 has no parameters yet" in told.err
    assert "next: labctl sweep" in told.err


def test_a_study_without_trials_takes_other_parameters(lab: Lab, labctl: Any) -> None:
    write_study(lab, [])
    told = labctl("sweep", "--param", "lr=1..8", "--metric", "acc", "--direction", "maximize")
    assert (told.code, "digits has no server" in told.err) == (4, True)


def test_the_hint_of_a_new_study_has_the_options_that_were_typed(lab: Lab, labctl: Any) -> None:
    write_study(lab, [0.5])
    options = "--param lr=1..8 --metric acc --trials 9 --budget 2.5 -- python fit.py"
    output = labctl("sweep", *options.split())
    assert output.code == 3
    new = f"labctl sweep --study sweep-2 {options}"
    assert f"  next: {new}\n        (starts a new study)\n" in output.err
    assert "labctl sweep --study sweep\n        (with the earlier settings again)\n" in output.err


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("run", "--from-trial", "7"), 255, "the study sweep has no trial 7"),
        (("run", "--from-trial", "seven"), 255, "is not the number of a trial"),
        (("run", "--from-trial", "../x:7"), 255, "is not the name of a study"),
        (("run", "--from-trial", "other:7"), 255, "no study is called other"),
        (("run", "--from-trial", "0", "--", "ls"), 255, "cannot be combined with a command"),
        (("sweep", "--budget", "much"), 2, "is not a price"),
        (("sweep", "--trials", "0"), 2, "is not a whole number"),
        (("sweep", "--param", "lr=2"), 2, "needs 2 to 100 values"),
        (("sweep", "--", "--lr"), 2, "is not a program"),
        (("sweep", "--lr", "3"), 2, "has no option --lr"),
        (("sweep",), 4, "digits has no server"),
        (("sweep", "--metric", "acc"), 3, "metric: loss -> acc"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    lab: Lab, labctl: Any, words: tuple[str, ...], code: int, said: str
) -> None:
    write_study(lab, [0.5])
    told = labctl(*words)
    assert said in told.err
    assert told.code == code
    assert "next:" in told.err or "for example" in told.err


def test_without_optuna_the_install_command_is_shown(
    lab: Lab, labctl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "find_spec", lambda name: None)
    told = labctl("sweep")
    assert told.code == 1
    assert "a sweep needs Optuna" in told.err
    assert "sweep]" in told.err


def test_the_page_shows_hostile_texts_as_text(lab: Lab, tmp_path: Path) -> None:
    name = "<script>alert(1)</script>"
    options = SweepOptions(metric=name, parameters=(f"opt={name},b",), command=("x",), study="bad")
    study = Study(tmp_path / "bad.journal", build_plan(lab.config, options), "bad")
    for number in range(4):
        study.finish(study.add_trial().number, "complete", value=float(number))
    study.finish(study.add_trial().number, "failed", why="<img src=x onerror=alert(1)>\u202e")
    importances = study.compute_importances()
    content = page.build_page("lab", study.plan, study.trials, importances, "1")
    page.write_page(tmp_path / "page.html", content, lab.context.paths.data_dir / "templates")
    text = (tmp_path / "page.html").read_text()
    assert "<script" not in text
    assert "<img" not in text
    assert "\u202e" not in text
    assert "&lt;img src=x" in text


def test_the_cost_is_that_of_the_servers_while_trials_run(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    study = write_study(lab, [0.5, 0.25, 0.75])
    state = lab.context.state
    offer = Offer(provider="local", type="container", price_usd_per_hour=2.0)
    server = Server(
        id="box", provider="local", lab="digits", state="running", offer=offer, lab_id=lab.id,
        alias="digits", endpoint=Endpoint(host="127.0.0.1"), created_at=1000.0,
    )  # fmt: skip
    state.save_server(server)
    times = [(1000.0, 2 * HOUR_S), (1000.0 + HOUR_S, 2 * HOUR_S), (9e5, HOUR_S)]
    for number, (start, length) in enumerate(times):
        run = Run(
            id=f"sweep-{number}", lab_id=lab.id, server_id="box", command=("train",),
            created_at=start, started_at=start, ended_at=start + length, state="exited",
        )  # fmt: skip
        state.save_run(run)
    cost = compute_cost(lab.context, "sweep", study.trials)
    assert cost.spent_usd == pytest.approx(2.0 * (3 + 1))
    assert cost.dearest_usd == pytest.approx(4.0)
    assert not cost.is_free


def test_a_metric_that_was_typed_and_no_run_reports_is_replaced_in_the_hint(lab: Lab) -> None:
    parameters = ("lr=1e-3..1e-1:log",)
    typed = SweepOptions(
        parameters=parameters, metric="val_los", direction="minimize", study="typed"
    )
    study = Study(
        find_study_file(lab.context, "typed"), build_plan(lab.config, typed), "typed", typed
    )
    run = Run(id="typed-0", lab_id="own", server_id="box", state="exited")
    missing = "it does not report val_los"
    options = "--param lr=1e-3..1e-1:log --metric {} --direction minimize"
    reading = Reading(names=("epoch", "val_loss"))
    error = make_metric_error(study, missing, reading, run, 0)
    same, new = error.hint.splitlines()
    assert same == f"labctl sweep --study typed {options.format('val_loss')}   # this trial counts"
    assert new.startswith(f"labctl sweep --study typed-2 {options.format('val_los')}   #")
    silent = make_metric_error(study, missing, Reading(), run, 0)
    assert silent.hint == new
    assert "to the file progress.json in the directory $LABCTL_LOG_DIR" in silent.why
    other = make_metric_error(study, missing, Reading(names=("epoch", "x")), run, 0)
    assert "--metric x " in other.hint


def test_show_and_from_trial_take_the_study_that_changed_last(lab: Lab, labctl: Any) -> None:
    write_study(lab, [0.5])
    plan = build_plan(lab.config, SweepOptions(study="sweep-2"))
    newer = Study(find_study_file(lab.context, "sweep-2"), plan, "sweep-2")
    for _ in range(2):
        newer.finish(newer.add_trial().number, "complete", value=0.25)
    later_ns = time.time_ns() + 10**9
    os.utime(newer.file, ns=(later_ns, later_ns))
    shown = labctl("sweep", "--show")
    assert "2 of 20 trials (free); results: runs/sweep-2.html" in shown.out
    assert "labctl run --from-trial sweep-2:0 " in shown.err
    assert "labctl sweep --show --study sweep " in shown.err
    named = labctl("sweep", "--show", "--study", "sweep")
    assert "results: runs/sweep.html" in named.out
    assert "labctl run --from-trial sweep:0 " in named.err
    assert "the study sweep-2 has no trial 7" in labctl("run", "--from-trial", "7").err


def test_a_trial_whose_run_has_ended_is_not_shown_as_running(lab: Lab, labctl: Any) -> None:
    study = write_study(lab, [])
    for number, start in enumerate((1000.0, 2000.0)):
        trial = study.add_trial()
        study.place(trial.number, Placement(1, 0, "box", number, f"sweep-{number}"))
        ended = Run(
            id=f"sweep-{number}",
            lab_id=lab.id,
            server_id="box",
            state="exited",
            exit_code=0,
            started_at=start,
            ended_at=start + 61,
        )
        lab.context.state.save_run(ended)
    study.note_missing_metric(0, "it does not report loss")
    said = labctl("sweep", "--show").out
    first, second = said.splitlines()[1:3]
    assert " ended, no metric " in first
    assert " 61 s " in first
    assert " ended, not counted yet " in second
    assert "running" not in said
    assert "running" not in (lab.config.root / "runs" / "sweep.html").read_text()


def test_a_direction_that_is_missing_is_an_option_of_the_command(labctl: Any) -> None:
    said = labctl("sweep", "--param", "lr=1..8", "--metric", "acc", "--", "python", "fit.py")
    assert "should acc become small or large?" in said.err
    for direction in ("minimize", "maximize"):
        options = f"--param lr=1..8 --metric acc --direction {direction} -- python fit.py"
        assert f"labctl sweep --study sweep {options}\n" in said.err


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        (("--metric", "loss"), "--param lr=1e-4..1e-1:log --metric loss -- python train.py"),
        (("--param", "x=1,2"), "--param x=1,2 --metric val/loss -- python train.py"),
    ],
)
def test_what_a_sweep_lacks_is_added_to_the_typed_command(
    labctl: Any, home: Path, words: tuple[str, ...], completed: str
) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\n")
    said = labctl("sweep", *words, "--", "python", "train.py")
    assert said.code == 2
    assert f"next: labctl sweep --study sweep {completed}" in " ".join(said.err.split())


def test_a_sweep_without_a_command_gets_one(labctl: Any, home: Path) -> None:
    (home / "digits" / "lab.yaml").write_text("lab: digits\n")
    said = labctl("sweep", "--param", "x=1,2", "--trials", "3")
    assert "--param x=1,2 --trials 3 -- python train.py" in " ".join(said.err.split())
