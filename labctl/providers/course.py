"""Servers that a course's keeper grants to students without a cloud account.

Requests go to a forced command on the keeper over SSH, with the student's own key. The keeper
limits them to the course's ceilings, creates the server with its own account and admits the lab's
key. Nothing here has credentials, and the keeper's replies are validated like any untrusted input.
"""

from __future__ import annotations

import base64
import re
import threading
import weakref
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import msgspec

from labctl.commands import slurm_accounting, ssh
from labctl.config.reader import Parsed
from labctl.config.schema import Name
from labctl.errors import (
    AuthenticationError,
    BusyError,
    ConfigError,
    HostKeyError,
    LabError,
    PolicyError,
    ProviderError,
    UsageError,
)
from labctl.errors.replies import decode_reply
from labctl.model import (
    Check,
    CreateServerRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
    make_record,
    parse_record,
)
from labctl.providers import ProviderContext
from labctl.text import dollars_text
from labctl.wire.codec import MessageError
from labctl.wire.keeper import (
    CREATE_SEAT_SERVER,
    END_SEAT_SERVER,
    EXPLAIN_SEAT_END,
    EXTEND_SEAT_SERVER,
    FETCH_SAVED_FILE,
    FETCH_STARTER,
    FIND_SEAT_SERVER,
    GREET_KEEPER,
    LIST_OFFERS,
    LIST_SAVED_FILES,
    LIST_SEAT_SERVERS,
    STARTER_MOST_BYTES,
    CreateSeatServerRequest,
    EndSeatServerRequest,
    ExplainSeatEndRequest,
    ExtendSeatServerRequest,
    FetchSavedFileReply,
    FetchSavedFileRequest,
    FetchStarterReply,
    FetchStarterRequest,
    FindSeatServerRequest,
    GreetKeeperRequest,
    ListOffersRequest,
    ListSavedFilesRequest,
    ListSeatServersRequest,
    NeedRecord,
    OfferRecord,
    SavedFileRecord,
    SeatGreetingRecord,
    SeatServerRecord,
)
from labctl.wire.line_requests import encode_request
from labctl.wire.runs import BROKER, JobRequest
from labctl.wire.verbs import Reply, Request, Verb
from labctl.wire.watchdog import WatchRecord

