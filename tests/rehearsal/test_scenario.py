"""Settings: what a file may say, what switches and knobs do to it, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from labctl.errors import ConfigError, UsageError
from labctl.rehearsal.scenario import (
    Capacity,
    Scenario,
    load_scenario,
    override_scenario,
    parse_seconds,
)

DOCS = Path(__file__).parents[2] / "docs" / "rehearsal.md"


def test_nothing_given_lets_everything_succeed_at_once() -> None:
    scenario = load_scenario(None)
    assert scenario == Scenario()
    assert scenario.delays.boot == 0.0


def test_a_switch_lies_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "slow.yaml"
    file.write_text("delays: {boot: 20s, visible: 1m}\nquotas: {g: 0}\n")
    scenario = load_scenario(
        file, ["delays.boot=250ms", "capacity=[{zone: us-east-1a, market: spot}]"]
    )
    assert (scenario.delays.boot, scenario.delays.visible) == (0.25, 60.0)
    assert scenario.quotas.g == 0
    assert scenario.capacity == (Capacity(zone="us-east-1a", market="spot"),)


def test_a_running_scenario_can_be_switched() -> None:
    before = load_scenario(None, ["spot.prices={g4dn.xlarge: 0.2}", "denied=[ec2:RunInstances]"])
    after = override_scenario(before, ["expired=true"])
    assert after == msgspec.structs.replace(before, expired=True)


def test_every_problem_is_told_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("delays:\n  bot: 2s\nquotas: {g: many}\nboot: systemd\n")
    with pytest.raises(ConfigError) as caught:
        load_scenario(file)
    told = {(one.path, "did you mean boot" in one.message) for one in caught.value.problems}
    assert told == {("delays.bot", True), ("quotas.g", False), ("boot", False)}


def test_a_switch_without_a_value_is_refused() -> None:
    with pytest.raises(UsageError, match="KEY=VALUE"):
        load_scenario(None, ["delays.boot"])


@pytest.mark.parametrize(("text", "seconds"), [("0s", 0), ("250ms", 0.25), ("2m", 120), ("3", 3)])
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


def test_the_documented_scenario_names_every_key_and_loads(tmp_path: Path) -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    file = tmp_path / "documented.yaml"
    file.write_text(blocks[0])
    load_scenario(file)
    top = {line.split(":")[0] for line in blocks[0].splitlines() if re.match(r"[a-z]", line)}
    assert top == set(Scenario.__struct_fields__)
