"""Durations, sizes and dollars as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from labctl.text import (
    bytes_text,
    decimal_bytes_text,
    dollars_text,
    duration_text,
    elapsed_text,
    price_range_text,
    price_text,
    timing_text,
)

KIB, MIB, GIB = 1024, 1024**2, 1024**3
MINUTE, HOUR, DAY = 60, 3600, 86_400


@pytest.mark.parametrize("seconds", [-0.1, 0.0, 0.2])
def test_what_took_a_moment_has_one_form(seconds: float) -> None:
    assert elapsed_text(seconds) == "< 1 s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (0.3, "< 1 s"),
        (0.6, "1 s"),
        (42.4, "42 s"),
        (119.4, "119 s"),
        (2 * MINUTE, "2 min"),
        (59 * MINUTE + 29, "59 min"),
        (59 * MINUTE + 59, "1 h"),
        (HOUR, "1 h"),
        (HOUR + 5 * MINUTE + 29, "1 h 5 min"),
        (2.3 * HOUR, "2 h 18 min"),
        (47 * HOUR + 24 * MINUTE, "47 h 24 min"),
        (2 * DAY, "2 d"),
        (7 * DAY + 15 * HOUR + 59 * MINUTE, "7 d 15 h"),
        (120 * DAY + 5 * HOUR, "120 d"),
        (3 * 365 * DAY, "3 years"),
        (1e12, "31,709 years"),
        (1e30, "over 1,000,000 years"),
        (float("inf"), "unknown"),
        (float("nan"), "unknown"),
    ],
)
def test_a_duration_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(st.floats())
def test_every_duration_has_a_short_text(seconds: float) -> None:
    assert 0 < len(duration_text(seconds)) <= 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 us"),
        (7.02e-6, "7.02 us"),
        (0.0341, "34.1 ms"),
        (1.25, "1.25 s"),
        (125.4, "125 s"),
        (7300, "2 h 2 min"),
    ],
)
def test_a_measured_time_has_three_digits(seconds: float, text: str) -> None:
    assert timing_text(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023.6, "1.0 KiB"),
        (KIB, "1.0 KiB"),
        (2.8 * KIB, "2.8 KiB"),
        (99.96 * KIB, "100 KiB"),
        (1023.7 * KIB, "1.0 MiB"),
        (377.04 * MIB, "377 MiB"),
        (14.6 * GIB, "14.6 GiB"),
        (186 * GIB, "186 GiB"),
        (1.5 * 1024 * GIB, "1.5 TiB"),
        (5000 * 1024 * GIB, "5,000 TiB"),
    ],
)
def test_bytes_have_the_largest_unit(count: float, text: str) -> None:
    assert bytes_text(count) == text


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (377_000, "377 kB"),
        (10.8e6, "10.8 MB"),
        (16e9, "16.0 GB"),
        (999.96e6, "1.0 GB"),
        (1128.4e9, "1,128 GB"),
    ],
)
def test_sizes_of_models_have_powers_of_ten(count: float, text: str) -> None:
    assert decimal_bytes_text(count) == text


@pytest.mark.parametrize(
    ("usd", "text"),
    [
        (0, "$0.00"),
        (0.004, "< $0.01"),
        (0.194, "$0.19"),
        (1234.5, "$1,234.50"),
        (-2, "-$2.00"),
        (-0.001, "$0.00"),
    ],
)
def test_dollars_have_cents(usd: float, text: str) -> None:
    assert dollars_text(usd) == text


@pytest.mark.parametrize(
    ("usd_per_hour", "text"),
    [
        (0.00001, "< $0.01/h"),
        (0.0316, "$0.0316/h"),
        (0.5, "$0.50/h"),
        (0.526, "$0.526/h"),
        (0.9951, "$1.00/h"),
        (2.4, "$2.40/h"),
        (1234.5, "$1,234.50/h"),
    ],
)
def test_a_low_price_has_more_digits(usd_per_hour: float, text: str) -> None:
    assert price_text(usd_per_hour) == text


def test_a_range_of_prices_has_the_form_of_a_price() -> None:
    assert price_range_text(0.1642, 0.2087) == "$0.1642-0.2087/h"
    assert price_range_text(0.0316, 0.101) == "$0.0316-0.101/h"
    assert price_range_text(2.4, 3) == "$2.40-3.00/h"
