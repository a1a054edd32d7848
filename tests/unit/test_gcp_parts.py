"""Parts of the GCP provider that need no cloud: imports, configuration, prices, timer, checks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from published_prices import CATALOGS, PUBLISHED_AT, serve_prices

from labctl.errors import ConnectError, ProviderError
from labctl.model import Need, Offer
from labctl.providers import price_catalog
from labctl.providers.gcp import GcpSettings, account, clients, hardware, labels, sdk
from labctl.providers.gcp.quotas import QuotaTable
from labctl.providers.gcp.replies import GceInstance, GceQuota
from labctl.providers.gcp.run_limit import MARGIN_S, compute_run_limit_s
from labctl.providers.price_catalog import CatalogRow, load_catalog

HOUR_S = 3600


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_the_provider_alone_imports_nothing_of_google() -> None:
    code = (
        "import sys, labctl.providers.gcp\n"
        "print([m for m in sys.modules if m.startswith(('google', 'requests', 'grpc'))])"
    )
    assert run_python(code) == "[]"


@pytest.mark.long
def test_a_client_imports_its_service_alone_and_others_still_get_the_whole_sdk() -> None:
    code = """
import sys
from labctl.providers.gcp import sdk
assert sdk.load_client("instances", "InstancesClient").__name__ == "InstancesClient"
services = "google.cloud.compute_v1.services."
print(sorted({m.split(".")[4] for m in sys.modules if m.startswith(services)}))
from google.cloud import compute_v1
assert compute_v1.FirewallsClient and compute_v1.Instance and compute_v1.__version__
print(sdk.load_types().Instance is compute_v1.Instance)
"""
    assert run_python(code).splitlines() == ["['instances', 'zone_operations']", "True"]


def test_without_the_extra_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, sdk.PACKAGE, raising=False)
    monkeypatch.setitem(sys.modules, "google.cloud", None)
    with pytest.raises(ProviderError, match="the gcp extra is not installed") as refused:
        sdk.load_types()
    assert "gcp]" in refused.value.hint


def write_gcloud(home: Path, **properties: str) -> None:
    folder = home / ".config" / "gcloud"
    (folder / "configurations").mkdir(parents=True)
    (folder / "active_config").write_text("work")
    text = "[core]\nproject = {project}\n[compute]\nregion = {region}\n".format(**properties)
    (folder / "configurations" / "config_work").write_text(text)


def test_the_project_is_that_of_gcloud(tmp_path: Path) -> None:
    environ = {"HOME": str(tmp_path)}
    assert account.resolve_project("", environ) == ""
    assert account.resolve_region(environ) == "us-central1"
    assert account.find_credential_file(environ) is None
    write_gcloud(tmp_path, project="lab-project", region="europe-west4")
    assert account.resolve_project("", environ) == "lab-project"
    assert account.resolve_region(environ) == "europe-west4"
    key = tmp_path / "key.json"
    key.write_text(json.dumps({"type": "service_account", "project_id": "of-the-key"}))
    environ["GOOGLE_APPLICATION_CREDENTIALS"] = str(key)
    assert account.find_credential_file(environ) == key
    assert account.resolve_project("", environ) == "of-the-key"
    environ["GOOGLE_CLOUD_PROJECT"] = "of-the-shell"
    assert account.resolve_project("", environ) == "of-the-shell"
    assert account.resolve_project("of-lab-yaml", environ) == "of-lab-yaml"


def test_a_persons_own_credentials_are_loaded_without_gcloud_and_without_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gcloud would be a process of a second, and its client's credentials make the SDK warn."""
    login = {
        "type": "authorized_user",
        "client_id": "764086051850-6qr4p6gpi6hn506pt8ejuq83di341hur.apps.googleusercontent.com",
        "client_secret": "s",
        "refresh_token": "r",
    }
    (tmp_path / "application_default_credentials.json").write_text(json.dumps(login))
    (tmp_path / "gcloud").write_text("#!/bin/sh\ntouch $0.was-called\n")
    (tmp_path / "gcloud").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    assert clients._load_credentials().refresh_token == "r"
    assert not (tmp_path / "gcloud.was-called").exists()


@pytest.mark.parametrize(
    ("need", "price", "expected_s"),
    [
        (Need(), 0.5, 24 * HOUR_S + MARGIN_S),
        (Need(ttl_s=HOUR_S), 0.5, 2 * HOUR_S + MARGIN_S),
        (Need(ttl_s=HOUR_S, max_ttl_s=8 * HOUR_S), 0.5, 8 * HOUR_S + MARGIN_S),
        (Need(budget_usd=1.0), 0.5, 2 * HOUR_S + MARGIN_S),
        (Need(ttl_s=HOUR_S, budget_usd=0.5), 0.5, HOUR_S + MARGIN_S),
        (Need(deadline=False), 0.5, None),
        (Need(), 0.0, None),
        (Need(max_ttl_s=400 * 24 * HOUR_S), 0.5, 120 * 24 * HOUR_S),
    ],
)
def test_googles_timer_allows_for_extensions_and_for_no_more_than_the_budget(
    need: Need, price: float, expected_s: int | None
) -> None:
    assert compute_run_limit_s(need, price) == expected_s


def test_a_servers_name_is_valid_for_the_longest_lab() -> None:
    request = msgspec.convert(
        {
            "lab": "l" * 39,
            "lab_id": "0123456789ab",
            "token": "0123456789abcdef",
            "public_key": "",
            "identity": "",
            "need": {},
        },
        labels.CreateServerRequest,
    )
    name = labels.make_server_name(request)
    assert len(name) == 63
    assert labels.split_id(labels.make_server_id(name, "northamerica-northeast1-a")) == (
        name,
        "northamerica-northeast1-a",
    )


