"""Services on a cluster: each is a step of the job of a run, on that job's machine.

The truth about a service is its record (service-NAME.json in the lab's .labctl), and whether Slurm
has its step. The step's srun stays on the login node and writes what the step prints into
service-NAME.log beside it: the port is in there too.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ...wire.codec import MessageError, decode, encode, to_json
from ...wire.node_access import NodeAccess
from ...wire.services import (
    CODE,
    JobServiceRecord,
    ListServicesReply,
    ListServicesRequest,
    ServiceRecord,
    ServiceReply,
    ServiceRequest,
    ServiceStepReply,
    ServiceStepRequest,
    StopServiceReply,
    StopServiceRequest,
)
from ..host.background import build_scope_words
from ..host.paths import (
    lab_dir,
    read_record,
    read_text,
    require_name,
    run_dir,
    write_json,
    write_text,
)
from ..host.sessions import read_stat
from ..program import PROGRAM
from ..reply import MARK, Failure
from . import slurm_commands, slurm_queue
from .environments import use_environment
from .executor import Environment
from .known_services import KNOWN
from .node_access import build_node_access
from .process_executor import link_server_data, spawn_session
from .process_services import (
    build_known_words,
    build_service_lines,
    find_service_log,
    find_service_record,
    list_service_names,
    make_missing_program_failure,
    make_port_failure,
    make_service_failure,
)
from .services import READY_S, find_token, get_port, hash_settings, lock_service
from .slurm_attempts import choose_interpreter, load_modules
from .slurm_executor import find_newest_job
from .spec import read_spec

# The step of a service is named after this, the service and random letters.
STEP = "labctl-service"
POLL_S = 0.2
ENDS_WITHIN_S = 40.0


def start(request: ServiceRequest) -> ServiceReply:
    """Start a service in the newest running job of the lab, or find it running.

    Reply once its port answers. A name without a command is a port, and is not started.
    """
    root = lab_dir(request.lab, request.lab_id)
    name = require_name(request.name)
    if name not in KNOWN and not request.command:
        job = _find_job(request)
        service = ServiceRecord(name, get_port(request), "", "", "/", "", running=True)
        return ServiceReply(*service, node=_build_access(job, request))
    with lock_service(root, name):
        record = _read_live(root, name)
        is_stale = record is not None and record.settings != hash_settings(request)
        if record and not (is_stale and request.replace):
            _wait_until_ready(root, record, request, srun=0)
            service = _describe(root, name, record, running=True)
            node = _build_access(record, request)
            return ServiceReply(*service, found=True, stale=is_stale, node=node)
        job = _find_job(request)
        environment = use_environment(request.image, request.lab_id)
        if environment is None or not (root / "code").is_dir():
            return ServiceReply(missing=request.image or CODE)
        if record:
            _stop_step(record)
        record, srun = _launch(root, request, job, environment)
        _wait_until_ready(root, record, request, srun)
    service = _describe(root, name, record, running=True)
    return ServiceReply(*service, replaced=is_stale, node=_build_access(record, request))


def status(request: ListServicesRequest) -> ListServicesReply:
    """List the services of the lab that were started, running or not."""
    root = lab_dir(request.lab, request.lab_id)
    named = [(name, record) for name in list_service_names(root) if (record := _read(root, name))]
    steps = {step.name for step in slurm_queue.list_steps()} if named else set()
    return ListServicesReply(
        tuple(_describe(root, name, one, running=one.step in steps) for name, one in named)
    )


def stop(request: StopServiceRequest) -> StopServiceReply:
    """Stop one service, or all services of the lab. An absent service is not an error."""
    root = lab_dir(request.lab, request.lab_id)
    stopped = []
    for name in list_service_names(root):
        if request.name not in ("", name):
            continue
        # Somebody may be starting it now.
        with lock_service(root, name):
            record = _read_live(root, name)
            if record:
                _stop_step(record)
                stopped.append(name)
            _forget(root, name)
    return StopServiceReply(tuple(stopped))


def _find_job(request: ServiceRequest) -> JobServiceRecord:
    run, job_id = find_newest_job(request.lab_id)
    return JobServiceRecord(run, job_id, "", "")


def _build_access(record: JobServiceRecord, request: ServiceRequest) -> NodeAccess:
    return build_node_access(record.job_id, record.run, request.access_key)


def _launch(
    root: Path, request: ServiceRequest, job: JobServiceRecord, environment: Environment
) -> tuple[JobServiceRecord, int]:
    """Start the service's step and record it; return its record and the process of its srun."""
    name = request.name
    link_server_data(root, request.data)
    script = root / ".labctl" / f"service-{name}.sh"
    modules = read_spec(run_dir(root, job.run)).job.modules
    write_text(script, _build_script(root, request, environment, modules), 0o700)
    log = find_service_log(root, name)
    write_text(log, "")
    step = f"{STEP}-{name}-{os.urandom(3).hex()}"
    record = job._replace(step=step, settings=hash_settings(request))
    write_json(find_service_record(root, name), to_json(record))
    words = slurm_commands.build_service_words(job.job_id, step, [str(script)])
    return record, spawn_session([*build_scope_words(), *words], str(log))


