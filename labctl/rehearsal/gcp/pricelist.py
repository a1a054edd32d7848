"""The price catalog of the rehearsal, in the form in which gpuhunt publishes its own."""

from __future__ import annotations

import csv
import io
import zipfile

from labctl.rehearsal.gcp.hardware import SPOT_SHARE, TYPES, MachineType
from labctl.rehearsal.gcp.scenario import GcpScenario

VERSION = "20251101-1"
COLUMNS = (
    "instance_name",
    "location",
    "price",
    "cpu",
    "memory",
    "gpu_count",
    "gpu_name",
    "gpu_memory",
    "spot",
    "disk_size",
    "gpu_vendor",
    "flags",
    "cpu_arch",
    "provider_data",
)


def build_catalog(scenario: GcpScenario) -> bytes:
    """Build catalog.zip: every type in the zones a, b and c of every region, twice each."""
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(COLUMNS)
    for number, region in enumerate(scenario.regions):
        for letter in "abc":
            for machine in TYPES:
                writer.writerows(
                    _build_row(scenario, machine, f"{region}-{letter}", number, is_spot)
                    for is_spot in (False, True)
                )
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("gcp.csv", table.getvalue())
    return packed.getvalue()


def _build_row(
    scenario: GcpScenario, machine: MachineType, zone: str, number: int, is_spot: bool
) -> tuple[object, ...]:
    """Build a row; each further region costs 5% more."""
    price = scenario.prices.get(machine.name, machine.usd_per_hour) * (1 + 0.05 * number)
    return (
        machine.name,
        zone,
        round(price * (SPOT_SHARE if is_spot else 1.0), 6),
        machine.cpus,
        machine.memory_gib,
        machine.gpus,
        machine.gpu,
        machine.gpu_memory_gib or "",
        is_spot,
        "",
        "nvidia" if machine.gpus else "",
        "",
        "x86",
        "{}",
    )
