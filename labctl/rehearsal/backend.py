"""moto, in this process: its server's application, and its objects behind it.

Each rehearsal has an account of its own, so that several in one process see nothing of each other.
moto's switches are set as attributes, since this process's environment is not ours to write.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from moto import settings
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from labctl.rehearsal.calls import Call, Reply
from labctl.rehearsal.scenario import Scenario

# Large answers that never change: kept, as moto takes seconds over them.
STATIC = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")

settings.ENABLE_AMI_VALIDATION = True
settings.ENABLE_KEYPAIR_VALIDATION = True
settings.EC2_ENABLE_INSTANCE_TYPE_VALIDATION = True
settings.ec2_load_default_amis = lambda: False
logging.getLogger("werkzeug").setLevel(logging.ERROR)


class Backend:
    """`apply` sends a call to moto; `held` is the lock that every look at its objects needs."""

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.account = f"{secrets.randbelow(9 * 10**11) + 10**11}"
        self.regions = regions
        self._lock = threading.RLock()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._kept: dict[tuple[str, str, bytes], Reply] = {}

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            yield

    def apply(self, call: Call) -> Reply:
        key = (call.region, call.action, call.body)
        if call.action in STATIC and (kept := self._kept.get(key)) is not None:
            return kept
        with self._lock:
            reply = self._sent(call)
        if call.action in STATIC and reply.status == 200:
            self._kept[key] = reply
        return reply

    def of(self, service: str, region: str) -> Any:
        """moto's object for a service in a region: use it only while `held`."""
        return get_backend(service)[self.account][region]  # type: ignore[call-overload]

    def ec2(self, region: str) -> Any:
        return self.of("ec2", region)

    def instance(self, region: str, instance_id: str) -> Any:
        """moto's instance, or None."""
        return self.ec2(region).get_instance_by_id(instance_id)

    def type_of(self, name: str) -> dict[str, Any]:
        """What EC2 says of an instance type; {} for one that does not exist."""
        from moto.ec2.models.instance_types import INSTANCE_TYPES

        found: dict[str, Any] = INSTANCE_TYPES.get(name, {})
        return found

    def zones_of(self, region: str, name: str) -> list[str]:
        """The zones of a region that offer a type."""
        from moto.ec2.models.instance_types import INSTANCE_TYPE_OFFERINGS

        offered = INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
        return sorted(entry["Location"] for entry in offered if entry["InstanceType"] == name)

    def _sent(self, call: Call) -> Reply:
        environ = call.wsgi()
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = self.account
        started: list[Any] = []

        def start_response(status: str, headers: list[tuple[str, str]], _: Any = None) -> Any:
            started.extend((int(status.split()[0]), tuple(headers)))

        parts = self._application(environ, start_response)
        try:
            body = b"".join(parts)
        finally:
            if hasattr(parts, "close"):
                parts.close()
        return Reply(status=started[0], headers=started[1], body=body)


def offers(scenario: Scenario, instance_type: str) -> bool:
    """Whether the scenario has this type at all."""
    return not scenario.types or instance_type in scenario.types
