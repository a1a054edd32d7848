"""The study of a sweep: what it chooses, and what is left of it after a kill at any moment."""

from __future__ import annotations

import json
import math
from pathlib import Path

import msgspec
import pytest

from labctl.config.sweep import Parameter
from labctl.errors import LabError, PolicyError
from labctl.lifecycle.sweeps import study as study_module
from labctl.lifecycle.sweeps.plan import SweepPlan, build_command, describe_params
from labctl.lifecycle.sweeps.study import Study, StudyDamagedError
from labctl.lifecycle.sweeps.trials import Placement, find_best, sort_best_first

SPACE = {
    "lr": Parameter(kind="float", low=1e-4, high=1.0, log=True),
    "layers": Parameter(kind="int", low=1, high=8),
    "batch": Parameter(kind="choice", values=("32", "64")),
}
PLAN = SweepPlan(
    study="sweep", space=SPACE, metric="loss", direction="minimize", command=("python", "train.py"),
    trials=8, parallel=0, budget_usd=None, sampler="tpe", seed=3, pruner="median", startup=2,
    warmup=0,
)  # fmt: skip


def open_study(folder: Path, plan: SweepPlan | None = PLAN) -> Study:
    return Study(folder / "sweep.journal", plan, "sweep")


def compute_loss(params: dict[str, str]) -> float:
    return abs(math.log10(float(params["lr"])) + 2) + int(params["layers"]) / 80


def run_trials(study: Study, count: int) -> None:
    for _ in range(count):
        trial = study.add_trial()
        study.finish(trial.number, "complete", value=compute_loss(trial.params))


def list_params(study: Study) -> list[dict[str, str]]:
    return [trial.params for trial in study.trials]


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_seed_gives_the_same_parameters_whatever_was_interrupted(
    tmp_path: Path, sampler: str
) -> None:
    plan = msgspec.convert({**msgspec.to_builtins(PLAN), "sampler": sampler}, SweepPlan)
    for name in ("one", "two", "other"):
        (tmp_path / name).mkdir()
    whole = open_study(tmp_path / "one", plan)
    run_trials(whole, 12)
    for count in (1, 4, 7):  # a process of its own each
        run_trials(open_study(tmp_path / "two", plan), count)
    assert list_params(open_study(tmp_path / "two", plan)) == list_params(whole)
    other = open_study(tmp_path / "other", msgspec.structs.replace(plan, seed=4))
    run_trials(other, 12)
    assert list_params(other) != list_params(whole)
    texts = [json.dumps(params) for params in list_params(whole)]
    assert len(set(texts)) == len(texts)


def test_every_part_of_a_trial_is_found_again_after_a_kill(tmp_path: Path) -> None:
    """The file is cut after each of its lines, as a kill would leave it."""
    whole = open_study(tmp_path)
    run_trials(whole, 1)
    trial = whole.add_trial()
    placement = Placement(1, 0, "box-0", 0, "sweep-1")
    whole.place(trial.number, placement)
    whole.report(trial.number, 1, 0.5)
    whole.mark_stopping(trial.number)
    whole.finish(trial.number, "pruned", seconds=3.0)
    expected = whole.get_trial(1)
    lines = whole.file.read_bytes().splitlines(keepends=True)
    for count in range(1, len(lines) + 1):
        folder = tmp_path / str(count)
        folder.mkdir()
        (folder / "sweep.journal").write_bytes(b"".join(lines[:count]))
        study = open_study(folder)
        numbers = [one.number for one in study.trials]
        for one in study.trials:
            if one.state == "running" and len(one.params) < len(SPACE):
                study.complete_parameters(one.number)
        while len(study.trials) < 2:
            study.add_trial()
        assert [one.number for one in study.trials][: len(numbers)] == numbers
        if study.trials[0].state == "complete":
            assert study.trials[1].params == expected.params
    (folder / "sweep.journal").write_bytes(b"".join(lines)[:-10])
    study = open_study(folder)
    study.add_trial()
    assert open_study(folder).trials == study.trials
    found = open_study(tmp_path).get_trial(1)
    assert found == expected
    assert (found.state, found.reached, found.placement) == ("pruned", 1, placement)
    assert found.is_stopping
    assert found.seconds == 3.0


