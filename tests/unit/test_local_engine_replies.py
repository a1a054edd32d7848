"""What the local provider reads of the engine's replies."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from docker import DockerClient
from docker.errors import ImageNotFound

from labctl.errors import BuildError
from labctl.providers.local import image
from labctl.providers.local.engine import EngineInfo, inspect_engine


def make_engine(**info: Any) -> DockerClient:
    return cast(DockerClient, SimpleNamespace(info=lambda: info))


def test_the_info_of_an_engine_is_read_and_the_rest_ignored() -> None:
    engine = make_engine(
        ServerVersion="28.2.2",
        OSType="linux",
        DockerRootDir="/var/lib/docker",
        CgroupVersion="2",
        Plugins={"Volume": ["local"]},
    )
    info = EngineInfo(version="28.2.2", os="linux", root="/var/lib/docker", cgroup_version="2")
    assert inspect_engine(engine) == info


def test_an_engine_that_does_not_name_its_cgroups_has_version_1() -> None:
    engine = make_engine(ServerVersion="19.03.15", OSType="linux", DockerRootDir="/docker")
    assert inspect_engine(engine).cgroup_version == "1"


def test_a_build_that_fails_names_the_step_and_keeps_the_log(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM base\nRUN false\n")
    lines = [
        {"status": "Pulling from base", "progressDetail": {"current": 1, "total": 2}},
        {"stream": "Step 1/2 : FROM base\n"},
        {"aux": {"ID": "sha256:1"}},
        {"stream": "Step 2/2 : RUN false\n"},
        {"errorDetail": {"code": 1, "message": "returned 1"}, "error": "returned 1"},
    ]
    steps: list[tuple[str, float, float]] = []

    def get(name: str) -> None:
        raise ImageNotFound(name)

    def build(**_: object) -> Iterator[object]:
        yield from lines

    engine = SimpleNamespace(images=SimpleNamespace(get=get), api=SimpleNamespace(build=build))
    with pytest.raises(BuildError, match="RUN false") as raised:
        image.ensure(cast(DockerClient, engine), tmp_path, "base", lambda *step: steps.append(step))
    log = Path(raised.value.log_path)
    assert log.read_text() == "Step 1/2 : FROM base\nStep 2/2 : RUN false\nreturned 1"
    log.unlink()
    assert steps == [
        ("lab server image: FROM base", 0, 2),
        ("lab server image: FROM base", 1, 1),
        ("lab server image: RUN false", 1, 2),
    ]
