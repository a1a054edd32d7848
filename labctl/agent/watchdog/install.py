"""The verbs that change the watchdog: `guard` arms it, `extend` gives it more time.

On a server that ends by powering off, the watchdog runs as root (by sudo without a password, if
possible) and as a systemd unit if systemd runs: neither `pkill python` nor full memory ends it. On
shared machines, which are only released, it runs as the person's own account and needs no root.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable

from ...wire.text import duration_text
from ...wire.verbs import UP_COMMAND, HintPart
from ...wire.watchdog import (
    EXTEND,
    GUARD,
    ElapsedTimeRecord,
    ExtendRequest,
    GuardLimits,
    GuardRequest,
    LimitsRecord,
    ServerLimits,
    WatchRecord,
    WatchReply,
)
from ..host.background import ask_to_linger, build_scope_words
from ..host.paths import read_boottime_s, read_record, write_json, write_text
from ..host.sudo import call_as_root, can_sudo
from ..program import PROGRAM
from ..reply import Failure
from .boot_timer import FILE
from .decisions import (
    HOUR_AHEAD_S,
    Budget,
    carry_elapsed_s,
    explain_refusal,
    limit_budget,
)
from .limits import LimitsFile
from .state_files import (
    ROOT_DIR,
    Lock,
    encode_limits,
    ensure_directory,
    find_directory,
    lock_limits,
    own_directory,
    read_boot_id,
    read_limits,
    read_status,
    record_decision,
)
from .systemd_unit import ensure_unit
from .wakeup import wake_watchdog

DEADLINE_S = 60.0
POLL_S = 0.02
DECISIONS = 5


def guard(request: GuardRequest) -> WatchReply:
    """Write the limits, start a watchdog of this version, and reply once it has ticked.

    A repeated call changes only what is different. Elapsed time stays elapsed, and a spent budget
    spent: see decisions.budget_left. A server with another id starts with a new record.
    """
    if request.uid is None or os.geteuid() != 0:
        request = request._replace(uid=os.getuid(), gid=os.getgid(), home=str(Path.home()))
    if request.ending.kind == "poweroff" and os.geteuid() != 0 and can_sudo():
        return call_as_root(GUARD, request)
    directory = ensure_directory(own_directory())
    with lock_limits(directory):
        record = _merge_limits(read_limits(directory), request)
        write_json(directory / "limits.json", encode_limits(record), _choose_mode())
        program = _install_program(directory)
        is_current = _ensure_watchdog(directory, program)
        if is_current:
            for earlier in _list_earlier(directory, program):
                shutil.rmtree(earlier, ignore_errors=True)
    version = program.name if is_current else ""
    return WatchReply(_wait_for_tick(directory, record.edition, version))


def _choose_mode() -> int:
    """Return the mode of limits.json: everybody may read root's."""
    return 0o644 if os.geteuid() == 0 else 0o600


def extend(request: ExtendRequest) -> WatchReply:
    """Move the deadline, and suspend the idle limit for as long.

    Failure (policy) beyond the ceiling or the budget, and once the end has begun.
    """
    directory = find_directory(request.lab_id)
    if directory is None:
        if FILE.exists():
            why = "an interrupted `labctl up` has not armed it; the first boot's timer still runs"
            raise Failure("missing", "no watchdog runs on this server yet", why, UP_COMMAND)
        raise Failure(
            "missing",
            "this server has no watchdog, so it has no deadline to extend",
            "",
            HintPart("up", "--ttl 8h   # or --idle 30m, --budget 5"),
        )
    if directory == ROOT_DIR and os.geteuid() != 0:
        return call_as_root(EXTEND, request)
    span_s = request.span_s
    with lock_limits(directory):
        limits_file = LimitsFile(directory)
        limits_file.reload()
        record, limits = limits_file.record, limits_file.limits
        status = read_status(directory, True, 0)
        why = "the server is already ending" if status.ending else ""
        why = why or explain_refusal(limits, span_s)
        if why:
            record_decision(directory, status.elapsed_s, "extension refused", why)
            what = f"Cannot extend by {duration_text(span_s)}."
            raise Failure("policy", what, why, HintPart("status", "--why"))
        extended = limits._replace(
            extended_s=limits.extended_s + span_s,
            held_until_s=max(limits.held_until_s, status.elapsed_s + span_s),
        )
        record = record._replace(limits=extended, edition=record.edition + 1)
        limits_file.write(record, _choose_mode())
        record_decision(
            directory, status.elapsed_s, f"extended by {duration_text(span_s)}", "labctl extend"
        )
    return WatchReply(_wait_for_tick(directory, record.edition, ""))


