"""The sizes of the simulated subscription, with list prices of East US in 2025."""

from __future__ import annotations

from labctl.model import Value

# Spot machines cost this share of the list price; Azure changes it with the demand.
SPOT_SHARE = 0.25
FAMILY_D, FAMILY_T4 = "standardDSv5Family", "Standard NCASv3_T4 Family"
FAMILY_A100, FAMILY_H100 = "StandardNCADSA100v4Family", "StandardNCadsH100v5Family"


class SizeFacts(Value, frozen=True):
    name: str
    family: str
    cpus: int
    memory_gib: float
    usd_per_hour: float
    gpus: int = 0


def _facts(
    name: str, family: str, cpus: int, memory_gib: float, usd_per_hour: float, gpus: int = 0
) -> SizeFacts:
    return SizeFacts(
        name=name,
        family=family,
        cpus=cpus,
        memory_gib=memory_gib,
        usd_per_hour=usd_per_hour,
        gpus=gpus,
    )


SIZE_LIST = (
    _facts("Standard_D2s_v5", FAMILY_D, 2, 8, 0.096),
    _facts("Standard_D4s_v5", FAMILY_D, 4, 16, 0.192),
    _facts("Standard_NC4as_T4_v3", FAMILY_T4, 4, 28, 0.526, 1),
    _facts("Standard_NC16as_T4_v3", FAMILY_T4, 16, 110, 1.204, 1),
    _facts("Standard_NC64as_T4_v3", FAMILY_T4, 64, 440, 4.352, 4),
    _facts("Standard_NC24ads_A100_v4", FAMILY_A100, 24, 220, 3.673, 1),
    _facts("Standard_NC48ads_A100_v4", FAMILY_A100, 48, 440, 7.346, 2),
    _facts("Standard_NC40ads_H100_v5", FAMILY_H100, 40, 320, 6.98, 1),
    # A size that labctl does not offer: its GPUs are virtual.
    _facts("Standard_NV36ads_A10_v5", "StandardNVADSA10v5Family", 36, 440, 3.2, 1),
)
SIZES_BY_NAME = {one.name: one for one in SIZE_LIST}
FAMILIES = tuple(dict.fromkeys(one.family for one in SIZE_LIST))
