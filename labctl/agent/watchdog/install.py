"""The verbs that change the watchdog: `guard` arms it, `extend` gives it more time.

Where the server ends by powering off, it runs as root (through sudo without a password, where there
is that), as a systemd unit where systemd is: no `pkill python` and no full memory ends it. Shared
machines, which are only released, run it as the person's own account and need no root.
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

from ..host.background import ask_to_linger, scope_words
from ..host.paths import read_json, write_json, write_text
from ..host.sudo import account, as_root, may_sudo
from ..program import PROGRAM
from ..reply import Failure
from .boot_timer import FILE
from .decisions import HOUR_AHEAD_S, budget_left, carried, refusal, spoken
from .limits import Told
from .state_files import (
    ROOT_DIR,
    Lock,
    alone,
    boot_id,
    boottime_s,
    decided,
    found_dir,
    made,
    own_dir,
    shown,
)
from .systemd_unit import ensure_unit
from .wakeup import ring

DEADLINE_S = 15.0
POLL_S = 0.02
DECISIONS = 5


def guard(request: dict[str, Any]) -> dict[str, Any]:
    """Write the limits, have a watchdog of this version run, and reply once it has ticked.

    Repeated, it changes what has changed. Time that has gone by stays gone, and so does a budget:
    see watch_clocks.budget_left. A server with another id starts afresh.
    """
    request = {**request, **account(request)}
    if request["ending"]["kind"] == "poweroff" and os.geteuid() != 0 and may_sudo():
        return as_root("guard", request)
    place = made(own_dir())
    with alone(place):
        body = _merged(read_json(place / "limits.json"), request)
        write_json(place / "limits.json", body, 0o644 if os.geteuid() == 0 else 0o600)
        program = _installed(place)
        is_current = _ensure(place, program)
        if is_current:
            _remove_earlier(place, program)
    version = program.name if is_current else ""
    return {"watch": _ticked(place, body["edition"], version)}


def extend(request: dict[str, Any]) -> dict[str, Any]:
    """Move the deadline by "span_s", and keep idleness away for so long.

    Failure "policy" beyond the ceiling or the budget, and once the end has begun.
    """
    place = found_dir(request["lab_id"])
    if place is None:
        if FILE.exists():
            why = "an interrupted `labctl up` has not armed it; the first boot's timer goes on"
            raise Failure("missing", "no watchdog runs on this server yet", why, "labctl up")
        raise Failure(
            "missing",
            "nothing guards this server, so nothing ends it",
            "",
            "labctl up --ttl 8h   # or --idle 30m, --budget 5: then it has a watchdog",
        )
    if place == ROOT_DIR and os.geteuid() != 0:
        return as_root("extend", request)
    span_s = float(request["span_s"])
    with alone(place):
        told = Told(place)
        told.changed()  # it leaves out limits that only a newer labctl knows; the file keeps them
        body, limits = told.body, told.limits
        now = shown(place, True, 0)
        why = "it is ending at this moment" if now.get("ending") else ""
        why = why or refusal(limits, span_s)
        if why:
            decided(place, now.get("elapsed_s", 0.0), "extension refused", why)
            raise Failure("policy", f"no {spoken(span_s)} more", why, "labctl status --why")
        until = max(limits.held_until_s, now["elapsed_s"] + span_s)
        changed = {"extended_s": limits.extended_s + span_s, "held_until_s": until}
        body["limits"] = {**body["limits"], **changed}
        body["edition"] += 1
        write_json(place / "limits.json", body, 0o644 if os.geteuid() == 0 else 0o600)
        decided(place, now["elapsed_s"], f"extended by {spoken(span_s)}", "somebody asked")
    return {"watch": _ticked(place, body["edition"], "")}


def _merged(known: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    """limits.json: what is asked for now, with what must not be forgotten of before."""
    asked = request["limits"]
    edition = int(known.get("edition") or 0) + 1
    if known.get("server_id") != request["server_id"]:
        known = {}
    before = known.get("limits", {})
    asked = _with_given(known, before, asked)
    boot, now, wall = boot_id(), boottime_s(), time.time()
    elapsed = float(request.get("elapsed_s") or 0.0)
    if known:
        elapsed = max(elapsed, carried(known["age"], boot, now, wall))
    limits = {
        "ttl_s": asked.get("ttl_s"),
        "idle_s": asked.get("idle_s"),
        "budget_usd": budget_left({**known, **before}, asked),
        "price_usd_per_hour": float(asked.get("price_usd_per_hour") or 0.0),
        "ceiling_s": asked.get("ceiling_s") or before.get("ceiling_s"),
        "extended_s": before.get("extended_s", 0.0),
        "from_s": _ttl_start_s(before, asked, elapsed),
        "held_until_s": before.get("held_until_s", 0.0),
    }
    return {
        "edition": edition,
        **{key: request[key] for key in ("lab", "lab_id", "server_id", "uid", "gid", "home")},
        "limits": limits,
        "budget_whole_usd": asked.get("budget_whole_usd"),
        "age": {"boot": boot, "boottime_s": now, "wall_s": wall, "elapsed_s": elapsed},
        "ending": _ending(request),
        "store": request.get("store") or "",
        "mirror_s": request.get("mirror_s") or 0,
    }


def _with_given(
    known: dict[str, Any], before: dict[str, Any], asked: dict[str, Any]
) -> dict[str, Any]:
    """What is asked for. A default counts only where nobody has given this server a limit: an `up`
    that repeats none of its options neither ends it early nor takes its budget away."""
    given = {key: before[key] for key in ("ttl_s", "budget_usd") if before.get(key) is not None}
    if not (asked.get("ttl_is_default") and given):
        return asked
    return {**asked, "ttl_s": None, "budget_whole_usd": known.get("budget_whole_usd"), **given}


def _ttl_start_s(before: dict[str, Any], asked: dict[str, Any], elapsed_s: float) -> float:
    """When the ttl began (elapsed). A default one begins now on a server that had none so far:
    nobody who started it could know of a limit that is over already, or within the hour."""
    had_none = bool(before) and before.get("ttl_s") is None
    is_near = not before and elapsed_s + HOUR_AHEAD_S >= float(asked.get("ttl_s") or 0.0)
    if asked.get("ttl_is_default") and (had_none or is_near):
        return elapsed_s
    return float(before.get("from_s") or 0.0)


def _ending(request: dict[str, Any]) -> dict[str, Any]:
    ending = dict(request["ending"])
    if "disk" not in ending:
        ending["disk"] = "keepable" if request.get("keep_disk") else "stays"
    return ending


def _installed(place: Path) -> Path:
    """A copy of this program that no clean-up of a home takes away."""
    source = PROGRAM
    target = place / source.name
    if not target.is_dir():
        fresh = place / f".new-{os.getpid()}"
        shutil.copytree(source, fresh, ignore=shutil.ignore_patterns("__pycache__"))
        for path in (fresh, *fresh.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)  # the lab's account runs it too
        fresh.rename(target)
    return target


def _remove_earlier(place: Path, program: Path) -> None:
    for earlier in place.glob("remote-*"):
        if earlier != program:
            shutil.rmtree(earlier, ignore_errors=True)


def _ensure(place: Path, program: Path) -> bool:
    """Have a watchdog of this program run; False where one of another version goes on for now."""
    if os.geteuid() == 0 and Path("/run/systemd/system").is_dir() and shutil.which("systemctl"):
        return ensure_unit(place, program)
    lock = Lock(place)
    pid = lock.holder()
    if pid and read_json(place / "status.json").get("version") == program.name:
        ring(place)
        return True
    if pid:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _until(lambda: not lock.holder(), "the earlier watchdog does not end")
    _spawn(place, program)
    return True


def start_script(place: Path, program: Path) -> str:
    """Starts the watchdog, and starts it again when it dies; ends when it has nothing to do."""
    log = place / "watchdog.log"
    return f"""#!/bin/sh
