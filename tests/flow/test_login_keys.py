"""Which key labctl logs in with, and how the user's key gets onto a machine without it."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import msgspec
import pytest
from lab_world import Cloud, DiskCloud, World, world

from labctl.lifecycle import up as provision


class SharedMachines(DiskCloud):
    """Machines that other people set up, and on which the user has an account."""

    logs_in_as_user: ClassVar[bool] = True


@pytest.mark.parametrize(("kind", "is_own"), [(DiskCloud, True), (SharedMachines, False)])
def test_a_lab_key_is_only_for_servers_that_have_it(
    tmp_path: Path, kind: type[Cloud], is_own: bool
) -> None:
    lab = world(tmp_path, kind)
    server = provision.up(lab.context())
    identity = str(lab.context().identity)
    assert server.endpoint.identity == (identity if is_own else "")
    config = lab.context().connections.config_path(server.id).read_text()
    assert (f'IdentityFile "{identity}"' in config) == is_own


def test_a_key_that_the_settings_name_is_used(tmp_path: Path) -> None:
    lab: World = world(tmp_path, SharedMachines)
    first = provision.up(lab.context())
    endpoint = msgspec.structs.replace(first.endpoint, identity="/home/ann/.ssh/lab")
    lab.cloud.change(first.id, endpoint=endpoint)
    assert provision.up(lab.context()).endpoint.identity == "/home/ann/.ssh/lab"
