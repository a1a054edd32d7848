"""The role in docs/gcp.md has the permissions that the code needs, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from labctl.providers.gcp import permissions

DOC = (Path(__file__).parents[2] / "docs" / "gcp.md").read_text()
# Calls for public images need no permission of the user's project.
PUBLIC = {permissions.READ_IMAGE}


def read_role() -> set[str]:
    found = re.search(r"<!-- role -->\n```yaml\n(.*?)```", DOC, re.DOTALL)
    assert found
    listed = yaml.safe_load(found[1])["includedPermissions"]
    assert len(listed) == len(set(listed))
    return set(listed)


def test_the_role_is_what_doctor_checks() -> None:
    assert read_role() == {*permissions.REQUIRED, *permissions.OPTIONAL}


def test_every_permission_that_a_call_names_is_in_the_role() -> None:
    named = {
        value
        for name, value in vars(permissions).items()
        if name.isupper() and isinstance(value, str) and value.startswith("compute.")
    }
    assert named - PUBLIC <= read_role()
