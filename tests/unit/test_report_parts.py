"""What a report is made of: words, pictures, the use of a server."""

from __future__ import annotations

from pathlib import Path

import pytest
from report_facts import BEGAN, data_uri, png, sample

from labctl.insight.report import formatting, pictures
from labctl.insight.report.utilization import summarize_utilization
from labctl.insight.run_report import fingerprint_inputs

# A JPEG's first bytes: 7 by 9 pixels.
JPEG = bytes.fromhex("ffd8ffe000104a46494600010100000100010000ffc0000b08") + bytes(
    [0, 9, 0, 7, 1, 1, 17, 0]
)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (1.0, "100%"),
        (0.0, "0%"),
        (0.99999, "99.9%"),
        (0.00001, "0.1%"),
        (268 / 269, "99.6%"),
        (None, "not measured"),
    ],
)
def test_shares(share: float | None, said: str) -> None:
    assert formatting.percent(share).replace("\u00a0", " ") == said


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0.0, "0"),
        (0.1 + 0.2, "0.3"),
        (12345.678, "12,346"),
        (-2.5, "−2.5"),
        (2e-5, "2.00e-5"),
        (3e300, "3.00e300"),
        (float("nan"), "not a number"),
    ],
)
def test_numbers(value: float, said: str) -> None:
    assert formatting.number(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"),
    [(3.84, "4 s"), (45, "45 s"), (600, "10 min"), (3600, "1 h"), (9000, "2 h 30 min")],
)
def test_spans(seconds: float, said: str) -> None:
    assert formatting.span(seconds).replace("\u00a0", " ") == said


def test_money_sizes_dates() -> None:
    assert [formatting.dollars(usd).replace("\u00a0", " ") for usd in (None, 0, 0.001, 1234.5)] == [
        "not measured",
        "free",
        "< $0.01",
        "$1,234.50",
    ]
    assert formatting.size(1536) == "1.5\u00a0KiB"
    assert formatting.date(BEGAN).replace("\u00a0", " ") == "21 November 2025, 04:40 UTC"
    assert formatting.date(1e30) == ""


def test_small_pictures_are_shown_as_they_are() -> None:
    assert pictures.check_picture(data_uri(png())) == (data_uri(png()), "")
    assert pictures.check_picture(data_uri(JPEG, "jpeg")) == (data_uri(JPEG, "jpeg"), "")
    assert pictures.check_bytes(png())[0] == data_uri(png())


@pytest.mark.parametrize(
    ("picture", "why"),
    [
        (data_uri(png(65_000, 65_000)), "65,000 x 65,000 pixels"),
        (data_uri(png(0, 8)), "0 x 8 pixels"),
        (data_uri(png() + bytes(300_000)), "200 kB"),
        (data_uri(b"<svg onload='alert(1)'>" * 3), "damaged"),
        (data_uri(png()[:20]), "damaged"),
        (data_uri(JPEG[:12], "jpeg"), "damaged"),
        (data_uri(b"\xff\xd8" + b"\xff\xd0" * 50, "jpeg"), "damaged"),
        ("data:image/png;base64,!!!!", "damaged"),
        ("data:image/svg+xml;base64,PHN2Zz4=", "not a PNG"),
        ("javascript:alert(1)", "not a PNG"),
    ],
)
def test_other_pictures_are_not(picture: str, why: str) -> None:
    shown, said = pictures.check_picture(picture)
    assert shown == ""
    assert why in said


def test_means_are_weighted_with_time_and_gaps_do_not_count() -> None:
    found = summarize_utilization(
        [
            sample(0, gpu={"use_percent": 100.0}),
            sample(10, gpu={"use_percent": 100.0}),
            sample(5000, gpu={"use_percent": 0.0}),
            sample(5030, gpu={"use_percent": 0.0}),
        ]
    )
    assert found.measured_s == 40
    assert found.gpu_use_percent == pytest.approx(25.0)


def test_energy_is_what_the_counter_grew_by_on_each_server() -> None:
    counters = [(0, 1, 7200.0), (10, 1, 10800.0), (20, 2, 100.0), (30, 2, 3700.0), (40, 2, 10.0)]
    found = summarize_utilization(
        [sample(at, attempt=a, gpu={"energy_j": j}) for at, a, j in counters]
    )
    assert found.energy_wh == pytest.approx(2.0)


def test_without_a_counter_energy_is_an_estimate() -> None:
    found = summarize_utilization([sample(10 * n, gpu={"power_w": 36.0}) for n in range(11)])
    assert found.energy_wh is None
    assert found.energy_estimate_wh == pytest.approx(1.0)


def test_of_no_samples_nothing_is_known() -> None:
    found = summarize_utilization([])
    assert (found.gpu_use_percent, found.energy_wh, found.energy_estimate_wh) == (None, None, None)
    assert (found.cpu_cores, found.memory_bytes, found.gpus) == (None, None, ())


def test_a_run_without_checkpoints_or_logs_has_a_report_too(tmp_path: Path) -> None:
    without = fingerprint_inputs(tmp_path)
    (tmp_path / "logs").mkdir()
    assert fingerprint_inputs(tmp_path) == without
    (tmp_path / "logs" / "metrics.json").write_text("{}")
    assert fingerprint_inputs(tmp_path) != without