def test_names_and_labels_take_what_google_refuses_elsewhere() -> None:
    assert labels.make_label_value("Ada.Lovelace@Example.org") == "ada_lovelace_example_org"
    tag = labels.make_network_tag("Course: Machine Learning, spring term, section 12")
    assert tag.startswith("labctl-")
    assert len(labels.make_rule_name("x" * 200, labels.make_owner_part("Ada"))) <= 63
    assert tag != labels.make_network_tag("Course: Machine Learning, spring term, section 13")


def test_an_instance_that_names_no_record_is_rebuilt_from_its_labels() -> None:
    instance = GceInstance(
        name="labctl-digits-1",
        zone="https://x/zones/us-central1-a",
        machine_type="https://x/machineTypes/g2-standard-4",
        status="RUNNING",
        labels={"labctl": "1", "labctl-lab": "digits", "labctl-lab-id": "ab"},
    )
    server = labels.parse_server(instance, "p", "ubuntu")
    assert (server.lab, server.lab_id, server.offer.type) == ("digits", "ab", "g2-standard-4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{regions: us-east-1}", "is not a region of Google Cloud"),
        ("{image: ubuntu}", "is not an image"),
        ("{project: A}", "is not the id of a project"),
    ],
)
def test_settings_refuse_what_is_of_another_cloud(text: str, message: str) -> None:
    from labctl.config.document import parse
    from labctl.config.reader import read

    problems: list[object] = []
    tree = parse(text.encode(), "lab.yaml", problems)  # type: ignore[arg-type]
    assert tree is not None
    read(tree, GcpSettings, "", problems)  # type: ignore[arg-type]
    assert message in str(problems)


def row(type_: str, **more: object) -> CatalogRow:
    plain = {
        "type": type_,
        "location": "us-central1-a",
        "price_usd_per_hour": 1.0,
        "cpus": 4,
        "memory_gib": 16.0,
        "gpu_count": 1,
        "gpu_name": "T4",
        "gpu_memory_gib": 16.0,
        "gpu_maker": "nvidia",
        "spot": False,
        "arch": "x86_64",
    }
    return msgspec.convert({**plain, **more}, CatalogRow)


@pytest.mark.parametrize(
    ("offered", "expected"),
    [
        (row("n1-standard-4"), True),
        (row("n1-standard-2", cpus=2), False),
        (row("n1-standard-96", cpus=96), False),
        (row("n1-highmem-4"), False),
        (row("n1-standard-4", gpu_name="P4", gpu_memory_gib=8.0), False),
        (row("g2-standard-4", gpu_name="L4", gpu_memory_gib=24.0), True),
        (row("v5litepod-1", gpu_name="v5litepod", gpu_maker="google"), False),
        (row("e2-standard-4", gpu_count=0, gpu_name="", gpu_maker=""), True),
        (row("m4-megamem-28", gpu_count=0, gpu_name="", gpu_maker=""), False),
    ],
)
def test_machines_that_labctl_offers(offered: CatalogRow, expected: bool) -> None:
    assert hardware.is_offered(offered) is expected


def test_a_spot_machine_uses_the_standard_quota_where_it_has_no_own() -> None:
    offer = Offer(
        provider="gcp",
        type="g2-standard-4",
        region="us-central1",
        zone="us-central1-a",
        cpus=4,
        gpu_name="L4",
        gpu_count=1,
        gpu_memory_bytes=24 * 1024**3,
        spot=True,
    )
    standard = {("us-central1", "NVIDIA_L4_GPUS"): GceQuota(metric="NVIDIA_L4_GPUS", limit=1)}
    name = "PREEMPTIBLE_NVIDIA_L4_GPUS"
    for limit, expected in ((0, "NVIDIA_L4_GPUS"), (2, name)):
        own = {("us-central1", name): GceQuota(metric=name, limit=limit)}
        [found] = QuotaTable({**standard, **own}).list_limits(offer)
        assert found.metric == expected
    assert QuotaTable({}).find_lack(offer) == "", "an unknown quota rules out nothing"


def test_a_price_says_when_it_was_published_and_survives_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogs = dict(CATALOGS)
    with serve_prices(catalogs) as url:
        fresh = load_catalog("gcp", tmp_path, url, lambda row: True)
        assert [(one.type, one.gpu_name, one.spot) for one in fresh.rows] == [
            ("n1-standard-4", "T4", False),
            ("e2-standard-4", "", True),
        ]
        assert fresh.published_at == PUBLISHED_AT
        catalogs["gcp"] = ""
        assert load_catalog("gcp", tmp_path, url, lambda row: True) == fresh, "the cache is used"
        monkeypatch.setattr(price_catalog, "REFRESH_S", -1.0)
        assert load_catalog("gcp", tmp_path, url, lambda row: True).rows == ()
        os.truncate(tmp_path / "prices-gcp.json", 5)
    with pytest.raises(ConnectError, match="price catalog of gcp"):
        load_catalog("gcp", tmp_path, url, lambda row: True)


def test_an_old_copy_is_better_than_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serve_prices() as url:
        before = load_catalog("gcp", tmp_path, url, lambda row: True)
    monkeypatch.setattr(price_catalog, "REFRESH_S", -1.0)
    assert load_catalog("gcp", tmp_path, url, lambda row: True) == before
