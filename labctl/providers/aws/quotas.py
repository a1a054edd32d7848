"""The account's quotas, which AWS counts in vCPUs per family of types, separately for spot."""

from __future__ import annotations

import re

from labctl.model import Value
from labctl.providers.aws.errors import QUOTAS_LINK


class Quota(Value, frozen=True):
    """One quota, with AWS's code and name."""

    code: str
    name: str

    def link(self, region: str) -> str:
        """Return the URL of the page on which the quota can be raised."""
        return f"{QUOTAS_LINK}/{self.code}?region={region}"


ON_DEMAND = {
    "g": Quota(code="L-DB2E81BA", name="Running On-Demand G and VT instances"),
    "p": Quota(code="L-417A185B", name="Running On-Demand P instances"),
    "": Quota(
        code="L-1216C47A", name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances"
    ),
}
SPOT = {
    "g": Quota(code="L-3819A6DF", name="All G and VT Spot Instance Requests"),
    "p": Quota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests"),
    "p5": Quota(code="L-C4BD4855", name="All P5 Spot Instance Requests"),
    "": Quota(
        code="L-34B43A08", name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests"
    ),
}


def find_quota(instance_type: str, spot: bool) -> Quota:
    """Return the quota that a machine of this type counts against."""
    family = re.match(r"[a-z]*", instance_type)
    letters = family[0] if family else ""
    quotas = SPOT if spot else ON_DEMAND
    if letters.startswith("p"):
        return quotas["p5"] if spot and instance_type.startswith("p5") else quotas["p"]
    return quotas["g"] if letters.startswith(("g", "vt")) else quotas[""]