PROVIDER = "course"
REQUEST = "labctl-course"
# Seconds that the keeper may delay a reply while a server is being created.
WAIT_S = 8
_KEEPER = re.compile(
    r"ssh://(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]{0,63})@(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,252})"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_HOST_KEY = re.compile(r"[a-z0-9@.-]{1,60} [A-Za-z0-9+/]{40,2000}={0,2}")
_SAVED = {
    "home": "the course has saved its results: labctl pull --from-course",
    "disk": "its results are on its disk, which was kept: ask your instructor",
}
_SEAT = re.compile(r"[0-9a-f]{12}")


def parse_keeper(text: str) -> str:
    match = _KEEPER.fullmatch(text)
    if match is None or not 0 < int(match["port"] or 22) < 65536:
        raise ValueError(f"{text[:80]!a} is not a keeper's address: write ssh://user@host:22")
    return text


def parse_host_key(text: str) -> str:
    if not _HOST_KEY.fullmatch(text):
        raise ValueError(f"{text[:80]!a} is not a host key: write ssh-ed25519 AAAA...")
    return text


def parse_seat(text: str) -> str:
    if not _SEAT.fullmatch(text):
        raise ValueError(
            f"{text[:80]!a} is not a seat id: write the 12 hex digits of `labctl join`"
        )
    return text


class CourseProviderSettings(Value, frozen=True):
    """The settings that `labctl join` writes. `host_key` is pinned; `seat` is the seat's lab id."""

    keeper: Annotated[str, Parsed(parse_keeper)] = ""
    host_key: Annotated[str, Parsed(parse_host_key)] = ""
    course: Name = ""
    student: Name = ""
    seat: Annotated[str, Parsed(parse_seat)] = ""
    identity: str = ""


class CourseProvider:
    """One student's seat. A refusal of the keeper is a PolicyError with its reason."""

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = CourseProviderSettings
    settle_s: float = 0.0
    settings_example: ClassVar[str] = ""

    def __init__(self, settings: CourseProviderSettings, context: ProviderContext) -> None:
        self.settings = settings
        self.context = context
        self._lock = threading.Lock()
        self._channel: Any = None

    def get_account(self) -> ProviderAccount:
        """Return no account: only the keeper knows the account of a seat's server."""
        return ProviderAccount()

    def check_settings(self) -> None:
        """UsageError without a keeper's address."""
        _ = self.endpoint

    def check(self, need: Need | None = None) -> list[Check]:
        keeper = self.settings.keeper or "the keeper"
        try:
            hello = self.fetch_greeting()
        except LabError as error:
            detail = ": ".join(filter(None, [error.what, error.why]))
            return [Check(name=keeper, ok=False, detail=detail, next=error.hint)]
        allowance, spent = hello.allowance_usd, hello.spent_usd
        money = f"{dollars_text(spent)} spent"
        if allowance is not None:
            money = f"{dollars_text(max(0.0, allowance - spent))} of {dollars_text(allowance)} left"
        return [Check(name=keeper, ok=True, detail=f"{hello.course}, {hello.student}: {money}")]

    def fetch_greeting(self) -> SeatGreetingRecord:
        """Return what the keeper says about the course and the student's budget."""
        return self._request(GREET_KEEPER, GreetKeeperRequest()).hello

    def fetch_starter(self, assignment: str, sha256: str) -> bytes:
        """Return the document of an assignment's starter."""
        return download_starter(
            lambda request: self._request(FETCH_STARTER, request), assignment, sha256
        )

    def list_saved_files(self) -> tuple[SavedFileRecord, ...]:
        """List the results that the keeper saved when servers of the student's seat ended."""
        return self._request(LIST_SAVED_FILES, ListSavedFilesRequest()).files

    def fetch_saved_part(self, path: str, offset: int) -> FetchSavedFileReply:
        """Return a part of one of these files."""
        return self._request(FETCH_SAVED_FILE, FetchSavedFileRequest(path, offset))

    def offers(self, need: Need) -> list[Offer]:
        reply = self._request(LIST_OFFERS, ListOffersRequest(make_record(NeedRecord, need)))
        return [_parse_offer(offer) for offer in reply.offers]

    def build_job_request(self, need: Need, offer: Offer) -> JobRequest:
        """Say what a job asks of Slurm on the course's server: a GPU if the server has one."""
        gpu = need.gpu
        kind = f"{gpu.kind.lower()}:" if gpu.is_required and gpu.kind != "any" else ""
        count = max(1, gpu.count) if gpu.is_required else min(1, offer.gpu_count)
        account = slurm_accounting.class_account(self.settings.course)
        gpus = f"gpu:{kind}{count}" if count and gpu.kind != "none" else ""
        return JobRequest(account=account, qos=account, gpus=gpus, runtime=BROKER)

    def create(self, offer: Offer, request: CreateServerRequest) -> Server:
        """Claim the seat's server, which the keeper creates with the course's own settings."""
        message = CreateSeatServerRequest(
            lab=request.lab,
            lab_id=request.lab_id,
            token=request.token,
            public_key=request.public_key,
            offer=make_record(OfferRecord, offer),
        )
        return _parse_server(self._request(CREATE_SEAT_SERVER, message).server)

    def find(self, server_id: str) -> Server | None:
        """Find a server. The keeper delays its reply for WAIT_S while it is being created."""
        message = FindSeatServerRequest(server_id, WAIT_S)
        server = self._request(FIND_SEAT_SERVER, message).server
        return None if server is None else _parse_server(server)

    def servers(self) -> list[Server]:
        reply = self._request(LIST_SEAT_SERVERS, ListSeatServersRequest())
        return [_parse_server(server) for server in reply.servers]

    def find_joinable(self) -> Server | None:
        """Return the seat's running server, also if only another lab or teammate holds it."""
        server = self._request(LIST_SEAT_SERVERS, ListSeatServersRequest()).seat_server
        return None if server is None else _parse_server(server)

    def terminate(self, server_id: str) -> None:
        """Release the seat's server; it ends when the last lab has released it."""
        self._request(END_SEAT_SERVER, EndSeatServerRequest(server_id))

    def explain_end(self, server_id: str) -> str:
        """Say why the keeper ended the seat's last server, and where its results are."""
        try:
            ended = self._request(EXPLAIN_SEAT_END, ExplainSeatEndRequest(server_id)).ended
        except LabError:
            return ""  # a keeper of an earlier version does not know this request
        if ended is None or not ended.why:
            return ""
        return "; ".join(filter(None, [ended.why[:500], _SAVED.get(ended.saved, "")]))

    def leftovers(self) -> list[Resource]:
        """Return nothing: what a server leaves belongs to the course, and its keeper removes it."""
        return []

    def remove(self, resource: Resource) -> None:
        """Do nothing: a student never pays for anything that is left."""

    def get_guarded_lab_id(self, server_id: str) -> str:
        return self.settings.seat

    def extend_life(self, server_id: str, span_s: int) -> WatchRecord | None:
        """Extend the server's life by `span_s` seconds; PolicyError beyond the course's limits."""
        self._request(EXTEND_SEAT_SERVER, ExtendSeatServerRequest(server_id, span_s))
        return None  # the student's own connection reads it

    def close(self) -> None:
        """Close the channel to the keeper; the next request opens it again."""
        with self._lock:
            if self._channel is not None:
                self._channel.close()

    @property
    def endpoint(self) -> Endpoint:
        """The address of the keeper, with the host key that the join file pinned."""
        match = _KEEPER.fullmatch(self.settings.keeper)
        if match is None or not self.settings.host_key:
            raise ConfigError(
                "lab.yaml names no keeper",
                why="server.course.keeper and server.course.host_key come with a join file",
                hint="labctl join FILE   # that your instructor sends you",
            )
        return Endpoint(
            host=match["host"],
            port=int(match["port"] or 22),
            user=match["user"],
            identity=self.settings.identity or self.context.student_key,
            host_key=self.settings.host_key,
        )

    def _request(self, verb: Verb[Request, Reply], request: Request) -> Reply:
        """Send one request to the keeper and return its reply; raise the error that it reports."""
        try:
            reply = self._open_channel().exchange(encode_request(verb, request))
        except LabError as error:
            raise _add_student_hint(error, self.settings.keeper) from None
        try:
            return decode_reply(verb.reply, reply)
        except MessageError:
            raise ProviderError(
                f"{self.settings.keeper} did not reply like a keeper",
                why=reply[:200].decode(errors="replace"),
                hint="tell your instructor",
            ) from None

    def _open_channel(self) -> Any:
        with self._lock:
            if self._channel is None:
                if self.context.talk is None:
                    raise UsageError("a keeper cannot be reached from here")
                self._channel = self.context.talk(self.endpoint, REQUEST)
                weakref.finalize(self, self._channel.close)
            return self._channel


def download_starter(
    send: Callable[[FetchStarterRequest], FetchStarterReply], assignment: str, sha256: str
) -> bytes:
    """Return a starter's document, part by part; ProviderError if the parts do not fit together."""
    data = b""
    while True:
        reply = send(FetchStarterRequest(assignment, sha256, len(data)))
        try:
            part = base64.b64decode(reply.data, validate=True)
        except ValueError:
            part = b""
        data += part
        if not part or len(data) > min(reply.size_bytes, STARTER_MOST_BYTES):
            raise ProviderError(
                f"the keeper sent an invalid part of the starter of {assignment}",
                why=f"{len(data)} of {reply.size_bytes} bytes arrived",
                hint="tell your instructor",
            )
        if len(data) == reply.size_bytes:
            return data


def _parse_offer(record: OfferRecord) -> Offer:
    try:
        return msgspec.structs.replace(parse_record(Offer, record), provider=PROVIDER)
    except MessageError as error:
        raise ProviderError(
            "the keeper sent an invalid offer", why=str(error), hint="tell your instructor"
        ) from None


def _parse_server(record: SeatServerRecord) -> Server:
    """Validate a server from the keeper: nothing in it may be a command, an option or a path."""
    try:
        server = parse_record(Server, record)
        ssh.check_id(server.id)
        endpoint = server.endpoint
        if endpoint.host:
            ssh.check_host(endpoint.host)
            ssh.check_user(endpoint.user)
            ssh.check_port(endpoint.port)
            ssh.parse_hops(endpoint.jump)
            for key in filter(None, (endpoint.host_key, endpoint.next_host_key)):
                parse_host_key(key)
    except (ValueError, UsageError) as error:
        raise ProviderError(
            "the keeper sent an invalid server description",
            why=str(error),
            hint="tell your instructor",
        ) from None
    clean = msgspec.structs.replace(endpoint, proxy_command="", identity="")
    return msgspec.structs.replace(server, provider=PROVIDER, endpoint=clean, account="")


def is_keeper_of(settings: object, host_key: str) -> bool:
    """Whether these are the settings of a course whose keeper has this host key."""
    if not isinstance(settings, CourseProviderSettings):
        return False
    return bool(host_key) and settings.host_key == host_key


def make_unknown_key_error(keeper: str) -> PolicyError:
    """Return the error for a student whose key the keeper does not accept."""
    return PolicyError(
        f"{keeper} does not accept your key",
        why="you have not joined from this account, or your instructor has revoked the key",
        hint="ask your instructor for a join file, then:\nlabctl join FILE",
    )


def _add_student_hint(error: LabError, keeper: str) -> LabError:
    """Say what a student can do about an error of the connection."""
    if isinstance(error, AuthenticationError):
        return make_unknown_key_error(keeper)
    if isinstance(error, HostKeyError):
        error.hint = "tell your instructor: the keeper's host key is not the one in your join file"
    elif isinstance(error, BusyError):
        error.hint = "try again in some minutes; your server and runs continue without the keeper"
    return error
