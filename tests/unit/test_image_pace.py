"""Sending an image over a link that is too slow."""

from __future__ import annotations

import time

import pytest

from labctl.runs import image_sources
from labctl.runs.image_sources import SlowLinkError, pace


def test_the_time_that_is_left_is_written_as_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 60.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    assert image_sources.MEASURE_S < 60
    with pytest.raises(SlowLinkError) as caught:
        list(pace([b"x", b"x"], 61, 300, lambda sent: None))
    assert caught.value.why == "it would take 1 h more; a build is usually faster"
