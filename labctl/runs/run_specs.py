"""The spec of a run: its id, and what lab.yaml and the user want of it."""

from __future__ import annotations

import os
import re
import time

import msgspec

from labctl.errors import UsageError
from labctl.model import NAME_PATTERN, Server
from labctl.runs import images, server_environments
from labctl.runs.launch import build_launch_command
from labctl.runs.tracking import build_tracking_env
from labctl.servers.context import LabContext
from labctl.servers.gpus import choose_server_gpus_option, select_gpus
from labctl.servers.job_queue import build_job_request, count_gpus
from labctl.wire.runs import BROKER, RunSpec


def make_run_id() -> str:
    """Return a run name of the UTC time, and two random bytes for runs of the same second."""
    return time.strftime("%m%d-%H%M%S-", time.gmtime()) + os.urandom(2).hex()


def build_spec(
    context: LabContext,
    server: Server,
    command: tuple[str, ...],
    run_id: str,
    tty: bool,
    gpu_count: int = 0,
) -> RunSpec:
    """Build the run's spec. UsageError for an invalid name or a missing command.

    `gpu_count` is how many of the server's GPUs it uses, each by a process of its own; 0 for all.
    Also raises if the lab needs a GPU that the server does not have, or if `launch:` cannot start
    the command.
    """
    require_valid(context, command, run_id)
    config = context.config
    gpus = choose_server_gpus_option(context, server)
    job = build_job_request(context, server)
    has_own_shm = config.uses_containers or job.runtime == BROKER
    if config.submits_jobs:
        refuse_gpu_count(gpu_count)
        gpu_count = count_gpus(job)
    elif gpu_count:
        gpus = select_gpus(context.load_facts(server), gpu_count)
        launch = msgspec.structs.replace(config.launch, launcher="torchrun", processes=gpu_count)
        config = msgspec.structs.replace(config, launch=launch)
    elif gpus:
        gpu_count = len(context.load_facts(server).gpus)
    return RunSpec(
        id=run_id,
        lab=config.name,
        lab_id=context.lab_id,
        command=build_launch_command(config, command, gpu_count),
        image=find_run_image(context),
        env=build_tracking_env(config, run_id),
        secrets=config.secrets,
        outputs=config.outputs,
        gpus=gpus,
        memory_bytes=config.limits.memory_bytes,
        cpus=config.limits.cpus,
        shm_bytes=config.limits.shm_bytes if has_own_shm else 0,
        tty=tty,
        data=config.server_data,
        executor=config.server.executor,
        job=job,
    )


def refuse_gpu_count(gpu_count: int) -> None:
    """UsageError if a number of GPUs was typed for a run that is a job."""
    if gpu_count:
        raise UsageError(
            f"--gpus {gpu_count} cannot be used here: each run is a job of Slurm",
            why="a job gets all GPUs that it asks for, and lab.yaml says how many those are",
            hint=f"write `gpu: any:{gpu_count}` and `launch: {{with: torchrun}}` in lab.yaml",
        )


def find_run_image(context: LabContext) -> str:
    """Return the image of a run; "" for one without a container that needs no environment."""
    if context.config.uses_containers:
        return images.image_reference(context)
    if context.config.environment_file:
        return server_environments.environment_reference(context)
    return context.config.job_image


def require_valid(context: LabContext, command: tuple[str, ...], run_id: str) -> None:
    """UsageError if there is no command to run, or if `run_id` cannot name a run."""
    if not (command or context.config.run):
        raise UsageError(
            "nothing to run",
            why="lab.yaml has no `run:` and nothing follows `--`; the CMD of an image is not used",
            hint="labctl run -- python train.py\nlabctl forward jupyter   # for a notebook",
        )
    if not NAME_PATTERN.fullmatch(run_id):
        clean = re.sub(r"[^a-z0-9-]+", "-", run_id.lower()).strip("-")[:38]
        raise UsageError(
            f"{run_id!r} is not a valid run name",
            why="a name has at most 39 characters: lower-case letters, digits and `-`",
            hint=f"labctl run --id {clean or 'first'}",
        )
