"""The account's quotas in vCPUs: which type counts against which, and Service Quotas' responses."""

from __future__ import annotations

import re
from typing import Any

from labctl.model import Value
from labctl.rehearsal.calls import Call, Reply, json_reply, refusal
from labctl.rehearsal.scenario import Scenario


class Limit(Value, frozen=True):
    """A quota: AWS's code and name, and the scenario's key for its value."""

    code: str
    name: str
    key: str


LIMITS = (
    Limit(
        code="L-1216C47A",
        name="Running On-Demand Standard (A, C, D, H, I, M, R, T, Z) instances",
        key="standard",
    ),
    Limit(code="L-DB2E81BA", name="Running On-Demand G and VT instances", key="g"),
    Limit(code="L-417A185B", name="Running On-Demand P instances", key="p"),
    Limit(
        code="L-34B43A08",
        name="All Standard (A, C, D, H, I, M, R, T, Z) Spot Instance Requests",
        key="spot_standard",
    ),
    Limit(code="L-3819A6DF", name="All G and VT Spot Instance Requests", key="spot_g"),
    Limit(code="L-7212CCBC", name="All P4, P3 and P2 Spot Instance Requests", key="spot_p"),
    Limit(code="L-C4BD4855", name="All P5 Spot Instance Requests", key="spot_p5"),
)


def bucket(instance_type: str, spot: bool) -> str:
    """Return the scenario's key of the quota that this type counts against."""
    match = re.match(r"[a-z]+", instance_type)
    letters = match[0] if match else ""
    if letters.startswith("p"):
        key = "p5" if spot and instance_type.startswith("p5") else "p"
    else:
        key = "g" if letters.startswith(("g", "vt")) else "standard"
    return f"spot_{key}" if spot else key


def exceeded(call: Call, spot: bool, limit: int) -> Reply:
    """Return RunInstances' refusal."""
    if spot:
        words = "Max spot instance count exceeded"
        return refusal(call, "MaxSpotInstanceCountExceeded", words)
    words = (
        "You have requested more vCPU capacity than your current vCPU limit of "
        f"{limit} allows for the instance bucket that the specified instance type belongs to. "
        "Please visit http://aws.amazon.com/contact-us/ec2-request to request an adjustment to "
        "this limit."
    )
    return refusal(call, "VcpuLimitExceeded", words)


def answer(call: Call, scenario: Scenario, account: str) -> Reply | None:
    """Return the response of Service Quotas for EC2; None passes the call on to moto."""
    if call.json.get("ServiceCode") != "ec2":
        return None
    quotas = [_describe_quota(limit, scenario, call.region, account) for limit in LIMITS]
    if call.action in ("ListServiceQuotas", "ListAWSDefaultServiceQuotas"):
        return json_reply({"Quotas": quotas})
    if call.action in ("GetServiceQuota", "GetAWSDefaultServiceQuota"):
        code = call.json.get("QuotaCode")
        for quota in quotas:
            if quota["QuotaCode"] == code:
                return json_reply({"Quota": quota})
        words = "The request failed because the specified service quota does not exist."
        return refusal(call, "NoSuchResourceException", words)
    return None


def _describe_quota(limit: Limit, scenario: Scenario, region: str, account: str) -> dict[str, Any]:
    return {
        "ServiceCode": "ec2",
        "ServiceName": "Amazon Elastic Compute Cloud (Amazon EC2)",
        "QuotaArn": f"arn:aws:servicequotas:{region}:{account}:ec2/{limit.code}",
        "QuotaCode": limit.code,
        "QuotaName": limit.name,
        "Value": float(getattr(scenario.quotas, limit.key)),
        "Unit": "None",
        "Adjustable": True,
        "GlobalQuota": False,
    }