def test_the_pruner_ends_what_is_worse_than_the_median(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    for loss in (0.1, 0.2, 0.3):
        number = study.add_trial().number
        study.report(number, 1, loss)
        study.finish(number, "complete", value=loss)
    bad, good = study.add_trial().number, study.add_trial().number
    study.report(bad, 1, 0.9)
    study.report(good, 1, 0.05)
    # Another process asks the same.
    again = open_study(tmp_path)
    assert again.should_prune(bad)
    assert not again.should_prune(good)


CHANGES = [
    ({"space": {**SPACE, "layers": Parameter(kind="int", low=2, high=8)}}, "layers: 1..8 -> 2..8"),
    ({"space": {"lr": SPACE["lr"], "layers": SPACE["layers"]}}, "batch: 32,64 -> not there"),
    ({"metric": "accuracy"}, "metric: loss -> accuracy"),
    ({"direction": "maximize"}, "direction: minimize -> maximize"),
    ({"command": ("python", "other.py")}, "command: python train.py -> python other.py"),
]


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_trials_that_do_not_compare_are_refused_with_two_ways_on(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    run_trials(open_study(tmp_path), 1)
    (tmp_path / "sweep-2.journal").write_bytes(b"")
    with pytest.raises(PolicyError) as caught:
        open_study(tmp_path, msgspec.structs.replace(PLAN, **change))
    assert said in caught.value.why
    assert "labctl sweep --study sweep-3 " in caught.value.hint
    assert "\nlabctl sweep " in caught.value.hint
    assert open_study(tmp_path).plan == PLAN


@pytest.mark.parametrize(("change", "said"), CHANGES)
def test_a_study_without_trials_takes_another_plan(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    open_study(tmp_path)
    other = msgspec.structs.replace(PLAN, **change)
    study = open_study(tmp_path, other)
    number = study.add_trial().number
    study.finish(number, "complete", value=1.0)
    again = open_study(tmp_path, other)
    assert again.plan == other
    assert again._study.direction.name.lower() == other.direction
    assert [trial.value for trial in again.trials] == [1.0]


def test_a_directory_in_place_of_the_file_is_the_same_error(tmp_path: Path) -> None:
    (tmp_path / "sweep.journal").mkdir()
    with pytest.raises(StudyDamagedError, match="cannot be read"):
        open_study(tmp_path)


def test_limits_and_a_misspelled_metric_may_change(tmp_path: Path) -> None:
    study = open_study(tmp_path, msgspec.structs.replace(PLAN, metric="los"))
    study.add_trial()
    assert open_study(tmp_path).plan.metric == "loss"
    run_trials(open_study(tmp_path), 1)
    longer = msgspec.structs.replace(PLAN, trials=30, budget_usd=2.0, pruner="none", parallel=4)
    assert open_study(tmp_path, longer).plan == longer
    assert open_study(tmp_path, None).plan == longer


@pytest.mark.parametrize(
    "content",
    [
        b"not json\nnot json\n",
        b"[]\n",
        b'{"op_code": 99}\n{"op_code": 0}\n',
        b"[" * 100_000 + b"\n\n",
        b'{"op_code":0,"worker_id":"x","study_name":"sweep","directions":[1]}\n'
        b'{"op_code":2,"worker_id":"x","study_id":0,"user_attr":{"plan":{"study":[]}}}\n',
        b'{"op_code":0,"worker_id":"x","study_name":"sweep","directions":[1]}\n'
        b'{"op_code":4,"worker_id":"x","study_id":0,"datetime_start":"x"}\n',
    ],
)
def test_a_damaged_file_is_one_error_with_a_way_on(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "sweep.journal").write_bytes(content)
    with pytest.raises(StudyDamagedError) as caught:
        _ = open_study(tmp_path).trials
    assert "sweep.journal" in caught.value.why
    assert "labctl sweep --study sweep-2" in caught.value.hint


def test_a_huge_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_trials(open_study(tmp_path), 1)
    monkeypatch.setattr(study_module, "MOST_BYTES", 100)
    with pytest.raises(StudyDamagedError, match="cannot be read"):
        open_study(tmp_path)


def test_optuna_missing_names_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(study_module, "find_spec", lambda name: None)
    with pytest.raises(LabError, match="needs Optuna") as caught:
        open_study(tmp_path)
    assert "sweep]" in caught.value.hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("has_forest", "name"),
    [pytest.param(True, "fANOVA", marks=pytest.mark.long), (False, "PED-ANOVA")],
)
def test_importance_works_without_scikit_learn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_forest: bool, name: str
) -> None:
    study = open_study(tmp_path)
    run_trials(study, 1)
    assert "at least two" in study.compute_importances().why
    run_trials(study, 12)
    monkeypatch.setattr(study_module, "find_spec", lambda name: object() if has_forest else None)
    found = study.compute_importances()
    assert found.evaluator.startswith(name)
    assert found.shares["lr"] == max(found.shares.values())


def test_the_best_come_first(tmp_path: Path) -> None:
    study = open_study(tmp_path)
    ends = [("complete", 0.5), ("failed", None), ("complete", 0.1), ("pruned", None)]
    for state, value in ends:
        study.finish(study.add_trial().number, state, value=value, why="why" * 1000)
    study.add_trial()
    assert [one.number for one in sort_best_first(study.trials, "minimize")] == [2, 0, 3, 4, 1]
    assert sort_best_first(study.trials, "maximize")[0].number == 0
    assert find_best(study.trials[1:2], "minimize") is None
    assert len(study.trials[1].why) == study_module.MOST_WHY


def test_parameters_become_options() -> None:
    params = {"lr": "0.012345678901", "batch": "64", "shift": "-0.5"}
    words = ("python", "train.py", "--lr", "0.012345678901", "--batch", "64", "--shift=-0.5")
    assert build_command(("python", "train.py"), params) == words
    assert describe_params(params) == "--lr 0.01235 --batch 64 --shift=-0.5"
