"""The quotas of the simulated project."""

from __future__ import annotations

from collections.abc import Iterator

from labctl.model import Value
from labctl.rehearsal.core.fleet import CloudFleet
from labctl.rehearsal.gcp import hardware
from labctl.rehearsal.gcp.resources import (
    FaultDetails,
    GceMachine,
    OperationFault,
    QuotaInfo,
)
from labctl.rehearsal.gcp.scenario import GcpScenario

LARGE = 512.0
PREEMPTIBLE = "PREEMPTIBLE_"
REGIONAL = (
    "CPUS",
    "A2_CPUS",
    *hardware.GPU_METRICS.values(),
    f"{PREEMPTIBLE}CPUS",
    *(f"{PREEMPTIBLE}{metric}" for metric in hardware.GPU_METRICS.values()),
)
EVERYWHERE = ("GPUS_ALL_REGIONS", "CPUS_ALL_REGIONS")
# Machines that take from a quota; a stopped one takes only disk space.
COUNTED = ("pending", "running", "stopping")


class QuotaState(Value, frozen=True, rename="camel"):
    metric: str
    limit: float
    usage: float


def list_quotas(
    scenario: GcpScenario, fleet: CloudFleet[GceMachine], region: str
) -> tuple[QuotaState, ...]:
    """List the quotas of a region, or with "" those of all regions."""
    usage: dict[str, float] = {}
    for machine in fleet.list_all():
        if machine.state in COUNTED:
            for place, metric, amount in _list_uses(
                scenario, machine.type, machine.zone, machine.is_spot
            ):
                if place == region:
                    usage[metric] = usage.get(metric, 0.0) + amount
    return tuple(
        QuotaState(
            metric=metric, limit=_get_limit(scenario, region, metric), usage=usage.get(metric, 0.0)
        )
        for metric in (REGIONAL if region else EVERYWHERE)
    )


def find_exceeded_quota(
    scenario: GcpScenario, fleet: CloudFleet[GceMachine], type_: str, zone: str, is_spot: bool
) -> OperationFault | None:
    """Return the problem of an operation for which a quota has no room; None if all have."""
    for region, metric, amount in _list_uses(scenario, type_, zone, is_spot):
        states = {one.metric: one for one in list_quotas(scenario, fleet, region)}
        state = states[metric]
        if state.usage + amount > state.limit:
            return _make_problem(region, metric, state.limit)
    return None


def _make_problem(region: str, metric: str, limit: float) -> OperationFault:
    where = f"in region {region}" if region else "globally"
    suffix = "per-project-region" if region else "per-project"
    info = QuotaInfo(
        metric_name=f"compute.googleapis.com/{metric.lower()}",
        limit_name=f"{metric.replace('_', '-')}-{suffix}",
        limit=limit,
        dimensions={"region": region} if region else {},
    )
    return OperationFault(
        code="QUOTA_EXCEEDED",
        message=f"Quota '{metric}' exceeded.  Limit: {limit} {where}.",
        error_details=(FaultDetails(quota_info=info),),
    )


def _list_uses(
    scenario: GcpScenario, type_: str, zone: str, is_spot: bool
) -> Iterator[tuple[str, str, float]]:
    """Yield (region or "", metric, amount) of what a machine takes."""
    machine = hardware.BY_NAME[type_]
    region = zone.rpartition("-")[0]
    metrics = [(hardware.find_cpu_metric(type_), "CPUS", float(machine.cpus))]
    if machine.gpus:
        metric = hardware.GPU_METRICS[machine.gpu, machine.gpu_memory_gib]
        metrics.append((metric, metric, float(machine.gpus)))
        yield "", "GPUS_ALL_REGIONS", float(machine.gpus)
    for metric, spot_metric, amount in metrics:
        preemptible = f"{PREEMPTIBLE}{spot_metric}"
        has_own = is_spot and _get_limit(scenario, region, preemptible) > 0
        yield region, preemptible if has_own else metric, amount
    yield "", "CPUS_ALL_REGIONS", float(machine.cpus)


def _get_limit(scenario: GcpScenario, region: str, metric: str) -> float:
    for quota in scenario.quotas:
        if (quota.region, quota.metric) == (region, metric):
            return quota.limit
    return LARGE
