"""An assignment's receiver on an SSH server: one connection, whose forced command answers."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import IO, Any, BinaryIO

import msgspec

from labctl.commands import ssh
from labctl.config import Paths, student_key
from labctl.errors import (
    AuthenticationError,
    BusyError,
    HostKeyError,
    LabError,
    LinkLostError,
    UsageError,
)
from labctl.errors.replies import raised, reply_in
from labctl.model import Endpoint
from labctl.retry import while_turned_away
from labctl.servers.context import Ground
from labctl.servers.host_keys import make_key
from labctl.submissions import REQUEST
from labctl.submissions.assignment import SSH_PLACE, Assignment
from labctl.submissions.feedback import Feedback
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Hello
from labctl.submissions.service import PART_BYTES
from labctl.transports import failures

# Connections that may break one after another without anything having arrived.
TRIES = 5
FIRST_PAUSE_S = 1.0
END_S = 10.0
SSH_FAILED = 255


def public_key(paths: Paths) -> str:
    """Its public line, for the instructor; the pair is made where there is none."""
    return make_key(student_key(paths))


class ReceiverHost:
    """The receiver of an SSH assignment. Nothing is connected before the first question."""

    def __init__(self, ground: Ground, rules: Assignment) -> None:
        self.ground = ground
        self.rules = rules
        self._process: subprocess.Popen[bytes] | None = None
        self._ends = ExitStack()
        self._said: IO[bytes] | None = None

    def __enter__(self) -> ReceiverHost:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def endpoint(self) -> Endpoint:
        """The way there: the assignment's address and pinned key, the user's own jump hosts."""
        way = SSH_PLACE.fullmatch(self.rules.hand_in)
        if way is None:
            raise UsageError(
                f"{self.rules.hand_in} is no SSH server",
                hint="ask your instructor for another assignment file: labctl receive assignment",
            )
        found = self.ground.connections.resolve_alias(way["host"])
        return msgspec.structs.replace(
            found,
            user=way["user"],
            port=int(way["port"] or 22),
            identity=str(student_key(self.ground.paths)),
            host_key=self.rules.host_key,
        )

    def hello(self) -> Hello:
        """The rules as the receiver has them for this student now."""
        return msgspec.convert(while_turned_away()(self._ask, "hello")["hello"], Hello)

    def receipts(self) -> list[Signed]:
        """The student's own receipts of this assignment."""
        said = while_turned_away()(self._ask, "receipts")
        return msgspec.convert(said["receipts"], list[Signed])

    def feedback(self) -> Feedback | None:
        """What was released of the student's own grade; None where nothing was yet."""
        said = while_turned_away()(self._ask, "feedback")
        return msgspec.convert(said["feedback"], Feedback | None)

    def send(
        self, file: BinaryIO, sha256: str, size: int, on_bytes: Callable[[int], None]
    ) -> Signed:
        """Hand in a bundle, going on where an earlier try ended, through links that break.

        `on_bytes` hears how much is there. LinkLostError where it breaks too often.
        """
        about: dict[str, Any] = {"sha256": sha256, "size": size}
        failed, best = 0, -1
        while True:
            try:
                begun = self._ask("begin", **about)
                if "signed" in begun:
                    return msgspec.convert(begun["signed"], Signed)
                offset = int(begun["offset"])
                while offset < size:
                    if offset > best:
                        failed, best = 0, offset
                    on_bytes(offset)
                    file.seek(offset)
                    part = file.read(min(PART_BYTES, size - offset))
                    place = {**about, "offset": offset, "length": len(part)}
                    offset = int(self._ask("part", part, **place)["offset"])
                on_bytes(size)
                return msgspec.convert(self._ask("finish", **about)["signed"], Signed)
            except BusyError:
                failed += 1
                if failed >= TRIES:
                    raise
                # Not all of a class at once, an hour before it is due.
                time.sleep(random.uniform(0.5, 1.5) * FIRST_PAUSE_S * 2 ** (failed - 1))

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # what was not sent yet has nobody to go to
                    pipe.close()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._ends.close()

    def _ask(self, what: str, body: bytes = b"", **about: Any) -> dict[str, Any]:
        process = self._connected()
        assert process.stdin is not None
        assert process.stdout is not None
        asked = {"do": what, "assignment": self.rules.name, **about}
        try:
            process.stdin.write(json.dumps(asked).encode() + b"\n" + body)
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = b""
        reply = reply_in(line.decode(errors="replace"))
        if reply is None:
            raise self._ended(line)
        if (error := raised(reply)) is not None:
            raise error
        return reply

    def _connected(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            config, name = self.ground.connections.described(self.endpoint)
            # A file, not a pipe: a receiver that says much would fill that.
            self._said = said = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the process)
            self._ends.callback(said.close)
            try:
                self._process = subprocess.Popen(
                    ssh.command_argv(str(config), name, REQUEST),
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=self._said,
                )
            except FileNotFoundError:
                raise LabError(
                    "there is no ssh on this machine",
                    why="labctl hands in through the system's OpenSSH",
                    hint="sudo apt install openssh-client",
                ) from None
        return self._process

    def _ended(self, line: bytes) -> LabError:
        """Why there was no answer, in ssh's own words."""
        process, said = self._process, self._said
        assert process is not None
        assert said is not None
        try:
            code = process.wait(END_S)
        except subprocess.TimeoutExpired:
            code = 0
        said.seek(0)
        text = said.read().decode(errors="replace")
        self.close()
        if code == SSH_FAILED:
            return self._explained(failures.of_ssh(self.endpoint, text))
        if line or text.strip():
            return LabError(
                f"{self.rules.hand_in} does not answer as a receiver does",
                why=(text.strip() or line.decode(errors="replace"))[-500:],
                hint="tell your instructor",
            )
        return LinkLostError("the connection to the receiver ended", hint="labctl submit")

    def _explained(self, found: LabError) -> LabError:
        """The same, with what a student can do about it."""
        if isinstance(found, AuthenticationError):
            return AuthenticationError(
                f"{self.rules.hand_in} does not know your key",
                why=found.why,
                hint="labctl submit --key   # send that line to your instructor, who lets it in",
            )
        if isinstance(found, HostKeyError):
            found.hint = "ask your instructor: the assignment's file names another host key"
        elif isinstance(found, BusyError):
            found.hint = "labctl submit   # again later; what has arrived stays there"
        return found
