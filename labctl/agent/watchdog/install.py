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
from typing import Any, Callable

from ..host.background import ask_to_linger, build_scope_words
from ..host.paths import read_json, write_json, write_text
from ..host.sudo import can_sudo, describe_account, run_as_root
from ..program import PROGRAM
from ..reply import Failure
from .boot_timer import FILE
from .decisions import HOUR_AHEAD_S, carry_elapsed_s, explain_refusal, limit_budget, span_text
from .limits import LimitsFile
from .state_files import (
    ROOT_DIR,
    Lock,
    ensure_directory,
    find_directory,
    lock_limits,
    own_directory,
    read_boot_id,
    read_boottime_s,
    read_status,
    record_decision,
)
from .systemd_unit import ensure_unit
from .wakeup import wake_watchdog

DEADLINE_S = 15.0
POLL_S = 0.02
DECISIONS = 5


def guard(request: dict[str, Any]) -> dict[str, Any]:
    """Write the limits, start a watchdog of this version, and reply once it has ticked.

    A repeated call changes only what is different. Elapsed time stays elapsed, and a spent budget
    spent: see decisions.budget_left. A server with another id starts with a new record.
    """
    request = {**request, **describe_account(request)}
    if request["ending"]["kind"] == "poweroff" and os.geteuid() != 0 and can_sudo():
        return run_as_root("guard", request)
    directory = ensure_directory(own_directory())
    with lock_limits(directory):
        body = _merge_limits(read_json(directory / "limits.json"), request)
        write_json(directory / "limits.json", body, 0o644 if os.geteuid() == 0 else 0o600)
        program = _install_program(directory)
        is_current = _ensure_watchdog(directory, program)
        if is_current:
            _remove_earlier(directory, program)
    version = program.name if is_current else ""
    return {"watch": _wait_for_tick(directory, body["edition"], version)}


def extend(request: dict[str, Any]) -> dict[str, Any]:
    """Move the deadline by "span_s", and suspend the idle limit for as long.

    Failure (policy) beyond the ceiling or the budget, and once the end has begun.
    """
    directory = find_directory(request["lab_id"])
    if directory is None:
        if FILE.exists():
            why = "an interrupted `labctl up` has not armed it; the first boot's timer still runs"
            raise Failure("missing", "no watchdog runs on this server yet", why, "labctl up")
        raise Failure(
            "missing",
            "this server has no watchdog, so it has no deadline to extend",
            "",
            "labctl up --ttl 8h   # or --idle 30m, --budget 5",
        )
    if directory == ROOT_DIR and os.geteuid() != 0:
        return run_as_root("extend", request)
    span_s = float(request["span_s"])
    with lock_limits(directory):
        limits_file = LimitsFile(directory)
        limits_file.reload()  # skips limits that only a newer labctl knows; `body` keeps them
        body, limits = limits_file.body, limits_file.limits
        status = read_status(directory, True, 0)
        why = "the server is already ending" if status.get("ending") else ""
        why = why or explain_refusal(limits, span_s)
        if why:
            record_decision(directory, status.get("elapsed_s", 0.0), "extension refused", why)
            what = f"Cannot extend by {span_text(span_s)}."
            raise Failure("policy", what, why, "labctl status --why")
        held_until_s = max(limits.held_until_s, status["elapsed_s"] + span_s)
        changes = {"extended_s": limits.extended_s + span_s, "held_until_s": held_until_s}
        body["limits"] = {**body["limits"], **changes}
        body["edition"] += 1
        write_json(directory / "limits.json", body, 0o644 if os.geteuid() == 0 else 0o600)
        record_decision(
            directory, status["elapsed_s"], f"extended by {span_text(span_s)}", "labctl extend"
        )
    return {"watch": _wait_for_tick(directory, body["edition"], "")}


