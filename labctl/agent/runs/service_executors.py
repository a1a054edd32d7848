"""The verbs of services: in containers, as plain processes, or in jobs, as the request says."""

from __future__ import annotations

from types import ModuleType

from ...wire.runs import DOCKER, SLURM
from ...wire.services import (
    ListServicesReply,
    ListServicesRequest,
    ServiceReply,
    ServiceRequest,
    StopServiceReply,
    StopServiceRequest,
)
from . import process_services, services, slurm_services


def _choose(executor: str) -> ModuleType:
    return {DOCKER: services, SLURM: slurm_services}.get(executor, process_services)


def start(request: ServiceRequest) -> ServiceReply:
    """Start a service, or find it running; reply once its port answers."""
    reply: ServiceReply = _choose(request.executor).start(request)
    return reply


def status(request: ListServicesRequest) -> ListServicesReply:
    """List every service of the lab that was started, running or not."""
    # The caller may not know the executor of another lab.
    for module in (process_services, slurm_services):
        reply: ListServicesReply = module.status(request)
        if reply.services:
            return reply
    return services.status(request) if request.executor == DOCKER else ListServicesReply(())


def stop(request: StopServiceRequest) -> StopServiceReply:
    """Stop one service, or all services of the lab. An absent service is not an error."""
    reply: StopServiceReply = _choose(request.executor).stop(request)
    return reply