def _merge_limits(recorded: LimitsRecord | None, request: GuardRequest) -> LimitsRecord:
    """Return limits.json: the requested limits with what must be kept of the previous ones."""
    edition = recorded.edition + 1 if recorded else 1
    if recorded and recorded.server_id != request.server_id:
        recorded = None
    requested = _keep_given_limits(recorded, request.limits) if recorded else request.limits
    previous = recorded.limits if recorded else ServerLimits()
    boot, now, wall = read_boot_id(), read_boottime_s(), time.time()
    elapsed_s = request.elapsed_s
    if recorded:
        elapsed_s = max(elapsed_s, carry_elapsed_s(recorded.age, boot, now, wall))
    limits = ServerLimits(
        ttl_s=requested.ttl_s,
        # Without the option of the earlier `up`, a plain `up` or `start` does not lose this guard.
        idle_s=requested.idle_s or previous.idle_s,
        budget_usd=limit_budget(
            Budget(previous.budget_usd, recorded.budget_whole_usd if recorded else None),
            Budget(requested.budget_usd, requested.budget_whole_usd),
        ),
        price_usd_per_hour=requested.price_usd_per_hour,
        ceiling_s=requested.ceiling_s or previous.ceiling_s,
        extended_s=previous.extended_s,
        from_s=_find_ttl_start_s(recorded, requested, elapsed_s),
        held_until_s=previous.held_until_s,
        stopped_s=max(previous.stopped_s, request.stopped_s),
    )
    return LimitsRecord(
        edition=edition,
        lab=request.lab,
        lab_id=request.lab_id,
        server_id=request.server_id,
        uid=os.getuid() if request.uid is None else request.uid,
        gid=request.gid,
        home=request.home,
        limits=limits,
        budget_whole_usd=requested.budget_whole_usd,
        age=ElapsedTimeRecord(boot, now, wall, elapsed_s),
        ending=request.ending,
        store=request.store,
        mirror_s=request.mirror_s,
        notices=request.notices,
    )


def _keep_given_limits(recorded: LimitsRecord, requested: GuardLimits) -> GuardLimits:
    """Return the requested limits, but do not let a default replace limits that a person gave.

    So an `up` without its earlier options neither ends the server early nor removes its budget.
    """
    previous = recorded.limits
    if not requested.ttl_is_default or (previous.ttl_s is None and previous.budget_usd is None):
        return requested
    budget_usd = requested.budget_usd if previous.budget_usd is None else previous.budget_usd
    return requested._replace(
        ttl_s=previous.ttl_s, budget_usd=budget_usd, budget_whole_usd=recorded.budget_whole_usd
    )


def _find_ttl_start_s(
    recorded: LimitsRecord | None, requested: GuardLimits, elapsed_s: float
) -> float:
    """Return the elapsed time at which the ttl began.

    A default ttl begins now on a server that had none so far: the person who started it could not
    know of a limit that has passed already, or ends within the hour.
    """
    had_no_ttl = recorded is not None and recorded.limits.ttl_s is None
    is_near = recorded is None and elapsed_s + HOUR_AHEAD_S >= (requested.ttl_s or 0.0)
    if requested.ttl_is_default and requested.ttl_s and (had_no_ttl or is_near):
        return elapsed_s
    return recorded.limits.from_s if recorded else 0.0


def _install_program(directory: Path) -> Path:
    """Copy this program to where no clean-up of a home removes it."""
    source = PROGRAM
    target = directory / source.name
    if not target.is_dir():
        fresh = directory / f".new-{os.getpid()}"
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # the lab's account runs it, too
        fresh.rename(target)
    return target


def _list_earlier(directory: Path, program: Path) -> list[Path]:
    return [earlier for earlier in directory.glob("remote-*") if earlier != program]


def _ensure_watchdog(directory: Path, program: Path) -> bool:
    """Have a watchdog of this program run; False if another version keeps running for now."""
    if os.geteuid() == 0 and Path("/run/systemd/system").is_dir() and shutil.which("systemctl"):
        return ensure_unit(directory, program)
    lock = Lock(directory)
    pid = lock.holder()
    if pid and _read_last_tick(directory).version == program.name:
        wake_watchdog(directory)
        return True
    if pid:
        # Its start script would otherwise restart it before the new one has the lock.
        for earlier in _list_earlier(directory, program):
            (earlier / "__main__.py").unlink(missing_ok=True)
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _wait_until(lambda: not lock.holder(), "the previous watchdog did not stop")
    _spawn(directory, program)
    return True


def start_script(directory: Path, program: Path) -> str:
    """Return a script that runs the watchdog and restarts it after a crash.

    It ends when the watchdog has nothing left to do.
    """
    log = directory / "watchdog.log"
    return f"""#!/bin/sh
# Written by labctl. An init without systemd may run this at boot.
exec </dev/null >{log} 2>&1
while [ -f {program}/__main__.py ]; do
  {sys.executable} {program} watchdog {directory} && break
  sleep 1
done
"""


def _spawn(directory: Path, program: Path) -> None:
    """Start it in its own session and scope, which survive a logout and a killed client."""
    script = directory / "start"
    write_text(script, start_script(directory, program), 0o755)
    ask_to_linger()
    subprocess.Popen(
        [*build_scope_words(), str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    _wait_until(lambda: bool(Lock(directory).holder()), "the watchdog did not start")


def _wait_for_tick(directory: Path, edition: int, version: str) -> WatchRecord:
    """Wait until the watchdog has read this edition of the limits; return its status."""

    def has_ticked() -> bool:
        status = _read_last_tick(directory)
        return status.edition == edition and version in ("", status.version)

    wake_watchdog(directory)
    _wait_until(has_ticked, "the watchdog did not read its new limits")
    # It may take a request to the cloud to find what cannot be saved; the caller reports that.
    with suppress(Failure):
        _wait_until(lambda: _read_last_tick(directory).cannot is not None, "")
    return read_status(directory, bool(Lock(directory).holder()), DECISIONS)


def _read_last_tick(directory: Path) -> WatchRecord:
    return read_record(WatchRecord, directory / "status.json") or WatchRecord()


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            log = own_directory() / "watchdog.log"
            why = log.read_text(errors="replace")[-1000:] if log.exists() else ""
            raise Failure("server", what, why, "labctl doctor")
        time.sleep(POLL_S)
