"""The verbs of services: in containers, or as plain processes, as the request says."""

from __future__ import annotations

from types import ModuleType

from ...wire.runs import DOCKER
from ...wire.services import (
    ListServicesReply,
    ListServicesRequest,
    ServiceReply,
    ServiceRequest,
    StopServiceReply,
    StopServiceRequest,
)
from . import process_services, services


def _choose(executor: str) -> ModuleType:
    return services if executor == DOCKER else process_services


def start(request: ServiceRequest) -> ServiceReply:
    """Start a service, or find it running; reply once its port answers."""
    reply: ServiceReply = _choose(request.executor).start(request)
    return reply


def status(request: ListServicesRequest) -> ListServicesReply:
    """List every service of the lab that was started, running or not."""
    reply = process_services.status(request)
    # The caller may not know the executor of another lab.
    is_known = reply.services or request.executor != DOCKER
    return reply if is_known else services.status(request)


def stop(request: StopServiceRequest) -> StopServiceReply:
    """Stop one service, or all services of the lab. An absent service is not an error."""
    reply: StopServiceReply = _choose(request.executor).stop(request)
    return reply
