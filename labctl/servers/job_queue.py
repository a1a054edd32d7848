"""Servers whose runs are jobs: the login node of a cluster, and a course's server with Slurm."""

from __future__ import annotations

from labctl.model import Server
from labctl.providers import BuildsJobs, SubmitsJobs
from labctl.servers.context import LabContext
from labctl.wire.runs import JobRequest


def has_job_queue(context: LabContext) -> bool:
    """Whether the lab's server is a login node, which the lab only borrows."""
    return isinstance(context.provider, SubmitsJobs)


def build_job_request(context: LabContext, server: Server) -> JobRequest:
    """Say what a run of the lab asks of the cluster; nothing of any other server."""
    provider = context.provider
    if context.config.submits_jobs and isinstance(provider, BuildsJobs):
        return provider.build_job_request(context.config.server.need, server.offer)
    return JobRequest()


def remove_files(context: LabContext) -> None:
    """Remove the lab's files from the login node. Their results must have been saved."""
    if isinstance(context.provider, SubmitsJobs):
        context.provider.remove_files(context.config.name, context.lab_id)
