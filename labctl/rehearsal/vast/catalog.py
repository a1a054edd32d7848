"""The machines of a rehearsed Vast.ai, with names and prices as they were there in 2025."""

from __future__ import annotations

from collections.abc import Iterator

from labctl.model import Value
from labctl.rehearsal.vast.replies import AskReply, ConditionBody, Scalar, SearchBody
from labctl.rehearsal.vast.scenario import VastScenario

FIRST_ASK, FIRST_MACHINE = 9_000_001, 40_001
HOURS_PER_MONTH = 730
STORAGE_USD_PER_GB_MONTH = 0.15
DAYS_90_S = 90 * 86_400
# What a search asks for under another name than an offer shows it.
SHOWN_AS = {"datacenter": "hosting_type", "verified": "verification"}
CONDITIONS = tuple(
    name
    for name in SearchBody.__struct_fields__
    if name not in ("limit", "type", "order", "allocated_storage")
)


class HostedMachine(Value, frozen=True):
    """A machine as its host offers it. RAM is in MB, prices are for all of its GPUs."""

    gpu_name: str
    num_gpus: int
    gpu_ram: int
    usd_per_hour: float
    reliability: float = 0.995
    is_verified: bool = True
    has_vms: bool = True
    is_datacenter: bool = False
    copies: int = 1


MACHINES = (
    HostedMachine(gpu_name="RTX 3060", num_gpus=1, gpu_ram=12288, usd_per_hour=0.05, has_vms=False),
    HostedMachine(
        gpu_name="GTX 1080", num_gpus=1, gpu_ram=8192, usd_per_hour=0.04, reliability=0.9
    ),
    HostedMachine(
        gpu_name="RTX 4090", num_gpus=1, gpu_ram=24564, usd_per_hour=0.20, is_verified=False
    ),
    HostedMachine(gpu_name="RTX 3090", num_gpus=1, gpu_ram=24576, usd_per_hour=0.18, copies=4),
    HostedMachine(gpu_name="RTX 4090", num_gpus=1, gpu_ram=24564, usd_per_hour=0.38, copies=4),
    HostedMachine(gpu_name="RTX 4090", num_gpus=4, gpu_ram=24564, usd_per_hour=1.52),
    HostedMachine(gpu_name="A100 PCIE", num_gpus=1, gpu_ram=81920, usd_per_hour=0.95),
    HostedMachine(
        gpu_name="A100 SXM4", num_gpus=1, gpu_ram=81920, usd_per_hour=1.10, is_datacenter=True
    ),
    HostedMachine(gpu_name="H100 NVL", num_gpus=1, gpu_ram=95830, usd_per_hour=1.95),
    HostedMachine(
        gpu_name="H100 SXM", num_gpus=8, gpu_ram=81559, usd_per_hour=17.60, is_datacenter=True
    ),
)


def name_type(ask: AskReply) -> str:
    """Return what scenarios call such an offer."""
    return f"{ask.num_gpus}x_{ask.gpu_name.replace(' ', '_')}"


def list_asks(
    scenario: VastScenario, market: str = "ondemand", disk_gb: float = 8.0
) -> Iterator[AskReply]:
    """Yield an offer for each machine, rented or not."""
    number = 0
    for machine in MACHINES:
        for _ in range(machine.copies):
            country = scenario.regions[number % len(scenario.regions)]
            yield _make_ask(scenario, machine, number, country, market, disk_gb)
            number += 1


def _make_ask(
    scenario: VastScenario,
    machine: HostedMachine,
    number: int,
    country: str,
    market: str,
    disk_gb: float,
) -> AskReply:
    name = f"{machine.num_gpus}x_{machine.gpu_name.replace(' ', '_')}"
    price = scenario.prices.get(name, machine.usd_per_hour)
    least_bid = round(price / 2, 4)
    base = least_bid if market == "bid" else price
    storage = STORAGE_USD_PER_GB_MONTH * disk_gb / HOURS_PER_MONTH
    return AskReply(
        id=FIRST_ASK + number,
        ask_contract_id=FIRST_ASK + number,
        machine_id=FIRST_MACHINE + number,
        gpu_name=machine.gpu_name,
        gpu_arch="nvidia",
        num_gpus=machine.num_gpus,
        gpu_ram=machine.gpu_ram,
        gpu_frac=1.0,
        cpu_cores_effective=16.0 * machine.num_gpus,
        cpu_ram=65536 * machine.num_gpus,
        cpu_arch="amd64",
        disk_space=1000.0,
        direct_port_count=100,
        duration=float(DAYS_90_S),
        geolocation=f"Somewhere, {country}",
        reliability=machine.reliability,
        verification="verified" if machine.is_verified else "unverified",
        hosting_type=int(machine.is_datacenter),
        vms_enabled=machine.has_vms,
        is_bid=market == "bid",
        rentable=True,
        rented=False,
        storage_cost=STORAGE_USD_PER_GB_MONTH,
        storage_total_cost=storage,
        min_bid=least_bid,
        dph_base=base,
        dph_total=base + storage,
    )


def matches(ask: AskReply, body: SearchBody) -> bool:
    """Whether an offer fulfills every condition of a search."""
    conditions = ((name, getattr(body, name)) for name in CONDITIONS)
    return all(
        _holds(_get_field(ask, name), condition)
        for name, condition in conditions
        if condition is not None
    )


def _get_field(ask: AskReply, name: str) -> Scalar:
    value: Scalar = getattr(ask, SHOWN_AS.get(name, name))
    if name == "verified":
        return value == "verified"
    if name == "geolocation":
        return str(value).rpartition(" ")[2]
    return bool(value) if name == "datacenter" else value


def _holds(value: Scalar, condition: ConditionBody) -> bool:
    if condition.eq is not None and value != condition.eq:
        return False
    if condition.in_ is not None and value not in condition.in_:
        return False
    if condition.gte is not None and float(value) < condition.gte:
        return False
    return condition.lte is None or float(value) <= condition.lte
