"""The policies in docs/aws.md allow what the code calls, and little else."""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("botocore")

import botocore.session
from botocore import xform_name

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "labctl" / "providers" / "aws"
DOC = (ROOT / "docs" / "aws.md").read_text()
SERVICES = {"ec2": "ec2", "pricing": "pricing", "scheduler": "scheduler", "ssm": "ssm"} | {
    "service-quotas": "servicequotas"
}
CHANGES = re.compile(
    r"Create|Delete|Run|Import|Terminate|Stop|Start|Modify|Attach|Revoke|Release|Authorize"
)


def policy(name: str) -> list[dict[str, Any]]:
    found = re.search(rf"<!-- policy: {name} -->\n```json\n(.*?)```", DOC, re.DOTALL)
    assert found, name
    statements: list[dict[str, Any]] = json.loads(found[1])["Statement"]
    return statements


def actions(statement: dict[str, Any]) -> list[str]:
    listed = statement["Action"]
    return [listed] if isinstance(listed, str) else list(listed)


def called() -> set[str]:
    """Every operation of AWS's whose name stands in the package as a call or as a paginator's."""
    source = "\n".join(path.read_text() for path in PACKAGE.glob("*.py"))
    session = botocore.session.get_session()
    found = set()
    for service, prefix in SERVICES.items():
        model = session.get_service_model(service)
        for operation in model.operation_names:
            name = xform_name(operation)
            if re.search(rf'[."]{name}["(),]', source):
                found.add(f"{prefix}:{operation}")
    return found


def test_person_is_allowed_every_call_that_the_code_makes() -> None:
    allowed = {action for statement in policy("person") for action in actions(statement)}
    made = called()
    assert {"ec2:RunInstances", "scheduler:CreateSchedule", "pricing:GetProducts"} <= made
    assert made - allowed == set()
    assert not [action for action in allowed if "*" in action]


def test_person_is_allowed_no_call_that_the_code_does_not_make() -> None:
    allowed = {action for statement in policy("person") for action in actions(statement)}
    assert {a for a in allowed - called() if not a.startswith("iam:")} == set()


def test_what_changes_something_asks_for_our_tag_or_name() -> None:
    for statement in policy("person"):
        changing = [a for a in actions(statement) if CHANGES.search(a.partition(":")[2])]
        bound = json.dumps([statement.get("Condition", {}), statement["Resource"]])
        named = any(word in bound for word in ("/labctl", "labctl-", "CreateAction", "spot.amazon"))
        from_there = statement["Sid"] == "MakeFromWhatIsThere"
        assert not changing or named or from_there, statement["Sid"]


@pytest.mark.parametrize("name", ["deadline", "server"])
def test_roles_change_only_what_is_ours(name: str) -> None:
    for statement in policy(name):
        if any(fnmatchcase(a, "*:Describe*") for a in actions(statement)):
            continue
        if statement["Resource"].startswith("arn:aws:s3"):
            assert statement["Resource"].endswith("/*")
            continue
        condition = json.dumps(statement["Condition"])
        assert "aws:ResourceTag/labctl" in condition or "${ec2:InstanceID}" in condition


def test_trust_is_the_schedulers_alone() -> None:
    [statement] = policy("deadline-trust")
    assert statement["Principal"] == {"Service": "scheduler.amazonaws.com"}
