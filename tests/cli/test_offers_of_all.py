"""`labctl offers` over all providers, and what `labctl move` says where nothing can move."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from published_prices import CATALOGS, PUBLISHED_AT, serve_prices

Labctl = Callable[..., Any]


VARIABLES = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_REGION",
    "LAMBDA_API_KEY", "RUNPOD_API_KEY", "VAST_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # Nothing listens there: no test asks the internet.
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("LABCTL_SERVER_AZURE_PRICES_FROM", "http://127.0.0.1:9")


@pytest.fixture
def prices(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    catalogs = dict(CATALOGS)
    with serve_prices(catalogs) as url:
        monkeypatch.setenv("GPUHUNT_CATALOG_URL", url)
        yield catalogs


def test_outside_any_lab_all_providers_are_listed(
    home: Path, labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    said = labctl("offers", "--json")
    assert said.code == 0, said.err
    listing = json.loads(said.out)
    assert [(row["provider"], row["is_live"]) for row in listing["offers"]] == [("local", True)]
    assert listing["left_out"]["vast"] == "no credentials on this machine"
    assert "names no machine" in listing["left_out"]["static"]
    text = labctl("offers", "--all")
    assert text.out.split() == [
        "PROVIDER", "TYPE", "GPU", "MEMORY", "ZONE", "PRICE", "MARKET", "$/PFLOP-H", "TIMER",
        "BOOT", "PRICES", "local", "container", "-", "-", "-", "free", "-", "-", "no", "-", "live",
    ]  # fmt: skip
    assert "vast: no credentials on this machine" in text.err
    assert "course" not in text.err


def test_without_credentials_prices_come_from_a_catalog(
    labctl: Labctl, prices: dict[str, str]
) -> None:
    said = labctl("offers", "--provider", "auto", "--gpu", "any", "--json")
    assert said.code == 0, said.err
    listing = json.loads(said.out)
    rows = [(row["provider"], row["type"], row["price_usd_per_hour"]) for row in listing["offers"]]
    assert rows == [
        ("aws", "g4dn.xlarge", 0.17),
        ("runpod", "NVIDIA L4", 0.43),
        ("aws", "g4dn.xlarge", 0.526),
        ("gcp", "n1-standard-4", 0.54),
        ("lambda", "gpu_1x_a10", 0.75),
        ("lambda", "gpu_1x_a10", 0.75),
    ]
    assert not any(row["is_live"] for row in listing["offers"])
    assert {row["priced_at"] for row in listing["offers"]} == {PUBLISHED_AT}
    a10 = listing["offers"][-1]
    assert (a10["gpu_name"], round(a10["memory_bytes"] / 2**30)) == ("A10", 200)
    assert listing["left_out"]["vast"] == "no credentials on this machine"
    table = labctl("offers", "--provider", "auto", "--gpu", "any").out
    (row,) = (line for line in table.splitlines() if line.startswith("lambda"))
    assert re.search(r"catalog, \d+ d, no credentials$", row)


def test_a_catalog_that_cannot_be_had_is_one_line(labctl: Labctl, prices: dict[str, str]) -> None:
    del prices["runpod"]
    said = labctl("offers", "--provider", "auto", "--gpu", "any")
    assert (said.code, "gpu_1x_a10" in said.out) == (0, True)
    assert (
        "runpod: no credentials on this machine; the price catalog of runpod could not" in said.err
    )


def test_an_address_of_catalogs_must_be_encrypted(
    labctl: Labctl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUHUNT_CATALOG_URL", "http://prices.example")
    listing = json.loads(labctl("offers", "--provider", "auto", "--json").out)
    assert "GPUHUNT_CATALOG_URL is not an address" in listing["failures"]["lambda"]


def test_inside_a_lab_its_own_provider_is_asked(labctl: Labctl) -> None:
    said = labctl("offers", "--json")
    assert set(json.loads(said.out)) == {"version", "offers"}
    assert json.loads(labctl("offers", "--provider", "auto", "--json").out)["left_out"]


def test_where_nothing_fits_each_provider_says_why(labctl: Labctl) -> None:
    said = labctl("offers", "--provider", "auto", "--gpu", "any")
    assert said.code == 4
    assert "local: local has no GPU for `gpu: any`" in said.err
    assert "aws: no credentials on this machine" in said.err


def test_a_move_needs_a_target_and_a_server(labctl: Labctl) -> None:
    said = labctl("move")
    assert said.code == 2
    assert "labctl move --gpu A100" in said.err
    assert labctl("move", "--cancel").code == 4
    assert labctl("move", "--cancel", "--gpu", "T4").code == 2
