"""The end of a server: runs stop and write their checkpoints, results are saved, the machine ends.

What happens to results that exist only on this server, by the first row that applies:

| results                                   | at the ttl or the budget | when idle             |
|-------------------------------------------|--------------------------|-----------------------|
| none, or all pulled or mirrored           | it ends                  | it ends               |
| the disk stays anyway (local, static)     | it ends                  | it ends               |
| EC2 keeps the disk (tagged with expiry)   | it ends                  | it ends               |
| a keeper downloads them in time           | it ends                  | it stays on           |
| none of these works                       | it ends: money was the   | it stays on, asks for |
|                                           | limit; `up` and every    | `labctl pull`, and    |
|                                           | warning announced it     | checks again          |

Nothing is stopped before it is certain that an idle server ends. Incomplete files (a checkpoint cut
short) count as results.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Callable, NamedTuple

from ...wire.runs import DOCKER, PROCESS, LimitRecord
from ...wire.watchdog import KEEP_DISK, KeepDiskRequest
from ..host import engine
from ..host.engine_objects import ContainerRow
from ..host.paths import LIMIT, compute_age_s, labctl_home
from ..mirror.boto3_python import LACKING, find_python
from ..reply import Failure
from ..runs import process_services
from ..runs.executor import Executor, LiveAttempt
from ..runs.executors import get_executor
from .activity import LabAccount
from .mirroring import error_text as _why
from .mirroring import probe_store, send_all
from .saved_results import Unsaved, call_verb, list_unsaved
from .state_files import write_state

# seconds that a run has after SIGTERM, and again if it is still writing a checkpoint then
GRACE_S = 60.0
WRITING_S = 10.0
POLL_S = 0.2
# seconds between two checks of what a keeper has downloaded
SAVED_POLL_S = 5.0
KEPT_DAYS = 14
Say = Callable[[str, str], None]


class ShutdownPlan(NamedTuple):
    """How the server ends. `disk` is "stays", "keepable" or "goes".

    `saver_s` is how many seconds before a limit runs stop, so that a keeper can download results;
    0 without a keeper.
    """

    account: LabAccount
    lab_id: str
    kind: str
    disk: str
    store: str
    lease: str
    grace_s: float
    saver_s: float = 0.0

    @property
    def every_lab(self) -> bool:
        """Whether the whole machine ends, with all labs on it."""
        return self.kind == "poweroff"


class WindDownOutcome(NamedTuple):
    """The result of a wind-down. `end` False: the server stays on.

    `rate_bytes_s` is the speed that a mirror reached, 0.0 without one.
    """

    end: bool
    rate_bytes_s: float = 0.0


def should_end(by: str, only_here: bool, disk_safe: bool) -> bool:
    """Return whether the machine ends, by the table above."""
    return not only_here or disk_safe or by != "idle"


def wind_down(plan: ShutdownPlan, by: str, say: Say, left_s: float = 0.0) -> WindDownOutcome:
    """Stop runs and save results, `left_s` seconds before the limit.

    The last step is `power_off` or `release`.
    """
    until = time.monotonic() + left_s
    rate = 0.0
    if by == "idle":
        # Nothing runs, so no more results will come; unsaved ones are a reason to stay on.
        rate, safe = _save(plan, by, say, until)
        if not safe:
            return WindDownOutcome(False, rate)
    _stop_runs(plan, by, say)
    if by != "idle":
        rate, _ = _save(plan, by, say, until)
    if plan.kind == "release":
        _stop_services(plan, say)
    return WindDownOutcome(True, rate)


def _save(plan: ShutdownPlan, by: str, say: Say, until: float) -> tuple[float, bool]:
    """Mirror results that exist only here, else keep the disk.

    Returns (bytes a second, whether the server may end).
    """
    try:
        remaining = list_unsaved(plan.account, plan.lab_id, plan.every_lab)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("results unknown", f"cannot determine which results exist only here: {_why(error)}")
        remaining = Unsaved([], [f"cannot determine which results exist only here: {_why(error)}"])
    rate = 0.0
    if plan.store:
        rate, remaining = send_to_store(plan, remaining, say)
    if by != "idle" and plan.saver_s and plan.disk != "stays":
        remaining = _await_keeper(plan, remaining, say, until)
    only_here = bool(remaining.files or remaining.broken)
    if not only_here:
        say("results saved", "everything is pulled or mirrored")
        return rate, True
    count = len(remaining.files) + len(remaining.broken)
    summary = f"{count} files, {remaining.size} bytes, exist only on this server"
    is_disk_safe = plan.disk == "stays" or (plan.disk == "keepable" and _keep_disk(say))
    if is_disk_safe:
        say("disk kept", summary)
    elif should_end(by, only_here, is_disk_safe):
        say("results lost", f"{summary}; its disk cannot be kept, and the {by} limit is reached")
    else:
        why = f"{summary}, and its disk cannot be kept. To save them: labctl pull"
        say("staying on", why)
    return rate, should_end(by, only_here, is_disk_safe)


def _await_keeper(plan: ShutdownPlan, remaining: Unsaved, say: Say, until: float) -> Unsaved:
    """Wait until a keeper has downloaded what exists only here, at most until the limit."""
    if (remaining.files or remaining.broken) and time.monotonic() < until:
        why = f"{len(remaining.files)} files, {remaining.size} bytes, exist only here"
        say("waiting for the keeper", why)
    while (remaining.files or remaining.broken) and time.monotonic() < until:
        time.sleep(min(SAVED_POLL_S, max(0.0, until - time.monotonic())))
        try:
            remaining = list_unsaved(plan.account, plan.lab_id, plan.every_lab)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            say("results unknown", f"cannot determine which results exist only here: {_why(error)}")
    return remaining


def send_to_store(plan: ShutdownPlan, before: Unsaved, say: Say) -> tuple[float, Unsaved]:
    """Send results to the store; return (bytes a second, what could not be sent)."""
    rate = send_all(plan.account, plan.lab_id, plan.every_lab, say)
    try:
        return rate, list_unsaved(plan.account, plan.lab_id, plan.every_lab)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("results unknown", f"cannot determine which results exist only here: {_why(error)}")
        return rate, before


def _keep_disk(say: Say) -> bool:
    """Ask EC2 to keep the disk, with the server's own credentials."""
    python = find_python()
    if not python:
        say("disk not kept", LACKING)
        return False
    request = KeepDiskRequest(expires=time.time() + KEPT_DAYS * 86400)
    try:
        kept = call_verb(LabAccount(os.geteuid(), os.getegid()), KEEP_DISK, request, python)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("disk not kept", _why(error))
        return False
    say("disk kept", f"{', '.join(kept.volumes)} for {KEPT_DAYS} days")
    return True


