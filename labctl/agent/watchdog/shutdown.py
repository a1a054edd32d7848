"""The end of a server: runs stop and write their checkpoints, results are saved, the machine goes.

What happens to results that are only on this server, in the order of the tables' rows:

| results                                   | at the ttl or the budget | when idle             |
|-------------------------------------------|--------------------------|-----------------------|
| none, or all pulled or mirrored           | it ends                  | it ends               |
| the disk stays anyway (local, static)     | it ends                  | it ends               |
| EC2 keeps the disk (tagged with expiry)   | it ends                  | it ends               |
| a keeper brings them home in time         | it ends                  | it stays on           |
| none of these works                       | it ends: money was the   | it stays on, asks for |
|                                           | limit; the loss was told | `labctl pull`, and    |
|                                           | by `up` and each warning | looks again           |

Nothing is stopped before an idle server is known to end. Files that cannot be handed out whole (a
checkpoint cut short) count as results.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple
from urllib.parse import quote

from ..host import engine
from ..host.paths import LIMIT, age_of, home
from ..mirror.boto3_python import LACKING, find_python
from ..reply import Failure
from .activity import Account
from .mirroring import probed, send_all
from .mirroring import why_of as _why
from .saved_results import Unsaved, ask, unsaved
from .state_files import keep

# What a run has after SIGTERM, and again where it is still writing a checkpoint then.
GRACE_S = 60.0
WRITING_S = 10.0
POLL_S = 0.2
# Seconds between two looks at what a keeper has brought home.
SAVED_POLL_S = 5.0
KEPT_DAYS = 14
Say = Callable[[str, str], None]


class Plan(NamedTuple):
    """What was agreed on for the end. `disk` is "stays", "keepable" or "goes".

    `saver_s` is how long before a limit runs stop, so that a keeper can bring results home; 0
    where nobody does.
    """

    account: Account
    lab_id: str
    kind: str
    disk: str
    store: str
    lease: str
    grace_s: float
    saver_s: float = 0.0

    @property
    def every_lab(self) -> bool:
        """Whether the whole machine ends, with whatever other labs are on it."""
        return self.kind == "poweroff"


class Outcome(NamedTuple):
    """`end` False: it stays on. `rate_bytes_s` is what a mirror reached, 0.0 for none."""

    end: bool
    rate_bytes_s: float = 0.0


def fate(by: str, only_here: bool, disk_safe: bool) -> bool:
    """The table above: whether the machine ends."""
    return not only_here or disk_safe or by != "idle"


def wind_down(plan: Plan, by: str, say: Say, left_s: float = 0.0) -> Outcome:
    """All but the very end: that is `power_off` or `release`. `left_s` is until the limit."""
    until = time.monotonic() + left_s
    rate = 0.0
    if by == "idle":
        # Nothing runs, so what is saved now is all there is, and it may be a reason to stay on.
        rate, safe = _save(plan, by, say, until)
        if not safe:
            return Outcome(False, rate)
    _stop_runs(plan, by, say)
    if by != "idle":
        rate, _ = _save(plan, by, say, until)
    if plan.kind == "release":
        _stop_services(plan, say)
    return Outcome(True, rate)


def _save(plan: Plan, by: str, say: Say, until: float) -> tuple[float, bool]:
    """Mirror what is only here, else see to the disk; (bytes a second, whether it may end)."""
    try:
        left = unsaved(plan.account, plan.lab_id, plan.every_lab)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("results unknown", f"what is only here cannot be told: {_why(error)}")
        left = Unsaved([], [f"what is only here cannot be told: {_why(error)}"])
    rate = 0.0
    if plan.store:
        rate, left = send(plan, left, say)
    if by != "idle" and plan.saver_s and plan.disk != "stays":
        left = _await_keeper(plan, left, say, until)
    only_here = bool(left.files or left.broken)
    if not only_here:
        say("results saved", "everything is pulled or mirrored")
        return rate, True
    told = f"{len(left.files) + len(left.broken)} files, {left.size} bytes, are only on this server"
    safe = plan.disk == "stays" or (plan.disk == "keepable" and _keep_disk(say))
    if safe:
        say("disk kept", told)
    elif fate(by, only_here, safe):
        say("results lost", f"{told}; its disk cannot be kept and the {by} is spent")
    else:
        say("staying on", f"{told}, and its disk cannot be kept: labctl pull, or labctl down")
    return rate, fate(by, only_here, safe)


def _await_keeper(plan: Plan, left: Unsaved, say: Say, until: float) -> Unsaved:
    """Wait until a keeper has brought home what is only here, at most until the limit."""
    if (left.files or left.broken) and time.monotonic() < until:
        say("waiting for the keeper", f"{len(left.files)} files, {left.size} bytes, are only here")
    while (left.files or left.broken) and time.monotonic() < until:
        time.sleep(min(SAVED_POLL_S, max(0.0, until - time.monotonic())))
        try:
            left = unsaved(plan.account, plan.lab_id, plan.every_lab)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            say("results unknown", f"what is only here cannot be told: {_why(error)}")
    return left


def send(plan: Plan, left: Unsaved, say: Say) -> tuple[float, Unsaved]:
    """To the store; (bytes a second, what could not be sent)."""
    rate = send_all(plan.account, plan.lab_id, plan.every_lab, say)
    try:
        return rate, unsaved(plan.account, plan.lab_id, plan.every_lab)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("results unknown", f"what is only here cannot be told: {_why(error)}")
        return rate, left


def _keep_disk(say: Say) -> bool:
    """By EC2's leave, which the server asks for itself."""
    python = find_python()
    if not python:
        say("disk not kept", LACKING)
        return False
    wish = {"expires": time.time() + KEPT_DAYS * 86400}
    try:
        done = ask(Account(os.geteuid(), os.getegid()), "keep-disk", wish, python)
    except (Failure, OSError, subprocess.SubprocessError) as error:
        say("disk not kept", _why(error))
        return False
    say("disk kept", f"{', '.join(done['volumes'])} for {KEPT_DAYS} days")
    return True


