"""Mirroring beside the runs: a pass at intervals, at each run's start and end, and a last one.

A low-priority process of the lab's own account makes the passes and lives as long as the watchdog;
see mirror.py. If the store cannot be used, that is reported, and the next pass tries again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Callable, NamedTuple

from ...wire.codec import encode, from_json
from ...wire.mirrors import MIRROR_NOW, PROBE_STORE, MirrorPassReply, MirrorPassRequest
from ...wire.verbs import UP_COMMAND, ErrorReply, LabRequest
from ...wire.watchdog import MirrorStateRecord
from ..host.paths import labctl_home
from ..mirror.boto3_python import LACKING, find_python
from ..mirror.mirror import build_priority_words
from ..mirror.store import read_config
from ..program import PROGRAM
from ..reply import MARK, Failure
from .activity import LabAccount
from .saved_results import call_verb, list_labs

INTERVAL_S = 60.0
Say = Callable[[str, str], None]
FAILURES = (Failure, OSError, ValueError, KeyError, subprocess.SubprocessError)


class MirroredLab(NamedTuple):
    """A lab whose results are mirrored."""

    lab: str
    lab_id: str
    root: Path

    @property
    def request(self) -> LabRequest:
        return LabRequest(self.lab, self.lab_id)


class PassOutcome(NamedTuple):
    """A pass over all labs: why it failed ("" if it did not), and what it sent.

    `behind_bytes` None means that the pass did not find out.
    """

    why: str
    behind_bytes: int | None = None
    sent: int = 0
    bytes: int = 0


class MirrorRequest(NamedTuple):
    """The request to the mirror at every tick."""

    account: LabAccount
    lab_id: str
    every: bool
    interval_s: float
    runs: frozenset[str]


def list_mirrored_labs(lab_id: str, every: bool) -> list[MirroredLab]:
    candidates = [MirroredLab(*fields) for fields in list_labs(lab_id, every)]
    return [part for part in candidates if read_config(part.root).url]


def error_text(error: BaseException) -> str:
    if isinstance(error, Failure):
        return ": ".join(filter(None, [error.report.what, error.report.why]))
    return str(error)


class Mirror:
    """The mirror of all labs on the server.

    `shown` is what the watchdog's status says of it; None before the first pass.
    """

    def __init__(self, say: Say) -> None:
        self.say = say
        self.shown: MirrorStateRecord | None = None
        self._request: MirrorRequest | None = None
        self._due = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None

    def update(self, request: MirrorRequest) -> None:
        """Update the request.

        The first call starts the passes; a run's start or end causes one at once.
        """
        previous, self._request = self._request, request
        if previous is None:
            threading.Thread(target=self._run_forever, daemon=True).start()
        elif previous.runs != request.runs:
            self._due.set()

    def _run_forever(self) -> None:
        while True:
            request = self._request
            assert request
            started_s = time.monotonic()
            try:
                self._run_pass(request)
            except FAILURES as error:
                self._stop()
                self._report(PassOutcome(error_text(error)))
            left_s = max(0.0, request.interval_s - (time.monotonic() - started_s))
            self._due.wait(left_s)
            self._due.clear()

    def _run_pass(self, request: MirrorRequest) -> None:
        mirrored_labs = list_mirrored_labs(request.lab_id, request.every)
        replies = [self._mirror_lab(request.account, part) for part in mirrored_labs]
        if not replies:
            return
        reasons = [reply.why for reply in replies if reply.why]
        reasons += [": ".join(failure) for reply in replies for failure in reply.failed]
        self._report(
            PassOutcome(
                why=reasons[0] if reasons else "",
                behind_bytes=sum(reply.behind_bytes for reply in replies),
                sent=sum(reply.sent for reply in replies),
                bytes=sum(reply.bytes for reply in replies),
            )
        )

    def _report(self, outcome: PassOutcome) -> None:
        previous, why = self.shown or MirrorStateRecord(), outcome.why
        if why != previous.failed:
            self.say("not mirrored" if why else "mirrored again", why or "the store takes results")
        elif not why and not previous.at:
            self.say("mirrored", f"{outcome.sent} files, {outcome.bytes} bytes")
        behind = outcome.behind_bytes
        self.shown = MirrorStateRecord(
            at=previous.at if why else time.time(),
            behind_bytes=previous.behind_bytes if behind is None else behind,
            failed=why,
        )

    def _mirror_lab(self, account: LabAccount, part: MirroredLab) -> MirrorPassReply:
        """Make one lab's pass, by the child process."""
        child = self._get_child(account, read_config(part.root).url)
        assert child.stdin
        assert child.stdout
        try:
            child.stdin.write(encode(part.request).encode() + b"\n")
            child.stdin.flush()
            reply = self._read_reply(child)
        except BrokenPipeError:
            reply = None
        if reply is None:
            self._stop()
            raise Failure("store", "the mirror process ended during a pass; it will be restarted")
        return reply

    def _read_reply(self, child: subprocess.Popen[bytes]) -> MirrorPassReply | None:
        """Return the reply of the child, or raise its Failure; None if the child has ended."""
        assert child.stdout
        for line in child.stdout:
            start = line.find(MARK.encode())
            if start >= 0:
                body = json.loads(line[start + len(MARK) :])
                error = from_json(ErrorReply, body).error
                if error is not None:
                    raise Failure.relay(error)
                return from_json(MirrorPassReply, body)
        return None

    def _get_child(self, account: LabAccount, url: str) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._stop()
        python = sys.executable
        if url.startswith("s3://"):
            python = find_python(account.uid, account.words)
        if not python:
            raise Failure("store", "results cannot be sent to S3", LACKING)
        self._child = subprocess.Popen(
            [*account.words, *build_priority_words(), python, str(PROGRAM), "mirror-serve"],
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


def send_all(account: LabAccount, lab_id: str, every: bool, say: Say) -> float:
    """Make a last pass, with new files and edited code; return its speed in bytes a second."""
    rate = 0.0
    mirrored_labs = list_mirrored_labs(lab_id, every)
    if not mirrored_labs:
        say("not mirrored", f"no lab below {labctl_home()} has a prepared store")
    for part in mirrored_labs:
        try:
            reply = call_verb(
                account, MIRROR_NOW, MirrorPassRequest(part.lab, part.lab_id, all=True)
            )
        except FAILURES as error:
            say("not mirrored", error_text(error))
            continue
        rate = max(rate, reply.bytes_s)
        summary = f"{reply.sent} files, {reply.bytes} bytes, to {read_config(part.root).url}"
        say("mirrored", f"{summary}, verified")
        for name, why in reply.failed:
            say("not mirrored", f"{name}: {why}")
    return rate


def probe_store(account: LabAccount, lab_id: str) -> None:
    """Test the lab's store. Failure if it cannot be used from here."""
    mirrored_labs = list_mirrored_labs(lab_id, False)
    if not mirrored_labs:
        raise Failure("store", "it was not prepared on this server", "", UP_COMMAND)
    lab = mirrored_labs[0]
    call_verb(account, PROBE_STORE, LabRequest(lab.lab, lab.lab_id))
