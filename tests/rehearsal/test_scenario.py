"""Settings: what a file may say, what switches and knobs do to it, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from labctl.cli.rehearse import CLOUDS, SimulatedCloud
from labctl.errors import ConfigError, UsageError
from labctl.model import Value
from labctl.rehearsal.aws.scenario import Capacity, Scenario
from labctl.rehearsal.core.scenario import load_scenario, override_scenario, parse_seconds
from labctl.rehearsal.lambda_cloud import LambdaScenario
from labctl.rehearsal.runpod import RunPodScenario

DOCS = Path(__file__).parents[2] / "docs"


def test_nothing_given_lets_everything_succeed_at_once() -> None:
    scenario = load_scenario(Scenario, None)
    assert scenario == Scenario()
    assert scenario.delays.boot == 0.0


def test_a_switch_lies_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("delays: {boot: 20s, visible: 1m}\nquotas: {g: 0}\n")
    scenario = load_scenario(
        Scenario, file, ["delays.boot=250ms", "capacity=[{zone: us-east-1a, market: spot}]"]
    )
    assert (scenario.delays.boot, scenario.delays.visible) == (0.25, 60.0)
    assert scenario.quotas.g == 0
    assert scenario.capacity == (Capacity(zone="us-east-1a", market="spot"),)


def test_a_running_scenario_can_be_switched() -> None:
    before = load_scenario(
        Scenario, None, ["spot.prices={g4dn.xlarge: 0.2}", "denied=[ec2:RunInstances]"]
    )
    after = override_scenario(before, ["expired=true"])
    assert after == msgspec.structs.replace(before, expired=True)


@pytest.mark.parametrize("cloud", CLOUDS, ids=lambda cloud: cloud.command)
def test_the_scenario_of_each_cloud_can_be_switched(cloud: SimulatedCloud) -> None:
    before = cloud.scenario()
    after = override_scenario(before, ["delays.boot=2s", "capacity=[{type: '*T4*'}]"])
    assert (after.delays.boot, after.capacity[0].type) == (2.0, "*T4*")
    assert msgspec.structs.replace(after, delays=before.delays, capacity=()) == before


def test_every_problem_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("delays:\n  bot: 2s\nquotas: {g: many}\nboot: systemd\n")
    with pytest.raises(ConfigError) as caught:
        load_scenario(Scenario, file)
    told = {(one.path, "did you mean boot" in one.message) for one in caught.value.problems}
    assert told == {("delays.bot", True), ("quotas.g", False), ("boot", False)}


def test_a_switch_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        load_scenario(Scenario, None, ["delays.boot"])


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0), ("250ms", 0.25), ("2m", 120), ("3", 3)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize(
    ("page", "kind"),
    [("rehearsal.md", Scenario), ("lambda.md", LambdaScenario), ("runpod.md", RunPodScenario)],
)
def test_the_documented_scenario_names_every_key_and_loads(
    tmp_path: Path, page: str, kind: type[Value]
) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", (DOCS / page).read_text(), re.DOTALL)
    block = next(one for one in blocks if "boot: " in one)
    file = tmp_path / "documented.yaml"
    file.write_text(block)
    load_scenario(kind, file)
    top = {line.split(":")[0] for line in block.splitlines() if re.match(r"[a-z]", line)}
    assert top == {field.encode_name for field in msgspec.structs.fields(kind)}