def unable(plan: Plan) -> list[str]:
    """What could not be saved at the end, in sentences, tried out beforehand. [] is all well."""
    cannot = []
    if plan.store:
        try:
            probed(plan.account, plan.lab_id)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            cannot.append(f"results cannot go to {plan.store}: {_why(error)}")
    if plan.disk == "keepable":
        try:
            python = find_python()
            if not python:
                raise Failure("denied", LACKING)
            ask(plan.account, "keep-disk", {"expires": time.time(), "probe": True}, python)
        except (Failure, OSError, subprocess.SubprocessError) as error:
            cannot.append(f"the disk cannot outlive this server: {_why(error)}")
    if plan.disk == "goes" and not plan.saver_s:
        cannot.append("the disk ends with the server: pull what you want to keep")
    return cannot


def running(label: str, lab_id: str = "") -> list[dict[str, Any]]:
    """Containers that run and have this label, as the engine lists them."""
    if not shutil.which("docker"):
        return []
    labels = [label, *([f"labctl.lab-id={lab_id}"] if lab_id else [])]
    filters = quote(json.dumps({"label": labels}))
    found: list[dict[str, Any]] = json.loads(
        engine.ask("GET", f"/containers/json?filters={filters}")
    )
    return found


def live_runs(plan: Plan) -> list[str]:
    """Ids of the runs that the end will stop; none where the engine does not say."""
    try:
        found = running("labctl.run", "" if plan.every_lab else plan.lab_id)
    except (Failure, OSError, ValueError):
        return []
    return [one["Labels"]["labctl.run"] for one in found]


def _stop_runs(plan: Plan, by: str, say: Say) -> None:
    """SIGTERM to every run at once; each may finish the checkpoint that it writes."""
    try:
        found = running("labctl.run", "" if plan.every_lab else plan.lab_id)
    except Failure as failure:
        say("runs not stopped", failure.body["what"])
        return
    if not found:
        return
    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(lambda one: _stop_run(one, plan, by, say), found))


def _stop_run(container: dict[str, Any], plan: Plan, by: str, say: Say) -> None:
    run, began = container["Labels"]["labctl.run"], time.monotonic()
    mounts = {one["Destination"]: one.get("Source", "") for one in container["Mounts"]}
    # Before it is asked: nobody may take its end for its own doing, or go on with it unasked.
    keep(Path(mounts["/lab/run"]) / ".labctl", LIMIT, {"by": by, "at": time.time()})
    with suppress(engine.Refused):
        engine.ask("POST", f"/containers/{container['Id']}/kill?signal=SIGTERM")
    until = began + plan.grace_s
    last = until + plan.grace_s
    while _lives(container["Id"]):
        now = time.monotonic()
        if now > until and (now > last or not _writes_checkpoint(run)):
            with suppress(engine.Refused):
                engine.ask("POST", f"/containers/{container['Id']}/kill?signal=SIGKILL")
            say("run killed", f"{run} had not ended {now - began:.0f} s after SIGTERM")
            return
        time.sleep(POLL_S)
    say("run stopped", f"{run} ended {time.monotonic() - began:.1f} s after SIGTERM")


def _lives(container: str) -> bool:
    try:
        said = json.loads(engine.ask("GET", f"/containers/{container}/json"))
    except engine.Refused:
        return False
    return bool(said["State"]["Running"])


def _writes_checkpoint(run: str) -> bool:
    """Whether a file of its checkpoints was written just now, and its manifest is not there yet."""
    for top in home().glob(f"*/runs/{run}/checkpoints"):
        for folder, _, names in os.walk(top):
            times = [_written(Path(folder) / name) for name in names if name != "manifest.json"]
            done = _written(Path(folder) / "manifest.json")
            if times and age_of(max(times)) < WRITING_S and done < max(times):
                return True
    return False


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _stop_services(plan: Plan, say: Say) -> None:
    """A machine that goes back to others keeps nothing of ours running."""
    with suppress(Failure):
        for one in running("labctl.service", plan.lab_id):
            with suppress(engine.Refused):
                engine.ask("POST", f"/containers/{one['Id']}/stop?t=10")
            say("service stopped", one["Labels"]["labctl.service"])
