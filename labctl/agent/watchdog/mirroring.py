"""The mirror beside the runs: a pass every so often, at each run's beginning and end, and the last.

Passes are made by a process of the lab's own account that gives way to everything else and lives
as long as this one; see mirror.py. A store that cannot be used now is said and tried again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Callable, NamedTuple

from ..host.paths import home
from ..mirror.boto3_python import LACKING, find_python
from ..mirror.mirror import words
from ..mirror.store import config
from ..program import PROGRAM
from ..reply import MARK, Failure
from .activity import Account
from .saved_results import ask, labs

INTERVAL_S = 60.0
Say = Callable[[str, str], None]
FAILURES = (Failure, OSError, ValueError, KeyError, subprocess.SubprocessError)


class Part(NamedTuple):
    """One lab whose results are mirrored."""

    lab: str
    lab_id: str
    root: Path

    @property
    def about(self) -> dict[str, Any]:
        return {"lab": self.lab, "lab_id": self.lab_id}


class Told(NamedTuple):
    """What a mirror is told at every tick."""

    account: Account
    lab_id: str
    every: bool
    interval_s: float
    runs: frozenset[str]


def parts(lab_id: str, every: bool) -> list[Part]:
    found = [Part(*one) for one in labs(lab_id, every)]
    return [part for part in found if config(part.root).get("url")]


def why_of(error: BaseException) -> str:
    if isinstance(error, Failure):
        return " ".join(filter(None, [error.body["what"], error.body["why"]]))
    return str(error)


class Mirror:
    """`shown` is W's "mirror": {"at", "behind_bytes", "failed"}; None while nothing is mirrored."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.shown: dict[str, Any] | None = None
        self._told: Told | None = None
        self._due = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def look(self, told: Told) -> None:
        """At every tick. The first call begins; runs that began or ended are mirrored at once."""
        before, self._told = self._told, told
        if before is None:
            threading.Thread(target=self._go, daemon=True).start()
        elif before.runs != told.runs:
            self._due.set()

    def _go(self) -> None:
        while True:
            told = self._told
            assert told
            began = time.monotonic()
            try:
                self._pass(told)
            except FAILURES as error:
                self._stop()
                self._show(told, {"why": why_of(error)}, [])
            left = max(0.0, told.interval_s - (time.monotonic() - began))
            self._due.wait(left)
            self._due.clear()

    def _pass(self, told: Told) -> None:
        whole: dict[str, Any] = {"behind_bytes": 0, "why": "", "sent": 0, "bytes": 0}
        failed = []
        found = parts(told.lab_id, told.every)
        for part in found:
            reply = self._asked(told.account, part)
            for name in ("behind_bytes", "sent", "bytes"):
                whole[name] += reply[name]
            whole["why"] = whole["why"] or reply["why"]
            failed += [": ".join(one) for one in reply["failed"]]
        if found:
            self._show(told, whole, failed)

    def _show(self, told: Told, whole: dict[str, Any], failed: list[str]) -> None:
        before = self.shown or {"at": 0.0, "behind_bytes": 0, "failed": ""}
        why = str(whole["why"] or (failed[0] if failed else ""))
        if why != before["failed"]:
            self.say("not mirrored" if why else "mirrored again", why or "the store takes results")
        elif not why and not before["at"]:
            self.say("mirrored", f"{whole['sent']} files, {whole['bytes']} bytes")
        at = before["at"] if why else time.time()
        behind = whole.get("behind_bytes", before["behind_bytes"])
        self.shown = {"at": at, "behind_bytes": behind, "failed": why}

    def _asked(self, account: Account, part: Part) -> dict[str, Any]:
        """One lab's pass, by the process that is there for it."""
        child = self._running(account, config(part.root)["url"])
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(json.dumps(part.about).encode() + b"\n")
            child.stdin.flush()
            reply = self._heard(child)
        except BrokenPipeError:
            reply = None
        if reply is None:
            self._stop()
            raise Failure("store", "the mirror's process ended in the middle; it is started again")
        if "error" in reply:
            raise Failure(**reply["error"])
        return reply

    def _heard(self, child: subprocess.Popen[bytes]) -> dict[str, Any] | None:
        assert child.stdout
        for line in child.stdout:
            start = line.find(MARK.encode())
            if start >= 0:
                reply: dict[str, Any] = json.loads(line[start + len(MARK) :])
                return reply
        return None

    def _running(self, account: Account, url: str) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        python = sys.executable
        if url.startswith("s3://"):
            python = find_python(account.uid, account.words)
        if not python:
            raise Failure("store", "results cannot go to S3", LACKING)
        self._child = subprocess.Popen(
            [*account.words, *words(), python, str(PROGRAM), "mirror-serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        return self._child

    def _stop(self) -> None:
        child, self._child = self._child, None
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                if pipe:
                    pipe.close()


def send_all(account: Account, lab_id: str, every: bool, say: Say) -> float:
    """A last pass, new files and edited code included; the bytes a second that it reached."""
    rate = 0.0
    found = parts(lab_id, every)
    if not found:
        say("not mirrored", f"no lab below {home()} has a store that was prepared")
    for part in found:
        try:
            done = ask(account, "mirror-now", {**part.about, "all": True})
        except FAILURES as error:
            say("not mirrored", why_of(error))
            continue
        rate = max(rate, float(done["bytes_s"]))
        told = f"{done['sent']} files, {done['bytes']} bytes, to {config(part.root)['url']}"
        say("mirrored", f"{told}, verified")
        for name, why in done["failed"]:
            say("not mirrored", f"{name}: {why}")
    return rate


def probed(account: Account, lab_id: str) -> None:
    """Failure where the lab's store cannot be used from here."""
    found = parts(lab_id, False)
    if not found:
        raise Failure("store", "it was not prepared on this server", "", "labctl up")
    ask(account, "store-probe", found[0].about)
