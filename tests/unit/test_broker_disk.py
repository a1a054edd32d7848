"""How much of a shared server's disk images may take."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_socket import engine_socket

from labctl.agent.broker.http import HttpRefusal
from labctl.agent.broker.image_disk import CHECK_BYTES, ImageDisk
from labctl.agent.host.paths import measure_disk

GIB = 1 << 30


def test_uploads_claim_their_room_as_they_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine says where that is; all uploads together leave what is to stay free."""
    with engine_socket() as engine:
        engine.answers = lambda method, path, body: (200, {"DockerRootDir": str(tmp_path)})
        monkeypatch.setenv("DOCKER_HOST", engine.host)
        free = measure_disk(tmp_path)[0]
        images = ImageDisk(free // 2)
        images.require_room()
        with images.count_upload() as claim, images.count_upload() as claim_also:
            claim(free // 8)
            claim_also(free // 8)
            images.require_room()
            with pytest.raises(HttpRefusal, match="no room") as refused:
                claim(free // 3)
            assert refused.value.status == 507
            with pytest.raises(HttpRefusal, match="no room"):
                claim_also(CHECK_BYTES)
            with pytest.raises(HttpRefusal, match="no room"):
                images.require_room()
        images.require_room()
        with pytest.raises(HttpRefusal, match="no room"):
            ImageDisk(2 * free + GIB).require_room()
