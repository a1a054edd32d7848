"""A timer at AWS that ends a server even if it hangs: a one-time EventBridge schedule."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from labctl.errors import DeniedError
from labctl.lazy import lazy_imports
from labctl.providers.aws import instances, tags
from labctl.providers.aws.clients import Clients
from labctl.providers.aws.errors import POLICY_PAGE, get_code, translate_errors

if TYPE_CHECKING:
    from mypy_boto3_scheduler import EventBridgeSchedulerClient
    from mypy_boto3_scheduler.type_defs import CreateScheduleInputTypeDef

    from labctl.providers.aws.tags import OwnedInstance

with lazy_imports(__name__):
    from botocore import exceptions as boto_errors

PREFIX = "labctl-"
RETRY_S = 3600


def schedule_name(lab_id: str, instance_id: str) -> str:
    return f"{PREFIX}{lab_id}-{instance_id}"


def describe_missing_setup(role: str) -> str:
    """Say which setting is missing before timers can be set; "" if none is."""
    return "" if role else f"server.aws.scheduler_role is not set (see {POLICY_PAGE})"


def set_deadline(clients: Clients, role: str, server_id: str, at: float) -> None:
    """Set the server's timer; replaces an earlier one. DeniedError without a role that works."""
    if not role:
        raise DeniedError(
            "EventBridge Scheduler has no role that allows it to end servers",
            why="server.aws.scheduler_role is not set",
            hint=f"{POLICY_PAGE}   # the role and its policy",
        )
    instance = instances.require_instance(clients, server_id)
    region = server_id.rpartition(".")[2]
    schedule = _build_schedule(clients.get_partition(region), role, instance, at)
    _save_schedule(clients.get_scheduler(region), schedule)
    with translate_errors():
        clients.get_ec2(region).create_tags(
            Resources=[instance["InstanceId"]], Tags=tags.as_pairs({tags.DEADLINE: f"{at:.0f}"})
        )


def _build_schedule(
    partition: str, role: str, instance: OwnedInstance, at: float
) -> CreateScheduleInputTypeDef:
    instance_id = instance["InstanceId"]
    when = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%S")
    return {
        "Name": schedule_name(tags.parse_tags(instance).get(tags.LAB_ID, ""), instance_id),
        "Description": "Ends a labctl server at its TTL",
        "ScheduleExpression": f"at({when})",
        "ScheduleExpressionTimezone": "UTC",
        "FlexibleTimeWindow": {"Mode": "OFF"},
        "ActionAfterCompletion": "DELETE",
        "Target": {
            "Arn": f"arn:{partition}:scheduler:::aws-sdk:ec2:terminateInstances",
            "RoleArn": role,
            "Input": json.dumps({"InstanceIds": [instance_id]}),
            "RetryPolicy": {"MaximumEventAgeInSeconds": RETRY_S, "MaximumRetryAttempts": 10},
        },
    }


def _save_schedule(
    scheduler: EventBridgeSchedulerClient, schedule: CreateScheduleInputTypeDef
) -> None:
    with translate_errors():
        try:
            scheduler.create_schedule(**schedule)
        except boto_errors.ClientError as error:
            if get_code(error) != "ConflictException":
                raise
            scheduler.update_schedule(**schedule)
