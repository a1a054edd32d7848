"""A probe of a run on all servers of a lab: its progress is that of the first part."""

from __future__ import annotations

from collections.abc import Callable

from labctl.errors import LabError
from labctl.lifecycle import gang, gang_runs
from labctl.lifecycle.gang_watch import GangWatch
from labctl.model import Run
from labctl.runs import probe, run_specs
from labctl.runs.probe import ProbeJob
from labctl.servers.context import LabContext


def build_job(
    context: LabContext,
    command: tuple[str, ...],
    *,
    push: bool = True,
    on_start: Callable[[Run], None] = lambda run: None,
) -> ProbeJob:
    """Return the probe of `command` (lab.yaml's, if empty) on all servers."""
    run_id = probe.make_probe_id()
    run_specs.require_valid(context, command, run_id)
    members = gang.build_members(context)
    silence_s = context.config.launch.silence_s
    watch = GangWatch(members, run_id, silence_s)

    def start() -> Run:
        return gang_runs.start(
            context, command, run_id, push=push, on_start=lambda run, _: on_start(run)
        )

    def cancel() -> Run:
        return gang_runs.cancel(members, run_id, probe.GRACE_S)[0]

    def require_whole() -> None:
        if failure := watch.find_failure(silence_s):
            raise LabError(
                f"the probe failed: {failure.reason}", hint=f"labctl logs {run_id} --rank all"
            )

    return ProbeJob(
        run_id=run_id,
        start=start,
        cancel=cancel,
        servers=len(members),
        require_whole=require_whole,
    )
