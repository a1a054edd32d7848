"""The account's quotas in vCPUs: which type counts against which, and Service Quotas' responses."""

from __future__ import annotations

import re

from labctl.model import Value
from labctl.rehearsal.aws.calls import Call, build_json_reply, build_refusal
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.replies import HttpReply


class VcpuQuota(Value, frozen=True):
    """A quota: AWS's code and name, and the scenario's key for its value."""

    code: str
    name: str
    key: str


class QuotaCall(Value, frozen=True, rename="pascal"):
    """The body of a call of Service Quotas."""

    service_code: str = ""
    quota_code: str = ""


class ServiceQuota(Value, frozen=True, rename="pascal"):
    """A quota as Service Quotas describes it."""

    quota_arn: str
    quota_code: str
    quota_name: str
    value: float
    service_code: str = "ec2"
    service_name: str = "Amazon Elastic Compute Cloud (Amazon EC2)"
    unit: str = "None"
    adjustable: bool = True
    global_quota: bool = False


class QuotaReply(Value, frozen=True, rename="pascal"):
    quota: ServiceQuota


class QuotasReply(Value, frozen=True, rename="pascal"):
    quotas: tuple[ServiceQuota, ...]


LIMITS = (
    VcpuQuota(
        code="L-1216C47A",
        name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        key="standard",
    ),
    VcpuQuota(code="L-DB2E81BA", name="Running On-Demand G and VT instances", key="g"),
    VcpuQuota(code="L-417A185B", name="Running On-Demand P instances", key="p"),
    VcpuQuota(
        code="L-34B43A08",
        name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
        key="spot_standard",
    ),
    VcpuQuota(code="L-3819A6DF", name="All G and VT Spot Instance Requests", key="spot_g"),
    VcpuQuota(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests", key="spot_p"),
    VcpuQuota(code="L-C4BD4855", name="All P5 Spot Instance Requests", key="spot_p5"),
)


def quota_key(instance_type: str, spot: bool) -> str:
    """Return the scenario's key of the quota that this type counts against."""
    match = re.match(r"[a-z]+", instance_type)
    letters = match[0] if match else ""
    if letters.startswith("p"):
        key = "p5" if spot and instance_type.startswith("p5") else "p"
    else:
        key = "g" if letters.startswith(("g", "vt")) else "standard"
    return f"spot_{key}" if spot else key


def refuse_exceeded(call: Call, spot: bool, limit: int) -> HttpReply:
    """Return RunInstances' refusal."""
    if spot:
        words = "Max spot instance count exceeded"
        return build_refusal(call, "MaxSpotInstanceCountExceeded", words)
    words = (
        "You have requested more vCPU capacity than your current vCPU limit of "
        f"{limit} allows for the instance bucket that the specified instance type belongs to. "
        "Please visit http://aws.amazon.com/contact-us/ec2-request to request an adjustment to "
        "this limit."
    )
    return build_refusal(call, "VcpuLimitExceeded", words)


def answer_quotas(call: Call, scenario: Scenario, account: str) -> HttpReply | None:
    """Return the response of Service Quotas for EC2; None passes the call on to moto."""
    body = call.parse_json(QuotaCall)
    if body.service_code != "ec2":
        return None
    quotas = tuple(_describe_quota(limit, scenario, call.region, account) for limit in LIMITS)
    if call.action in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
        return build_json_reply(QuotasReply(quotas=quotas))
    if call.action in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
        for quota in quotas:
            if quota.quota_code == body.quota_code:
                return build_json_reply(QuotaReply(quota=quota))
        words = "The request failed because the specified service quota does not exist."
        return build_refusal(call, "NoSuchResourceException", words)
    return None


def _describe_quota(
    limit: VcpuQuota, scenario: Scenario, region: str, account: str
) -> ServiceQuota:
    return ServiceQuota(
        quota_arn=f"arn:aws:servicequotas:{region}:{account}:ec2/{limit.code}",
        quota_code=limit.code,
        quota_name=limit.name,
        value=float(getattr(scenario.quotas, limit.key)),
    )
