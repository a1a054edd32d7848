"""One-time schedules of EventBridge Scheduler: moto stores them, this module fires them."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from labctl.decoding import convert_value, decode_json
from labctl.model import Value
from labctl.rehearsal.aws.backend import Backend
from labctl.rehearsal.aws.calls import Call, build_refusal
from labctl.rehearsal.aws.fleet import Fleet
from labctl.rehearsal.core.clock import TaskTimer
from labctl.rehearsal.core.replies import HttpReply

TERMINATE = re.compile(r"arn:aws[a-z-]*:scheduler:::aws-sdk:ec2:terminateInstances")
_AT = re.compile(r"at\(([0-9T:-]+)\)")


class ScheduleCall(Value, frozen=True, rename="pascal"):
    """The body of CreateSchedule and UpdateSchedule."""

    schedule_expression: str = ""
    schedule_expression_timezone: str = "UTC"
    group_name: str = "default"
    state: str = "ENABLED"
    action_after_completion: str = "NONE"


class ScheduleTarget(Value, frozen=True, rename="pascal"):
    """The API call of a schedule: the ARN of the action, and its input as JSON text."""

    arn: str
    input: str = "{}"


class TerminateInput(Value, frozen=True, rename="pascal"):
    instance_ids: tuple[str, ...] = ()


class Schedules:
    """The schedules. Each is checked when its time has come, in case it has changed."""

    def __init__(
        self, backend: Backend, clock: TaskTimer, fleet: Fleet, now: Callable[[], float]
    ) -> None:
        self._backend = backend
        self._clock = clock
        self._fleet = fleet
        self._now = now

    def put_schedule(self, call: Call) -> HttpReply | None:
        """Handle CreateSchedule and UpdateSchedule."""
        body = call.parse_json(ScheduleCall)
        expression = body.schedule_expression
        if expression.startswith("at("):
            due = _parse_time(expression, body.schedule_expression_timezone)
            if due is None:
                words = f"Invalid Schedule Expression {expression}."
                return build_refusal(call, "ValidationException", words)
        reply = self._backend.apply(call)
        if reply.status == 200 and expression.startswith("at(") and due is not None:
            name = call.environ["PATH_INFO"].rpartition("/")[2]
            self._apply_defaults(call.region, body, name)
            self._clock.run_after(
                max(0.0, due - self._now()),
                lambda: self._fire(call.region, body.group_name, name, expression),
            )
        return reply

    def _apply_defaults(self, region: str, body: ScheduleCall, name: str) -> None:
        """Reset omitted fields to their defaults, as AWS's update does and moto's does not."""
        with self._backend.lock():
            groups = self._backend.get_moto_backend("scheduler", region).schedule_groups
            schedule = groups[body.group_name].schedules[name]
            schedule.state = body.state
            schedule.action_after_completion = body.action_after_completion

    def _fire(self, region: str, group: str, name: str, expression: str) -> None:
        with self._backend.lock():
            groups = self._backend.get_moto_backend("scheduler", region).schedule_groups
            schedule = groups[group].schedules.get(name) if group in groups else None
            if schedule is None or schedule.schedule_expression != expression:
                return
            if schedule.state != "ENABLED":
                return
            target = convert_value(schedule.target, ScheduleTarget)
            if schedule.action_after_completion == "DELETE":
                groups[group].delete_schedule(name)
        if TERMINATE.fullmatch(target.arn):
            for instance_id in decode_json(target.input, TerminateInput).instance_ids:
                record = self._fleet.records.get(instance_id)
                if record is not None and record.region == region:
                    self._fleet.terminate(record)


def _parse_time(expression: str, zone: str) -> float | None:
    """Parse `at(2030-01-01T00:00:00)` into Unix seconds; None if it is invalid."""
    match = _AT.fullmatch(expression)
    try:
        return (
            datetime.fromisoformat(match[1]).replace(tzinfo=ZoneInfo(zone)).timestamp()
            if match
            else None
        )
    except (ValueError, ZoneInfoNotFoundError):
        return None
