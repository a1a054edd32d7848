"""When a container counts as one that has lost its GPU, and which containers have one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from labctl.agent.host.engine_objects import ContainerHostConfig
from labctl.agent.host.gpu_access import (
    NO_NODES,
    OPENED,
    REFUSED,
    STATE,
    find_loss_time,
    update_access,
)
from labctl.agent.host.paths import write_json
from labctl.agent.host.systemd_reload import has_gpu
from labctl.wire.codec import from_json, to_json
from labctl.wire.runs import GpuAccessRecord


@pytest.mark.parametrize(
    ("codes", "lost"),
    [
        ((OPENED, REFUSED, REFUSED), 2.0),
        ((OPENED, REFUSED, REFUSED, REFUSED), 2.0),
        ((OPENED, REFUSED, None, REFUSED), 2.0),
        ((OPENED, REFUSED), None),
        ((OPENED, REFUSED, OPENED, REFUSED), None),
        ((OPENED, REFUSED, REFUSED, OPENED), None),
        ((REFUSED, REFUSED, REFUSED), None),  # never had access
        ((OPENED, None, None), None),  # no answer is no refusal
        ((OPENED, 137, 137), None),  # the container was just stopped
        ((NO_NODES, NO_NODES), None),
    ],
)
def test_a_loss_is_access_that_was_there_and_is_refused_twice(
    codes: tuple[int | None, ...], lost: float | None
) -> None:
    access = GpuAccessRecord()
    for at, code in enumerate(codes, start=1):
        access = update_access(access, code, float(at))
    assert access.lost_at == lost


def test_a_loss_is_of_one_attempts_container_alone(tmp_path: Path) -> None:
    assert find_loss_time(tmp_path, "lab-night-1") is None
    (tmp_path / ".labctl").mkdir()
    access = GpuAccessRecord("lab-night-1", 1.0, 2.0, 2.0)
    write_json(tmp_path / ".labctl" / STATE, to_json(access))
    assert find_loss_time(tmp_path, "lab-night-1") == 2.0
    assert find_loss_time(tmp_path, "lab-night-2") is None


@pytest.mark.parametrize(
    ("host_config", "expected"),
    [
        ({"DeviceRequests": [{"Count": -1, "Capabilities": [["gpu"]]}]}, True),
        ({"DeviceRequests": [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=0"]}]}, True),
        ({"DeviceRequests": None, "Runtime": "nvidia"}, True),
        ({"Devices": [{"PathOnHost": "/dev/nvidia0"}]}, True),
        ({"DeviceRequests": None, "Runtime": "runc", "Devices": None}, False),
        ({"Devices": [{"PathOnHost": "/dev/fuse"}]}, False),
    ],
)
def test_containers_with_a_gpu_are_known(host_config: dict[str, Any], expected: bool) -> None:
    assert has_gpu(from_json(ContainerHostConfig, host_config)) is expected
