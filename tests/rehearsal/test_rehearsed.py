"""A drill's way to the rehearsal: it takes spot instances, and leaves others to their provider."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest
from rehearsal_bed import RehearsalSetup

from labctl.rehearsal.aws import Rehearsal, Scenario
from labctl.servers.reclaimer import Reclaimer


class Noting:
    """A provider that takes servers back, and notes which."""

    no_notice: ClassVar[str] = ""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float]] = []

    def reclaim(self, server_id: str, notice_s: float) -> bool:
        self.asked.append((server_id, notice_s))
        return not notice_s


SPOT = {"MarketType": "spot", "SpotOptions": {"SpotInstanceType": "one-time"}}


@pytest.mark.parametrize("notice_s", [0.3, 0])
def test_a_spot_instance_is_taken_as_aws_takes_it(tmp_path: Path, notice_s: float) -> None:
    with Rehearsal(Scenario(boot="none")) as rehearsal:
        instance = RehearsalSetup(rehearsal, tmp_path).run(InstanceMarketOptions=SPOT)["InstanceId"]
        rehearsal.wait(instance, "running")
        provider = Noting()
        assert Reclaimer(provider, rehearsal.url).reclaim(f"{instance}.us-east-1", notice_s)
        rehearsal.wait(instance, "terminated")
        assert provider.asked == []


def test_another_instance_is_its_provider_s(tmp_path: Path) -> None:
    with Rehearsal(Scenario(boot="none")) as rehearsal:
        instance = RehearsalSetup(rehearsal, tmp_path).run()["InstanceId"]
        rehearsal.wait(instance, "running")
        provider = Noting()
        taker = Reclaimer(provider, rehearsal.url)
        assert not taker.reclaim(f"{instance}.us-east-1", 120)
        assert taker.reclaim(f"{instance}.us-east-1", 0)
        assert provider.asked == [(f"{instance}.us-east-1", 120), (f"{instance}.us-east-1", 0)]
        assert rehearsal.instances[instance] == "running"
