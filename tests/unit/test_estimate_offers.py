"""Estimates joined with offers: a simulated EC2, the local container, a stated price, nobody."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from msgspec.structs import replace

from labctl.errors import UsageError
from labctl.estimate.cards import find_card
from labctl.estimate.compute import Workload
from labctl.estimate.plan import ModelMeasurement, ModelPlan
from labctl.insight.estimate import estimate
from labctl.lab import Lab

if TYPE_CHECKING:
    from aws_cloud import Cloud

GB = 10**9
SMALL = ModelPlan(params=100_000_000, precision="fp16", optimizer="adam", batch=1)
BERT = ModelPlan(
    params=110_000_000, precision="fp16", optimizer="adam",
    batch=8, seq=512, hidden=768, layers=12, heads=12,
)  # fmt: skip


def lab(root: Path, **overrides: str) -> Lab:
    return Lab.load(root, overrides={"lab": "digits", **overrides}, needs_file=False)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_STATE_HOME", "LABCTL_STATE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def on_aws(cloud: Cloud, home: Path) -> Lab:
    from aws_provider import with_market

    with_market(cloud)
    return lab(home, provider="aws")


def test_each_offer_has_its_hours_and_dollars_the_cheapest_that_fits_first(on_aws: Lab) -> None:
    amount = Workload(tokens=GB)
    found = estimate(on_aws.context, BERT, amount)
    assert {"g4dn.xlarge", "g5.xlarge"} <= {cost.type for cost in found.costs if not cost.spot}
    for cost in [one for one in found.costs if find_card(one.gpu, one.gpu_memory_bytes)]:
        assert cost.hours
        assert cost.usd == pytest.approx(cost.hours * cost.price_usd_per_hour)
    fitting = [cost.usd for cost in found.costs if cost.fits and cost.usd is not None]
    assert fitting == sorted(fitting)
    assert found.cheapest == found.costs[0]
    # 6 N D at 40% of the card's peak, by hand
    for gpu, peak in (("T4", 65e12), ("A10G", 70e12)):
        hours = {cost.hours for cost in found.costs if cost.gpu == gpu}
        assert [*hours] == [pytest.approx(6 * 110e6 * 1e9 / (peak * 0.4) / 3600)]
    assert found.time.hours == found.costs[0].hours


def test_the_second_estimate_is_answered_from_the_cache_of_offers(
    on_aws: Lab, cloud: Cloud
) -> None:
    offers = on_aws.context.provider.offers(on_aws.config.server.need)
    assert offers
    asked = cloud.seen.total()
    estimate(on_aws.context, BERT, Workload())
    assert cloud.seen.total() == asked


def test_what_no_offer_holds_is_told_with_what_to_change(on_aws: Lab) -> None:
    named = lab(on_aws.config.root, provider="aws", gpu="T4")
    found = estimate(named.context, replace(BERT, params=2 * GB), Workload())
    assert found.costs
    assert not any(cost.fits for cost in found.costs)
    assert found.cheapest is None
    assert [(row.gpu, row.fits) for row in found.fits] == [("T4 16GB", False)]
    assert found.details.time_on == "T4 16GB"
    assert found.ways


def test_a_named_gpu_narrows_the_table_and_the_time(on_aws: Lab) -> None:
    named = lab(on_aws.config.root, provider="aws", gpu="A100")
    found = estimate(named.context, BERT, Workload(tokens=GB, price_usd_per_hour=1.0))
    assert [row.gpu for row in found.fits] == ["A100 40GB", "A100 80GB"]
    assert found.details.time_on == "A100 40GB"
    large = lab(on_aws.config.root, provider="aws", gpu=">=40GB")
    rows = estimate(large.context, BERT, Workload()).fits
    assert {row.gpu for row in rows} >= {"A100 40GB", "H200 141GB"}
    assert all(row.memory_bytes >= 40 * 1024**3 * 0.9 for row in rows)
    unlisted = lab(on_aws.config.root, provider="aws", gpu="RTX3090")
    assert len(estimate(unlisted.context, BERT, Workload(price_usd_per_hour=1.0)).fits) > 10


def test_no_gpu_needed_asks_for_machines_without_one(on_aws: Lab) -> None:
    found = estimate(on_aws.context, SMALL, Workload(tokens=100_000))
    assert not found.gpu.needed
    assert {cost.gpu_count for cost in found.costs} == {0}
    assert found.cheapest is not None
    assert found.cheapest.hours == pytest.approx(6 * 1e8 * 1e5 / 100e9 / 3600)
    assert found.time.hours == found.cheapest.hours


def test_a_month_of_requests_on_each_offer(on_aws: Lab) -> None:
    plan = ModelPlan(params=6 * GB, precision="fp16")
    amount = Workload(requests_per_day=10_000, seconds_per_request=7)
    found = estimate(on_aws.context, plan, amount)
    cost = found.costs[0]
    assert cost.usd == pytest.approx(19.444 * 30 * cost.price_usd_per_hour, rel=1e-3)
    assert cost.always_on_usd == pytest.approx(24 * 30 * cost.price_usd_per_hour)
    assert found.details.load is not None
    assert found.details.load.gpus == 1


def test_a_lab_that_names_its_gpu_is_asked_for_that(cloud: Cloud, home: Path) -> None:
    from aws_provider import with_market

    with_market(cloud)
    found = estimate(lab(home, provider="aws", gpu="T4").context, BERT, Workload())
    assert {cost.gpu for cost in found.costs} == {"T4"}


def test_several_gpus_take_several_servers(on_aws: Lab) -> None:
    plan = replace(BERT, data_parallel=4)
    named = lab(on_aws.config.root, provider="aws", gpu="T4")
    found = estimate(named.context, plan, Workload(tokens=GB))
    for cost in found.costs:
        assert cost.servers == -(-4 // cost.gpu_count)
    cost = next(cost for cost in found.costs if cost.gpu_count == 1 and not cost.spot)
    assert cost.hours is not None
    assert cost.usd == pytest.approx(4 * cost.hours * cost.price_usd_per_hour)


def test_a_provider_without_such_a_gpu_is_no_failure(home: Path) -> None:
    found = estimate(lab(home).context, BERT, Workload(tokens=GB))
    assert found.costs == ()
    assert "local has no GPU" in found.details.costs_note
    assert "--price" in found.details.costs_note
    assert found.time.hours
    assert found.details.time_on == "T4 16GB"


def test_a_provider_without_credentials_is_no_failure(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_ENDPOINT_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    found = estimate(lab(home, provider="aws").context, BERT, Workload())
    assert found.costs == ()
    assert "credentials" in found.details.costs_note


def test_a_stated_price_asks_nobody(home: Path) -> None:
    amount = Workload(tokens=512_000_000, per_second=3000, price_usd_per_hour=15)
    found = estimate(lab(home, provider="aws").context, replace(SMALL, params=8 * GB), amount)
    assert [cost.usd for cost in found.costs] == [pytest.approx(711, abs=1)]
    assert found.cheapest is None
    assert found.details.costs_note == ""


def test_a_local_container_costs_nothing_where_no_gpu_is_needed(home: Path) -> None:
    found = estimate(lab(home).context, ModelPlan(kind="trees", rows=1000, columns=10), Workload())
    assert found.cheapest is not None
    assert found.cheapest.price_usd_per_hour == 0


CODE = ModelMeasurement(
    parameters=1000, weight_bytes=4000, trained_parameters=1000, trained_bytes=4000,
    fixed_bytes=0, item_bytes=700, item_flops=6000,
)  # fmt: skip


@pytest.mark.parametrize(
    ("plan", "amount"),
    [
        (SMALL, Workload(requests_per_day=10)),
        (SMALL, Workload(items=10)),
        (SMALL, Workload(per_second=10)),
        (replace(SMALL, measured=CODE), Workload(tokens=10)),
    ],
)
def test_amounts_that_do_not_belong_are_refused(home: Path, plan: ModelPlan, amount: Any) -> None:
    with pytest.raises(UsageError) as raised:
        estimate(lab(home).context, plan, amount)
    assert raised.value.hint
