"""The client of a receiver on an SSH server: one connection to its forced command."""

from __future__ import annotations

from collections.abc import Callable
from itertools import zip_longest
from typing import TYPE_CHECKING, BinaryIO, TypeVar

import msgspec

from labctl.config import Paths, load_lab, student_key
from labctl.decoding import convert_value
from labctl.errors import (
    AuthenticationError,
    BusyError,
    CommandError,
    HostKeyError,
    LabError,
    UsageError,
)
from labctl.errors.replies import decode_reply
from labctl.model import Endpoint, Value, parse_record
from labctl.providers import course
from labctl.retry import retry_on
from labctl.servers.context import LabContext
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.provider_traits import read_provider_traits
from labctl.submissions import REQUEST
from labctl.submissions.assignment import SSH_PLACE, Assignment, DeadlineStatus
from labctl.submissions.feedback import Feedback
from labctl.submissions.receipt import Signed
from labctl.submissions.receiver import Hello
from labctl.submissions.service import PART_BYTES
from labctl.wire.codec import MessageError
from labctl.wire.line_requests import encode_request
from labctl.wire.receiver import (
    ASK_REGRADE,
    BEGIN_UPLOAD,
    FINISH_UPLOAD,
    GREET_RECEIVER,
    LIST_RECEIPTS,
    READ_FEEDBACK,
    SEND_PART,
    AskRegradeRequest,
    BeginUploadRequest,
    FinishUploadRequest,
    GreetReceiverRequest,
    ListReceiptsRequest,
    ReadFeedbackReply,
    ReadFeedbackRequest,
    SendPartRequest,
)
from labctl.wire.verbs import Reply, Request, Verb

if TYPE_CHECKING:
    from labctl.transports.forced_command import LineChannel

Model = TypeVar("Model", bound=Value)
# Broken connections in a row, without any byte sent, before giving up.
TRIES = 5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 8.0


def public_key(paths: Paths) -> str:
    """Return this account's public key line, for the instructor; create the pair if missing."""
    return ensure_key_pair(student_key(paths))


class ReceiverHost:
    """The receiver of an SSH assignment. It connects at the first request."""

    def __init__(self, context: LabContext, rules: Assignment) -> None:
        self.context = context
        self.rules = rules
        self._channel: LineChannel | None = None

    @property
    def endpoint(self) -> Endpoint:
        """The endpoint: the assignment's address and pinned key, with the user's own jump hosts."""
        match = SSH_PLACE.fullmatch(self.rules.hand_in)
        if match is None:
            raise UsageError(
                f"{self.rules.hand_in} is not an SSH server",
                hint="ask your instructor for another assignment file, made with:\n"
                f"labctl receive assignment DIR {self.rules.name}",
            )
        alias = self.context.connections.user_config.resolve_alias(match["host"])
        return msgspec.structs.replace(
            alias,
            user=match["user"],
            port=int(match["port"] or 22),
            identity=str(student_key(self.context.paths)),
            host_key=self.rules.host_key,
        )

    def hello(self) -> Hello:
        """Return the rules as the receiver has them for this student now."""
        request = GreetReceiverRequest(self.rules.name)
        reply = self.send_request(GREET_RECEIVER, request)
        try:
            return parse_record(Hello, reply.hello)
        except MessageError as error:
            raise self.make_protocol_error(str(error)) from None

    def receipts(self) -> list[tuple[Signed, DeadlineStatus | None]]:
        """Return the student's receipts of this assignment, each with what counts now.

        That is None from a receiver of an earlier version.
        """
        request = ListReceiptsRequest(self.rules.name)
        reply = self.send_request(LIST_RECEIPTS, request)
        try:
            standings = [parse_record(DeadlineStatus, one) for one in reply.standings]
        except MessageError as error:
            raise self.make_protocol_error(str(error)) from None
        signed = [self._convert(one, Signed) for one in reply.receipts]
        return list(zip_longest(signed, standings[: len(signed)]))

    def feedback(self) -> tuple[Feedback | None, ReadFeedbackReply]:
        """Return the student's released feedback (None before that), and the complete reply."""
        request = ReadFeedbackRequest(self.rules.name)
        reply = self.send_request(READ_FEEDBACK, request)
        if reply.feedback is None:
            return None, reply
        return self._convert(reply.feedback, Feedback), reply

    def ask_regrade(self, text: str) -> int:
        """Ask for a regrade; return the number of the request."""
        return self.send_request(ASK_REGRADE, AskRegradeRequest(self.rules.name, text)).number

    def send(
        self, file: BinaryIO, sha256: str, size: int, on_bytes: Callable[[int], None]
    ) -> Signed:
        """Submit a bundle, continuing an earlier upload and reconnecting after broken connections.

        `on_bytes` is called with the bytes sent so far. LinkLostError after TRIES failures in a row
        without progress.
        """
        upload = _Upload(self, file, sha256, size, on_bytes)
        is_finished = False
        while not is_finished:
            # A new policy, since bytes have arrived: only failures in a row count.
            is_finished = retry_on(
                BusyError, pause_s=FIRST_PAUSE_S, longest_pause_s=LONGEST_PAUSE_S, tries=TRIES
            )(upload.advance)
        return self._convert(upload.signed, Signed)

    def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            self._channel.close()

    def send_request(
        self, verb: Verb[Request, Reply], request: Request, body: bytes = b""
    ) -> Reply:
        """Send a request and return its reply; BusyError after a lost connection, to try again."""
        if self._channel is None:
            self._channel = self.context.connections.open_line_channel(self.endpoint, REQUEST)
        try:
            line = self._channel.exchange(encode_request(verb, request) + body)
        except CommandError as error:
            raise self.make_protocol_error(error.why) from None
        except LabError as error:
            raise self._with_hint(error) from None
        try:
            return decode_reply(verb.reply, line)
        except MessageError as error:
            raise self.make_protocol_error(str(error)) from None

    def _convert(self, value: object, kind: type[Model]) -> Model:
        """Convert a part of a reply to a value of labctl.submissions."""
        try:
            return convert_value(value, kind)
        except msgspec.ValidationError as error:
            raise self.make_protocol_error(str(error)) from None

    def make_protocol_error(self, why: str) -> LabError:
        return LabError(
            f"{self.rules.hand_in} does not answer like a receiver",
            why=why,
            hint="tell your instructor",
        )

    def _is_keeper_of_course(self) -> bool:
        """Whether the lab's course and the assignment have the same machine.

        The commands around submissions do not read the settings of providers otherwise.
        """
        try:
            config = load_lab(self.context.config.root, find_provider=read_provider_traits)
        except LabError:
            return False
        settings = config.server.provider_settings.get(course.PROVIDER)
        return course.is_keeper_of(settings, self.rules.host_key)

    def _with_hint(self, error: LabError) -> LabError:
        """Return the error with a hint for students."""
        if isinstance(error, AuthenticationError):
            if self._is_keeper_of_course():
                return course.make_unknown_key_error(self.rules.hand_in)
            return AuthenticationError(
                f"{self.rules.hand_in} does not know your key",
                why=error.why,
                hint="labctl submit --key   # send that line to your instructor, who authorizes it",
            )
        if isinstance(error, HostKeyError):
            error.hint = "ask your instructor: the assignment's file has another host key"
        elif isinstance(error, BusyError):
            error.hint = "labctl submit   # again later; it continues where it stopped"
        return error


