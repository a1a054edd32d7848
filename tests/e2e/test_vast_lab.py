"""A student's hour at Vast.ai, on a rehearsed marketplace whose machine boots."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lab_directory import make_lab
from lab_servers import ROOT, wait_for

from labctl.rehearsal.core.images import Building
from labctl.rehearsal.vast import VastRehearsal, VastScenario
from labctl.servers.deadlines import month_usd

pytestmark = [pytest.mark.engine, pytest.mark.long]

LAB_YAML = """\
lab: digits
server: {provider: vast, gpu: auto, spot: only, ttl: 2h, executor: process, vast: {settle: 1s}}
run: sh -c 'mkdir -p $LABCTL_CHECKPOINT_DIR && date > $LABCTL_CHECKPOINT_DIR/model.txt'
"""
UP_S = 150.0
# The bid for the cheapest machine, with its disk.
PRICE_USD = 0.1113


def test_up_run_pull_outbid_and_what_is_left(tmp_path: Path, base_image: str) -> None:
    building = Building(
        data_dir=ROOT, base_image=base_image, progress=lambda text, done, total: None
    )
    with VastRehearsal(VastScenario(), building) as cloud:
        lab = make_lab(tmp_path, "unused", base_image)
        lab.environ.update(cloud.environment)
        (lab.root / "lab.yaml").write_text(LAB_YAML)
        refused = lab.labctl("up", "--yes", code=3).stderr
        assert "no guard at vast stops these costs" in refused
        assert cloud.instances == {}

        with lab.in_terminal("up", "--yes") as terminal:
            terminal.said("to start it anyway, type", UP_S)
            terminal.type(f"{month_usd(PRICE_USD)}\n")
            terminal.said("is ready", UP_S)
        [instance] = cloud.instances
        record = cloud.find_instance(instance)
        first = record.body.label if record.body else ""
        assert record.label != first, "the first host key was replaced, and the label has the new"

        lab.labctl("run", "--id", "first")
        lab.labctl("pull")
        assert (lab.root / "runs" / "first" / "checkpoints" / "model.txt").read_text()

        cloud.reclaim(instance, 0)
        cloud.wait(instance, "stopped")
        found = lab.json("orphans", code=1)
        assert f"disk-of-{instance}" in json.dumps(found)
        assert found["billing"] is True

        lab.labctl("down", "--yes", "--discard", code=None)
        # Its disk may hold the only copy of something, so that only this option destroys it.
        lab.labctl("orphans", "--terminate", "--yes", code=1)
        assert cloud.instances == {instance: "stopped"}
        lab.labctl("orphans", "--terminate", "--kept-too", "--yes")
        cloud.wait(instance, "ended")
        wait_for(lambda: not cloud.api.instances.keys)
        assert lab.json("orphans")["billing"] is False