# Written by labctl. An init without systemd may run this at boot.
exec </dev/null >{log} 2>&1
while [ -f {program}/__main__.py ]; do
  {sys.executable} {program} watchdog {place} && break
  sleep 1
done
"""


def _spawn(place: Path, program: Path) -> None:
    """A process of its own session and scope, which a logout and a killed client leave alone."""
    script = place / "start"
    write_text(script, start_script(place, program), 0o755)
    ask_to_linger()
    subprocess.Popen(
        [*scope_words(), str(script)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
    )
    _until(lambda: bool(Lock(place).holder()), "the watchdog does not start")


def _ticked(place: Path, edition: int, version: str) -> dict[str, Any]:
    """W, once the watchdog has taken this edition of the limits."""

    def seen() -> bool:
        body = read_json(place / "status.json")
        return body.get("edition") == edition and version in ("", body.get("version"))

    ring(place)
    _until(seen, "the watchdog does not tick")
    # What cannot be saved may have to be asked of a cloud; whoever calls wants to be told.
    with suppress(Failure):
        _until(lambda: read_json(place / "status.json").get("cannot") is not None, "")
    return shown(place, bool(Lock(place).holder()), DECISIONS)


def _until(condition: Callable[[], bool], said: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            log = own_dir() / "watchdog.log"
            why = log.read_text(errors="replace")[-1000:] if log.exists() else ""
            raise Failure("server", said, why, "labctl doctor")
        time.sleep(POLL_S)