def find_unsavable(plan: ShutdownPlan) -> list[str]:
    """Test what could not be saved at the end; return sentences, [] if all is well."""
    problems = []
    if plan.store:
        try:
            probe_store(plan.account, plan.lab_id)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            reason = error.report.why if isinstance(error, Failure) else ""
            problems.append(f"results cannot be sent to {plan.store}: {reason or _why(error)}")
    if plan.disk == "keepable":
        try:
            python = find_python()
            if not python:
                raise Failure("denied", LACKING)
            call_verb(plan.account, KEEP_DISK, KeepDiskRequest(time.time(), probe=True), python)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            problems.append(f"the disk cannot be kept after this server: {_why(error)}")
    if plan.disk == "goes" and not plan.saver_s:
        problems.append("The disk is deleted with the server. Run labctl pull first.")
    return problems


def list_running_containers(label: str, lab_id: str = "") -> list[ContainerRow]:
    """Return the running containers with this label."""
    if not shutil.which("docker"):
        return []
    labels = [label, *([f"labctl.lab-id={lab_id}"] if lab_id else [])]
    return engine.list_containers(*labels)


def list_live_runs(plan: ShutdownPlan) -> list[str]:
    """Return the ids of the runs that the end will stop; [] if the engine does not answer."""
    try:
        return [attempt.run for attempt in list_live_attempts(plan)]
    except (Failure, OSError, ValueError):
        return []


def list_live_attempts(plan: ShutdownPlan) -> list[LiveAttempt]:
    """List the attempts that run, of the plan's lab or of all labs."""
    lab_id = "" if plan.every_lab else plan.lab_id
    containers = get_executor(DOCKER).list_live(lab_id) if shutil.which("docker") else []
    return [*containers, *get_executor(PROCESS).list_live(lab_id)]


def _stop_runs(plan: ShutdownPlan, by: str, say: Say) -> None:
    """Send SIGTERM to every run at once; each may finish the checkpoint that it is writing."""
    try:
        attempts = list_live_attempts(plan)
    except Failure as failure:
        say("runs not stopped", failure.report.what)
        return
    if not attempts:
        return
    with ThreadPoolExecutor(len(attempts)) as pool:
        list(pool.map(lambda attempt: _stop_run(attempt, plan, by, say), attempts))


def _stop_run(attempt: LiveAttempt, plan: ShutdownPlan, by: str, say: Say) -> None:
    run, began_s = attempt.run, time.monotonic()
    executor = get_executor(attempt.executor)
    # Written before the signal: the run's end must not look like its own, nor be resumed.
    write_state(attempt.directory / ".labctl", LIMIT, LimitRecord(by, time.time()))
    executor.send_signal(attempt.name, signal.SIGTERM)
    deadline_s = began_s + plan.grace_s
    last_s = deadline_s + plan.grace_s
    while _is_running(executor, attempt.name):
        now_s = time.monotonic()
        if now_s > deadline_s and (now_s > last_s or not _is_writing_checkpoint(run)):
            executor.send_signal(attempt.name, signal.SIGKILL)
            say("run killed", f"{run} had not ended {now_s - began_s:.0f} s after SIGTERM")
            return
        time.sleep(POLL_S)
    say("run stopped", f"{run} ended {time.monotonic() - began_s:.1f} s after SIGTERM")


def _is_running(executor: Executor, name: str) -> bool:
    program = executor.inspect([name]).get(name)
    return program is not None and program.status == "running"


def _is_writing_checkpoint(run: str) -> bool:
    """Return whether a checkpoint file was written just now and its manifest is not there yet."""
    for top in labctl_home().glob(f"*/runs/{run}/checkpoints"):
        for folder, _, names in os.walk(top):
            times = [_get_mtime(Path(folder) / name) for name in names if name != "manifest.json"]
            manifest_time = _get_mtime(Path(folder) / "manifest.json")
            if times and compute_age_s(max(times)) < WRITING_S and manifest_time < max(times):
                return True
    return False


def _get_mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stop_services(plan: ShutdownPlan, say: Say) -> None:
    """Stop the lab's services: a machine that goes back to others keeps nothing running."""
    with suppress(Failure, OSError, ValueError):  # its records are files of the account
        for name in process_services.stop_lab_services(plan.lab_id):
            say("service stopped", name)
    with suppress(Failure):
        for container in list_running_containers("labctl.service", plan.lab_id):
            with suppress(engine.EngineRequestError):
                engine.call("POST", f"/containers/{container.Id}/stop?t=10")
            say("service stopped", container.labels["labctl.service"])
