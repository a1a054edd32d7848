"""`sweep:` in lab.yaml and the options of `labctl sweep`."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.config import LabConfig, list_settings, load_lab
from labctl.config.sweep import Parameter, SweepConfig, parse_parameter
from labctl.errors import ConfigError, UsageError
from labctl.lifecycle.sweeps.plan import SweepOptions, build_plan

WHOLE = """\
lab: hue
run: python train.py
sweep:
  metric: val/loss
  direction: minimize
  parameters:
    lr: 1e-4..1e-1:log
    batch: [32, 64]
    layers: {type: int, low: 1, high: 9, step: 2}
    drop: 0.0..0.5:step=0.1
    opt: adam, sgd
  trials: 12
  parallel: 4
  budget: 3
  seed: 7
  pruner: halving
"""


def load(folder: Path, text: str) -> LabConfig:
    (folder / "lab.yaml").write_text(text)
    return load_lab(folder, environ={"HOME": str(folder)})


def test_every_way_to_write_a_parameter(tmp_path: Path) -> None:
    config = load(tmp_path, WHOLE)
    assert config.sweep == SweepConfig(
        parameters={
            "lr": Parameter(kind="float", low=1e-4, high=1e-1, log=True),
            "batch": Parameter(kind="choice", values=("32", "64")),
            "layers": Parameter(kind="int", low=1, high=9, step=2),
            "drop": Parameter(kind="float", low=0, high=0.5, step=0.1),
            "opt": Parameter(kind="choice", values=("adam", "sgd")),
        },
        metric="val/loss", direction="minimize", trials=12, parallel=4, budget_usd=3.0, seed=7,
        pruner="halving",
    )  # fmt: skip
    rows = {key: (text, origin) for key, text, origin in list_settings(config)}
    assert rows["sweep.parameters.layers"] == ("1..9:step=2", "lab.yaml:9")
    assert rows["sweep.seed"] == ("7", "lab.yaml:15")
    for parameter in config.sweep.parameters.values():
        assert parse_parameter(parameter.text) == parameter


def test_all_problems_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = """\
lab: hue
sweep:
  metrik: x
  direction: up
  trials: 0
  budget: -1
  parameters:
    lr: 1e-1..1e-4:log
    batch: [32, 32]
    epochs: {type: int, low: 1, high: 8.5}
    opt: adam
    "--a": 1..2
    z: {type: float}
    q: {low: 1}
    zero: 0..1:log
    odd: 1..8:steps=2
    wild: {type: choice, values: [a, b], low: 3}
    huge: 1..99999999999999999999
    nan: .nan
    far: 1..8:step=3
    wide: 0.0..1e999
    fine: 0.0..1.0:step=1e-40
"""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    lines = {problem.path: problem.line for problem in caught.value.problems}
    names = ("lr", "batch", "epochs", "opt", "--a", "z")
    more = ("zero", "odd", "wild", "huge", "nan", "far", "wide", "fine")
    expected = {"sweep.metrik": 3, "sweep.direction": 4, "sweep.trials": 5, "sweep.budget": 6}
    expected |= {f"sweep.parameters.{name}": 8 + n for n, name in enumerate(names)}
    expected |= {f"sweep.parameters.{name}": 15 + n for n, name in enumerate(more)}
    assert lines == {**expected, "sweep.parameters.q.type": 14}


def test_too_many_parameters_are_refused(tmp_path: Path) -> None:
    names = "".join(f"    p{n}: 1..2\n" for n in range(51))
    with pytest.raises(ConfigError, match="problem") as caught:
        load(tmp_path, f"lab: hue\nsweep:\n  parameters:\n{names}")
    assert "51 parameters" in caught.value.problems[0].message


def test_options_override_and_add(tmp_path: Path) -> None:
    config = load(tmp_path, WHOLE)
    options = SweepOptions(
        parameters=("lr=1..8", "wide=yes,no"), metric="acc", direction="maximize", trials=3,
        budget_usd=0.5, seed=0, command=("sh", "x.sh"),
    )  # fmt: skip
    plan = build_plan(config, options)
    assert plan.space["lr"] == Parameter(kind="int", low=1, high=8)
    assert plan.space["wide"].values == ("yes", "no")
    assert list(plan.space) == ["lr", "batch", "layers", "drop", "opt", "wide"]
    assert (plan.metric, plan.direction, plan.trials) == ("acc", "maximize", 3)
    assert (plan.budget_usd, plan.seed, plan.command) == (0.5, 0, ("sh", "x.sh"))
    assert build_plan(config, SweepOptions()).command == ("python", "train.py")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"parameters": ("lr",)}, "write NAME=VALUES"),
        ({"parameters": ("lr=1",)}, "needs 2 to 100 values"),
        ({"parameters": ("l r=1..2",)}, "not the name of an option"),
        ({"parameters": ("lr=1..x",)}, "is not a range"),
        ({"study": "a/../b"}, "at most 24 lower-case letters"),
        ({"study": "x" * 25}, "at most 24 lower-case letters"),
        ({}, "--param was not given"),
        ({"parameters": ("lr=1..2",)}, "--metric was not given"),
        ({"parameters": ("lr=0.0..1e999",)}, "too large"),
        ({"parameters": ("lr=-1e308..1e308",)}, "too large"),
        ({"parameters": ("lr=0.0..1.0:step=1e-40",)}, "step is too small"),
        ({"parameters": ("lr=1..2",), "metric": "loss"}, "--direction was not given"),
    ],
)
def test_what_is_missing_or_wrong_is_a_usage_error(
    tmp_path: Path, options: dict[str, object], said: str
) -> None:
    config = load(tmp_path, "lab: hue\nrun: python train.py\n")
    with pytest.raises(UsageError) as caught:
        build_plan(config, SweepOptions(**options))  # type: ignore[arg-type]
    assert said in caught.value.why
    assert caught.value.hint


def test_a_metric_with_a_line_break_is_refused(tmp_path: Path) -> None:
    config = load(tmp_path, "lab: hue\nrun: python train.py\n")
    with pytest.raises(UsageError, match="is not the name of a metric"):
        build_plan(config, SweepOptions(parameters=("lr=1..2",), metric="a\nb"))
