"""Parts of the Azure provider on their own: imports, names, subscription, settings, role."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from labctl.errors import ProviderError
from labctl.model import CreateServerRequest, Offer
from labctl.providers.azure import AzureSettings, account, arm, permissions, tags
from labctl.providers.azure.settings import parse_azure_region
from labctl.rehearsal.azure.description import SdkValidator, has_sdk
from labctl.rehearsal.core.validation import ApiRequest

DOC = Path(__file__).parents[2] / "docs" / "azure.md"
SUBSCRIPTION = "0a0a0a0a-1111-2222-3333-0b0b0b0b0b0b"


def make_request(**more: object) -> CreateServerRequest:
    plain = {
        "lab": "l" * 39,
        "lab_id": "0123456789ab",
        "token": "0123456789abcdef",
        "public_key": "",
        "identity": "",
        "need": {},
    }
    return msgspec.convert({**plain, **more}, CreateServerRequest)


def test_the_provider_alone_imports_nothing_of_microsoft() -> None:
    code = (
        "import sys, labctl.providers.azure\n"
        "print([m for m in sys.modules if m.startswith(('azure', 'msal', 'requests'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_without_the_extra_the_command_to_install_it_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("azure", "azure.identity", "azure.core"):
        monkeypatch.setitem(sys.modules, name, None)
    client = arm.Arm(AzureSettings(subscription=SUBSCRIPTION))
    with pytest.raises(ProviderError, match="the azure extra is not installed") as refused:
        client.find(arm.OperationReply, client.subscription_path(), "2022-12-01", "read")
    assert "azure]" in refused.value.hint


def test_the_subscription_is_that_of_the_azure_cli_unless_something_else_names_one(
    tmp_path: Path,
) -> None:
    environ = {"HOME": str(tmp_path), "AZURE_CONFIG_DIR": str(tmp_path)}
    assert not account.has_credentials(environ)
    assert account.resolve_subscription("", environ) == ""
    profile = {"subscriptions": [{"id": "other"}, {"id": SUBSCRIPTION, "isDefault": True}]}
    (tmp_path / account.PROFILE).write_text(json.dumps(profile), encoding="utf-8-sig")
    assert account.has_credentials(environ)
    assert account.resolve_subscription("", environ) == SUBSCRIPTION
    environ["AZURE_SUBSCRIPTION_ID"] = "of-the-shell"
    assert account.resolve_subscription("", environ) == "of-the-shell"
    assert account.resolve_subscription("of-lab-yaml", environ) == "of-lab-yaml"


def test_a_servers_name_is_valid_for_the_longest_lab() -> None:
    name = tags.make_server_name(make_request())
    assert len(name) <= 64
    assert tags.is_server_id(name)
    assert tags.is_server_id(tags.make_server_name(make_request(lab="Übung 1")))
    long_group = tags.make_network_name("Course: Machine Learning, spring", "westeurope", "nsg")
    assert re.fullmatch(r"[a-z0-9-]{1,64}", long_group)


def test_a_record_survives_azures_limit_of_a_tag() -> None:
    key = "ssh-rsa " + "A" * 700
    request = make_request(host_key=key, tags={"note": "x" * 200})
    record = tags.make_record(Offer(provider="azure", type="Standard_D2s_v5"), request, "ada")
    written = tags.make_tags(record)
    assert max(map(len, written.values())) <= 256
    assert len(written) < 50
    assert tags.parse_record(written) == record
    del written[f"{tags.RECORD}2"]
    assert tags.parse_record(written) is None


def test_a_region_is_azures_own_name() -> None:
    assert parse_azure_region("westeurope") == "westeurope"
    with pytest.raises(ValueError, match="write eastus"):
        parse_azure_region("West Europe")


def test_patterns_of_a_role_are_read_as_azure_does() -> None:
    everything = ("*",)
    assert permissions.is_granted(permissions.WRITE, everything, ())
    assert not permissions.is_granted(
        permissions.WRITE, everything, ("microsoft.compute/virtualmachines/*",)
    )
    assert not permissions.is_granted(permissions.WRITE, ("Microsoft.Compute/*/read",), ())


def read_role() -> set[str]:
    found = re.search(r"<!-- role -->\n```json\n(.*?)```", DOC.read_text(), re.DOTALL)
    assert found
    listed = json.loads(found[1])["Actions"]
    assert len(listed) == len(set(listed))
    return set(listed)


def test_the_role_is_what_doctor_checks() -> None:
    assert read_role() == {*permissions.REQUIRED, *permissions.OPTIONAL}


def test_every_action_that_a_call_names_is_in_the_role() -> None:
    named = {
        value
        for name, value in vars(permissions).items()
        if name[0].isupper() and name.isupper() and isinstance(value, str) and "/" in value
    }
    assert named - {permissions.VM, permissions.PAGE, permissions.ROLE_HINT} <= read_role()


@pytest.mark.skipif(not has_sdk(), reason="azure-mgmt-compute is not installed")
@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"location": "eastus", "properties": {"priority": "Spot"}}, ""),
        ({"location": "eastus", "propertys": {}}, "propertys is not a field of VirtualMachine"),
        ({"location": 1}, "location is int instead of str"),
        (
            {"properties": {"networkProfile": {"networkInterfaces": [{"nic": "1"}]}}},
            "networkInterfaces[0].nic is not a field of NetworkInterfaceReference",
        ),
    ],
)
def test_a_wrong_field_is_a_problem(body: dict[str, object], problem: str) -> None:
    path = f"/subscriptions/{SUBSCRIPTION}/resourceGroups/labctl/providers"
    request = ApiRequest(
        method="PUT",
        path=f"{path}/Microsoft.Compute/virtualMachines/vm",
        query={"api-version": ("2024-07-01",)},
        body=msgspec.json.encode(body),
    )
    problems = SdkValidator().check_request(request)
    assert [problem in one for one in problems] == ([True] if problem else [])
