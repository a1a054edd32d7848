"""moto in this process: the application of its server, and the objects behind it.

Each rehearsal has its own account, so that several in one process are isolated from each other.
moto's switches are set as attributes, since this process's environment is not ours to change.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from moto import settings
from moto.backends import get_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app

from labctl.lazy import lazy_imports
from labctl.rehearsal.aws.calls import Call
from labctl.rehearsal.aws.scenario import Scenario
from labctl.rehearsal.core.replies import HttpReply

if TYPE_CHECKING:
    from moto.ec2.models import EC2Backend
    from moto.ec2.models.instances import Instance
    from mypy_boto3_ec2.type_defs import InstanceTypeInfoTypeDef

with lazy_imports(__name__):
    from moto.ec2.models import instance_types

# Large responses that never change. They are cached, since moto takes seconds to build them.
STATIC = ("DescribeInstanceTypes", "DescribeInstanceTypeOfferings")

settings.ENABLE_AMI_VALIDATION = True
settings.ENABLE_KEYPAIR_VALIDATION = True
settings.EC2_ENABLE_INSTANCE_TYPE_VALIDATION = True
settings.ec2_load_default_amis = lambda: False
logging.getLogger("werkzeug").setLevel(logging.ERROR)


class Backend:
    """moto. `apply` sends a call to it; `lock` is the lock for every use of its objects."""

    def __init__(self, regions: tuple[str, ...]) -> None:
        self.account = f"{secrets.randbelow(9 * 10**11) + 10**11}"
        self.regions = regions
        self._lock = threading.RLock()
        self._application = DomainDispatcherApplication(create_backend_app)
        self._cached: dict[tuple[str, str, bytes], HttpReply] = {}

    @contextmanager
    def lock(self) -> Iterator[None]:
        with self._lock:
            yield

    def apply(self, call: Call) -> HttpReply:
        key = (call.region, call.action, call.body)
        if call.action in STATIC and (kept := self._cached.get(key)) is not None:
            return kept
        with self._lock:
            reply = self._call_moto(call)
        if call.action in STATIC and reply.status == 200:
            self._cached[key] = reply
        return reply

    def get_moto_backend(self, service: str, region: str) -> Any:
        """Return moto's object for a service in a region; use it only while `lock`."""
        return get_backend(service)[self.account][region]  # type: ignore[call-overload]

    def ec2(self, region: str) -> EC2Backend:
        ec2: EC2Backend = self.get_moto_backend("ec2", region)
        return ec2

    def instance(self, region: str, instance_id: str) -> Instance:
        """Return moto's instance, which exists from its launch until the rehearsal's end."""
        instance = self.ec2(region).get_instance_by_id(instance_id)
        assert instance is not None, instance_id
        return instance

    def describe_type(self, name: str) -> InstanceTypeInfoTypeDef:
        """Return EC2's description of an instance type; {} if it does not exist."""
        description: InstanceTypeInfoTypeDef = instance_types.INSTANCE_TYPES.get(name, {})
        return description

    def list_zones(self, region: str, name: str) -> list[str]:
        """Return the zones of a region that offer a type."""
        offered = instance_types.INSTANCE_TYPE_OFFERINGS["availability-zone"].get(region, [])
        return sorted(entry["Location"] for entry in offered if entry["InstanceType"] == name)

    def _call_moto(self, call: Call) -> HttpReply:
        environ = call.build_environ()
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
        return HttpReply(status=started[0], headers=started[1], body=body)


def is_offered(scenario: Scenario, instance_type: str) -> bool:
    """Return whether the scenario offers this instance type."""
    return not scenario.types or instance_type in scenario.types