def _merge_limits(recorded: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """Return limits.json: the requested limits with what must be kept of the previous ones."""
    requested = request["limits"]
    edition = int(recorded.get("edition") or 0) + 1
    if recorded.get("server_id") != request["server_id"]:
        recorded = {}
    previous = recorded.get("limits", {})
    requested = _keep_given_limits(recorded, previous, requested)
    boot, now, wall = read_boot_id(), read_boottime_s(), time.time()
    elapsed = float(request.get("elapsed_s") or 0.0)
    if recorded:
        elapsed = max(elapsed, carry_elapsed_s(recorded["age"], boot, now, wall))
    limits = {
        "ttl_s": requested.get("ttl_s"),
        "idle_s": requested.get("idle_s"),
        "budget_usd": limit_budget({**recorded, **previous}, requested),
        "price_usd_per_hour": float(requested.get("price_usd_per_hour") or 0.0),
        "ceiling_s": requested.get("ceiling_s") or previous.get("ceiling_s"),
        "extended_s": previous.get("extended_s", 0.0),
        "from_s": _ttl_start_s(previous, requested, elapsed),
        "held_until_s": previous.get("held_until_s", 0.0),
    }
    return {
        "edition": edition,
        **{key: request[key] for key in ("lab", "lab_id", "server_id", "uid", "gid", "home")},
        "limits": limits,
        "budget_whole_usd": requested.get("budget_whole_usd"),
        "age": {"boot": boot, "boottime_s": now, "wall_s": wall, "elapsed_s": elapsed},
        "ending": _read_ending(request),
        "store": request.get("store") or "",
        "mirror_s": request.get("mirror_s") or 0,
    }


def _keep_given_limits(
    recorded: dict[str, Any], previous: dict[str, Any], requested: dict[str, Any]
) -> dict[str, Any]:
    """Return the requested limits, but do not let a default replace limits that a person gave.

    So an `up` without its earlier options neither ends the server early nor removes its budget.
    """
    given_limits = {
        key: previous[key] for key in ("ttl_s", "budget_usd") if previous.get(key) is not None
    }
    if not (requested.get("ttl_is_default") and given_limits):
        return requested
    return {
        **requested,
        "ttl_s": None,
        "budget_whole_usd": recorded.get("budget_whole_usd"),
        **given_limits,
    }


def _ttl_start_s(previous: dict[str, Any], requested: dict[str, Any], elapsed_s: float) -> float:
    """Return the elapsed time at which the ttl began.

    A default ttl begins now on a server that had none so far: the person who started it could not
    know of a limit that has passed already, or ends within the hour.
    """
    had_no_ttl = bool(previous) and previous.get("ttl_s") is None
    is_near = not previous and elapsed_s + HOUR_AHEAD_S >= float(requested.get("ttl_s") or 0.0)
    if requested.get("ttl_is_default") and (had_no_ttl or is_near):
        return elapsed_s
    return float(previous.get("from_s") or 0.0)


def _read_ending(request: dict[str, Any]) -> dict[str, Any]:
    ending = dict(request["ending"])
    if "disk" not in ending:
        ending["disk"] = "keepable" if request.get("keep_disk") else "stays"
    return ending


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


def _remove_earlier(directory: Path, program: Path) -> None:
    for earlier in directory.glob("remote-*"):
        if earlier != program:
            shutil.rmtree(earlier, ignore_errors=True)


def _ensure_watchdog(directory: Path, program: Path) -> bool:
    """Have a watchdog of this program run; False if another version keeps running for now."""
    if os.geteuid() == 0 and Path("/run/systemd/system").is_dir() and shutil.which("systemctl"):
        return ensure_unit(directory, program)
    lock = Lock(directory)
    pid = lock.holder()
    if pid and read_json(directory / "status.json").get("version") == program.name:
        wake_watchdog(directory)
        return True
    if pid:
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


def _wait_for_tick(directory: Path, edition: int, version: str) -> dict[str, Any]:
    """Wait until the watchdog has read this edition of the limits; return its status."""

    def has_ticked() -> bool:
        body = read_json(directory / "status.json")
        return body.get("edition") == edition and version in ("", body.get("version"))

    wake_watchdog(directory)
    _wait_until(has_ticked, "the watchdog did not read its new limits")
    # It may take a request to the cloud to find what cannot be saved; the caller reports that.
    with suppress(Failure):
        _wait_until(lambda: read_json(directory / "status.json").get("cannot") is not None, "")
    return read_status(directory, bool(Lock(directory).holder()), DECISIONS)


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            log = own_directory() / "watchdog.log"
            why = log.read_text(errors="replace")[-1000:] if log.exists() else ""
            raise Failure("server", what, why, "labctl doctor")
        time.sleep(POLL_S)