class _Upload:
    """The upload of one bundle, which continues after broken connections."""

    def __init__(
        self,
        host: ReceiverHost,
        file: BinaryIO,
        sha256: str,
        size: int,
        on_bytes: Callable[[int], None],
    ) -> None:
        self.host = host
        self.file = file
        self.bundle = (host.rules.name, sha256, size)
        self.size = size
        self.on_bytes = on_bytes
        # The bytes that the receiver has: None if it must be asked, and the most ever.
        self.offset: int | None = None
        self.furthest = -1
        self.signed: object = None

    def advance(self) -> bool:
        """Send until the receiver has more bytes than ever before; True once it has signed.

        BusyError if the connection broke; the next call continues where the receiver is then.
        """
        try:
            return self._advance()
        except BusyError:
            self.offset = None
            raise

    def _advance(self) -> bool:
        offset = self.offset
        if offset is None:
            begun = self.host.send_request(BEGIN_UPLOAD, BeginUploadRequest(*self.bundle))
            if begun.signed is not None:
                self.signed = begun.signed
                return True
            if begun.offset is None:
                why = "the reply has neither an offset nor a receipt"
                raise self.host.make_protocol_error(why)
            offset = begun.offset
            if self._note_offset(offset):
                return False
        while offset < self.size:
            self.file.seek(offset)
            part = self.file.read(min(PART_BYTES, self.size - offset))
            request = SendPartRequest(*self.bundle, offset, len(part))
            offset = self.host.send_request(SEND_PART, request, part).offset
            if self._note_offset(offset):
                return False
        finished = self.host.send_request(FINISH_UPLOAD, FinishUploadRequest(*self.bundle))
        self.signed = finished.signed
        return True

    def _note_offset(self, offset: int) -> bool:
        """Record and report what the receiver has; whether it is more than ever before."""
        if offset < 0:
            raise self.host.make_protocol_error("the reply has a negative offset")
        self.offset = offset
        self.on_bytes(offset)
        is_further = offset > self.furthest
        self.furthest = max(offset, self.furthest)
        return is_further