def _build_script(
    root: Path, request: ServiceRequest, environment: Environment, modules: Sequence[str]
) -> str:
    """Return the script of the step. Its request is in it, as the step's standard input."""
    is_preset = request.name in KNOWN and not request.command
    step = ServiceStepRequest(
        tuple(build_known_words(request.name) if is_preset else request.command),
        get_port(request),
        test=KNOWN[request.name].test if is_preset else "",
    )
    own = {} if request.gpus == "all" else {"CUDA_VISIBLE_DEVICES": request.gpus}
    program = [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py"), "service-step"]
    return "\n".join(
        [
            choose_interpreter(modules),
            *load_modules(modules),
            *build_service_lines(root, request, environment, own),
            f"exec {shlex.join(program)} <<'LABCTL_END'",
            encode(step),
            "LABCTL_END",
            "",
        ]
    )


def _wait_until_ready(
    root: Path, record: JobServiceRecord, request: ServiceRequest, srun: int
) -> None:
    """Wait until the step has said that its port answers. `srun` is its process here, if any."""
    limit_s = request.deadline_s or READY_S
    deadline_s = time.monotonic() + limit_s
    while True:
        reply = _read_reply(root, request.name)
        if reply is not None and reply.port:
            return
        has_ended = srun and read_stat(srun) is None
        if has_ended or (not srun and not _is_live(record)):
            reply = _read_reply(root, request.name)
            if reply is not None and reply.port:
                return
            _forget(root, request.name)
            if reply is not None and reply.is_missing:
                raise make_missing_program_failure(request.name)
            if reply is not None and reply.is_port_taken:
                raise make_port_failure(request.name, get_port(request))
            raise make_service_failure(root, request.name, "exited right after its start")
        if time.monotonic() >= deadline_s:
            _stop_step(record)
            _forget(root, request.name)
            raise make_service_failure(root, request.name, f"did not answer within {limit_s:g} s")
        time.sleep(POLL_S)


def _read_reply(root: Path, name: str) -> ServiceStepReply | None:
    """Read from the log what the step said of its port; None if it said nothing yet."""
    text = find_service_log(root, name).read_text(errors="replace")
    line = text[text.find(MARK) + len(MARK) :].split("\n", 1)[0] if MARK in text else ""
    try:
        return decode(ServiceStepReply, line) if line.endswith("}") else None
    except MessageError:
        return None


def _describe(root: Path, name: str, record: JobServiceRecord, *, running: bool) -> ServiceRecord:
    reply = _read_reply(root, name)
    return ServiceRecord(
        name=name,
        port=reply.port if reply else 0,
        socket="",
        token=read_text(find_token(root, name)) if name == "jupyter" else "",
        path=KNOWN[name].path if name in KNOWN else "/",
        container="",
        running=running,
    )


def _read(root: Path, name: str) -> JobServiceRecord | None:
    return read_record(JobServiceRecord, find_service_record(root, name))


def _read_live(root: Path, name: str) -> JobServiceRecord | None:
    record = _read(root, name)
    return record if record and _is_live(record) else None


def _is_live(record: JobServiceRecord) -> bool:
    return any(step.name == record.step for step in slurm_queue.list_steps())


def _stop_step(record: JobServiceRecord) -> None:
    """Cancel a step, and wait for its end: its port is free then. Failure if it does not end."""
    deadline_s = time.monotonic() + ENDS_WITHIN_S
    while time.monotonic() < deadline_s:
        steps = [step for step in slurm_queue.list_steps() if step.name == record.step]
        if not steps:
            return
        slurm_queue.call(slurm_commands.build_cancel_words(steps[0].id))
        time.sleep(1)
    name = record.step[len(STEP) + 1 :].rpartition("-")[0]
    what = f"the service {name} has not ended within {ENDS_WITHIN_S:g} s"
    why = f"Slurm still has its step in job {record.job_id}"
    raise Failure("service", what, why, f"labctl cancel {record.run}   # ends its job")


def _forget(root: Path, name: str) -> None:
    """Remove the record of a service and its token; the next start makes another one."""
    for path in (find_service_record(root, name), find_token(root, name)):
        if path.exists():
            path.unlink()
