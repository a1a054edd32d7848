"""The telemetry file as its readers see it."""

from __future__ import annotations

from pathlib import Path

import pytest

from labctl.insight.telemetry import TELEMETRY_FILE, GpuSample, Sample, read_samples

WHOLE = (
    b'{"at": 1763700000.5, "attempt": 2, "cpu_cores": 3.1, "cores": 8, "memory_bytes": 10,'
    b' "gpus": [{"uuid": "GPU-1", "use_percent": 87, "throttle": ["thermal"]}]}\n'
)


def test_a_sample_keeps_what_was_not_measured_apart_from_nothing(tmp_path: Path) -> None:
    file = tmp_path / TELEMETRY_FILE
    file.write_bytes(WHOLE + b'{"at": 1763700010, "net_in_bytes": 0}\n')
    first, second = read_samples(file)
    card = GpuSample(uuid="GPU-1", use_percent=87, throttle=("thermal",))
    assert first == Sample(
        at=1763700000.5, attempt=2, cpu_cores=3.1, cores=8, memory_bytes=10, gpus=(card,)
    )
    assert second.net_in_bytes == 0
    assert second.memory_bytes is None


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b'{"at": NaN}',
        b'{"at": 1e999}',
        b'{"at": -1}',
        b'{"at": 1, "memory_bytes": "much"}',
        b'{"at": 1, "gpus": 3}',
        b'{"at": 1, "gpus": [{"name": "\xff"}]}',
        WHOLE[:-40],
    ],
)
def test_what_is_no_sample_is_passed_over(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / TELEMETRY_FILE
    file.write_bytes(WHOLE + line + b"\n" + WHOLE + WHOLE[:57])
    assert len(read_samples(file)) == 2


def test_a_run_without_telemetry_has_no_samples(tmp_path: Path) -> None:
    assert read_samples(tmp_path / TELEMETRY_FILE) == ()


def test_later_versions_may_measure_more(tmp_path: Path) -> None:
    file = tmp_path / TELEMETRY_FILE
    file.write_bytes(b'{"at": 1, "gpus": [{"uuid": "x", "nvlink": 3}], "novel": {"a": []}}\n')
    assert read_samples(file) == (Sample(at=1, gpus=(GpuSample(uuid="x"),)),)
