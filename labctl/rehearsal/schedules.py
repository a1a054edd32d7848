"""One-time schedules of EventBridge Scheduler: moto stores them, this module fires them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from labctl.rehearsal.backend import Backend
from labctl.rehearsal.calls import Call, HttpReply, build_refusal
from labctl.rehearsal.clock import TaskTimer
from labctl.rehearsal.fleet import Fleet

TERMINATE = re.compile(r"arn:aws[a-z-]*:scheduler:::aws-sdk:ec2:terminateInstances")
_AT = re.compile(r"at\(([0-9T:-]+)\)")


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
        expression = str(call.json.get("ScheduleExpression", ""))
        zone = str(call.json.get("ScheduleExpressionTimezone") or "UTC")
        if expression.startswith("at("):
            due = _parse_time(expression, zone)
            if due is None:
                words = f"Invalid Schedule Expression {expression}."
                return build_refusal(call, "ValidationException", words)
        reply = self._backend.apply(call)
        if reply.status == 200 and expression.startswith("at(") and due is not None:
            name = call.environ["PATH_INFO"].rpartition("/")[2]
            group = str(call.json.get("GroupName") or "default")
            self._apply_defaults(call, group, name)
            self._clock.run_after(
                max(0.0, due - self._now()),
                lambda: self._fire(call.region, group, name, expression),
            )
        return reply

    def _apply_defaults(self, call: Call, group: str, name: str) -> None:
        """Reset omitted fields to their defaults, as AWS's update does and moto's does not."""
        with self._backend.lock():
            groups = self._backend.moto_backend("scheduler", call.region).schedule_groups
            schedule = groups[group].schedules[name]
            schedule.state = call.json.get("State") or "ENABLED"
            schedule.action_after_completion = call.json.get("ActionAfterCompletion") or "NONE"

    def _fire(self, region: str, group: str, name: str, expression: str) -> None:
        with self._backend.lock():
            groups = self._backend.moto_backend("scheduler", region).schedule_groups
            schedule = groups[group].schedules.get(name) if group in groups else None
            if schedule is None or schedule.schedule_expression != expression:
                return
            if schedule.state != "ENABLED":
                return
            target: dict[str, Any] = schedule.target
            if schedule.action_after_completion == "DELETE":
                groups[group].delete_schedule(name)
        if TERMINATE.fullmatch(target["Arn"]):
            for instance_id in json.loads(target.get("Input") or "{}").get("InstanceIds", []):
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
