"""Servers whose runs are jobs: the login node of a cluster, and a course's server with Slurm."""

from __future__ import annotations

from pathlib import Path

from labctl.commands.slurm import parse_gpus
from labctl.model import Offer, Server
from labctl.providers import BuildsJobs, SubmitsJobs
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.wire.runs import JobRequest


def has_job_queue(context: LabContext) -> bool:
    """Whether the lab's server is a login node, which the lab only borrows."""
    return isinstance(context.provider, SubmitsJobs)


def build_job_request(context: LabContext, server: Server) -> JobRequest:
    """Say what a run of the lab asks of the cluster; nothing of any other server."""
    provider = context.provider
    if not (context.config.submits_jobs and isinstance(provider, BuildsJobs)):
        return JobRequest()
    request = provider.build_job_request(context.config.server.need, server.offer)
    return request if context.config.job_image else request._replace(runtime="")


def count_gpus(request: JobRequest) -> int:
    """Return the number of GPUs that a job gets on its machine."""
    return parse_gpus(request.gpus)[1]


def list_modules(context: LabContext) -> tuple[str, ...]:
    """List the modules of the cluster that a run loads; none on any other server."""
    provider = context.provider
    if isinstance(provider, SubmitsJobs):
        return provider.build_job_request(
            context.config.server.need, Offer(provider=provider.name, type="")
        ).modules
    return ()


def find_node_key(config: Path) -> Path:
    """Return the private key for machines of jobs, beside the ssh_config of the login node."""
    return config.with_name("node_key")


def ensure_node_key(context: LabContext, server: Server) -> str:
    """Return the public key for machines of jobs, made once; "" where runs are not jobs."""
    if not has_job_queue(context):
        return ""
    return ensure_key_pair(find_node_key(context.connections.config_path(server.id)))


def remove_files(context: LabContext) -> None:
    """Remove the lab's files from the login node. Their results must have been saved."""
    if isinstance(context.provider, SubmitsJobs):
        context.provider.remove_files(context.config.name, context.lab_id)
