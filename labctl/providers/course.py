"""Servers that a course's keeper grants, for who has no account at a cloud.

The keeper is asked over SSH with the student's own key; a forced command answers there. It measures
whatever is asked for by the course's ceilings, makes the server with its own account and lets the
lab's key in. Nothing here holds credentials, and what the keeper says is checked as a stranger's.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from typing import Annotated, Any, ClassVar

import msgspec

from labctl import errors
from labctl.commands import ssh
from labctl.config.reader import Parsed
from labctl.config.schema import Name
from labctl.errors import (
    AuthenticationError,
    BusyError,
    CommandError,
    ConfigError,
    HostKeyError,
    LabError,
    PolicyError,
    ProviderError,
    UsageError,
)
from labctl.model import (
    Check,
    CreateRequest,
    Endpoint,
    Need,
    Offer,
    ProviderAccount,
    Resource,
    Server,
    Value,
)
from labctl.providers import Surroundings

PROVIDER = "course"
REQUEST = "labctl-course"
# So long the keeper may hold an answer back while a server is being made.
WAIT_S = 8
_PLACE = re.compile(
    r"ssh://(?P<user>[A-Za-z0-9_][A-Za-z0-9._+-]{0,63})@(?P<host>[A-Za-z0-9_][A-Za-z0-9._-]{0,252})"
    r"(?::(?P<port>[0-9]{1,5}))?"
)
_HOST_KEY = re.compile(r"[a-z0-9@.-]{1,60} [A-Za-z0-9+/]{40,2000}={0,2}")
_SAVED = {
    "home": "its results are in the course's folder: ask your instructor",
    "disk": "its results are on its disk, which was kept: ask your instructor",
}
_SEAT = re.compile(r"[0-9a-f]{12}")


def parse_keeper(text: str) -> str:
    place = _PLACE.fullmatch(text)
    if place is None or not 0 < int(place["port"] or 22) < 65536:
        raise ValueError(f"{text[:80]!a} is no keeper: write ssh://user@host:22")
    return text


def parse_host_key(text: str) -> str:
    if not _HOST_KEY.fullmatch(text):
        raise ValueError(f"{text[:80]!a} is no host key: write ssh-ed25519 AAAA...")
    return text


def parse_seat(text: str) -> str:
    if not _SEAT.fullmatch(text):
        raise ValueError(f"{text[:80]!a} is no seat: 12 hex digits, as `labctl join` writes them")
    return text


class CourseSettings(Value, frozen=True):
    """As `labctl join` writes them. `host_key` is pinned; `seat` names whose watchdog it is."""

    keeper: Annotated[str, Parsed(parse_keeper)] = ""
    host_key: Annotated[str, Parsed(parse_host_key)] = ""
    course: Name = ""
    student: Name = ""
    seat: Annotated[str, Parsed(parse_seat)] = ""
    identity: str = ""


class CourseProvider:
    """One student's seat. What the keeper refuses is a PolicyError with its reason."""

    name: ClassVar[str] = PROVIDER
    settings_type: ClassVar[type[Value]] = CourseSettings
    settle_s: float = 0.0

    def __init__(self, settings: CourseSettings, surroundings: Surroundings) -> None:
        self.settings = settings
        self.surroundings = surroundings
        self._guard = threading.Lock()
        self._lines: Any = None

    def get_account(self) -> ProviderAccount:
        """A seat has none: whose account its server is in is the keeper's to know."""
        return ProviderAccount()

    def check(self, need: Need | None = None) -> list[Check]:
        place = self.settings.keeper or "the keeper"
        try:
            hello = self.hello()
        except LabError as error:
            detail = ": ".join(filter(None, [error.what, error.why]))
            return [Check(name=place, ok=False, detail=detail, next=error.hint)]
        allowance, spent = hello.get("allowance_usd"), float(hello.get("spent_usd") or 0.0)
        money = f"{spent:.2f} dollars spent"
        if allowance is not None:
            money = f"{max(0.0, allowance - spent):.2f} of {allowance:.2f} dollars left"
        return [
            Check(name=place, ok=True, detail=f"{hello['course']}, {hello['student']}: {money}")
        ]

    def hello(self) -> dict[str, Any]:
        """What the keeper tells of the course and of the student's money."""
        told: dict[str, Any] = self._ask("hello")["hello"]
        return told

    def offers(self, need: Need) -> list[Offer]:
        found = self._ask("offers", need=msgspec.to_builtins(need))["offers"]
        return [_mine(one) for one in msgspec.convert(found, list[Offer])]

    def create(self, offer: Offer, request: CreateRequest) -> Server:
        """Hold the seat: its server is the course's own, made with the course's settings."""
        said = self._ask(
            "create",
            lab=request.lab,
            lab_id=request.lab_id,
            token=request.token,
            public_key=request.public_key,
            offer=msgspec.to_builtins(offer),
        )
        return _checked(said["server"])

    def find(self, server_id: str) -> Server | None:
        """The keeper holds its answer back for a while where the server is still being made."""
        found = self._ask("find", id=server_id, wait_s=WAIT_S)["server"]
        return None if found is None else _checked(found)

    def servers(self) -> list[Server]:
        return [_checked(one) for one in self._ask("servers")["servers"]]

    def terminate(self, server_id: str) -> None:
        """Let the seat's server go; with the last lab that holds it, it ends."""
        self._ask("terminate", id=server_id)

    def why_ended(self, server_id: str) -> str:
        """Why the keeper ended the seat's last server, and where its results are; "" if unknown."""
        try:
            said = self._ask("ended", id=server_id).get("ended")
        except LabError:
            return ""  # a keeper of an earlier version does not know the question
        if not isinstance(said, dict) or not (why := str(said.get("why") or "")):
            return ""
        saved = _SAVED.get(str(said.get("saved")), "")
        return "; ".join(filter(None, [why[:500], saved]))

    def leftovers(self) -> list[Resource]:
        """Whatever a server leaves is the course's, and its keeper's to remove."""
        return []

    def remove(self, resource: Resource) -> None:
        """Nothing that a student pays for is ever left here."""

    def guarded_as(self, server_id: str) -> str:
        return self.settings.seat

    def prolong(self, server_id: str, span_s: int) -> None:
        """PolicyError beyond the course's ceilings."""
        self._ask("extend", id=server_id, seconds=span_s)

    def close(self) -> None:
        """End the talk with the keeper; it begins again with the next question."""
        with self._guard:
            if self._lines is not None:
                self._lines.close()

    @property
    def endpoint(self) -> Endpoint:
        """The way to the keeper, with the key that the join file pinned."""
        place = _PLACE.fullmatch(self.settings.keeper)
        if place is None or not self.settings.host_key:
            raise ConfigError(
                "lab.yaml names no keeper",
                why="server.course.keeper and server.course.host_key come with a join file",
                hint="labctl join FILE   # that your instructor sends you",
            )
        return Endpoint(
            host=place["host"],
            port=int(place["port"] or 22),
            user=place["user"],
            identity=self.settings.identity or self.surroundings.student_key,
            host_key=self.settings.host_key,
        )

    def _ask(self, do: str, **about: Any) -> dict[str, Any]:
        line = json.dumps({"do": do, **about}).encode() + b"\n"
        try:
            answer = self._talk().ask(line)
        except LabError as error:
            raise _explained(error, self.settings.keeper) from None
        try:
            body = json.loads(answer)
        except (ValueError, RecursionError):
            body = None
        if not isinstance(body, dict):
            raise ProviderError(
                f"{self.settings.keeper} does not answer as a keeper does",
                why=answer[:200].decode(errors="replace"),
                hint="tell your instructor",
            )
        if (told := body.get("error")) is not None:
            raise _error(told)
        return body

    def _talk(self) -> Any:
        with self._guard:
            if self._lines is None:
                if self.surroundings.talk is None:
                    raise UsageError("a keeper cannot be asked from here")
                self._lines = self.surroundings.talk(self.endpoint, REQUEST)
                weakref.finalize(self, self._lines.close)
            return self._lines


def _mine(offer: Offer) -> Offer:
    return msgspec.structs.replace(offer, provider=PROVIDER)


def _checked(given: Any) -> Server:
    """A server as the keeper tells of it: nothing in it may be a command, an option or a path."""
    try:
        server = msgspec.convert(given, Server)
        ssh.check_id(server.id)
        endpoint = server.endpoint
        if endpoint.host:
            ssh.check_host(endpoint.host)
            ssh.check_user(endpoint.user)
            ssh.check_port(endpoint.port)
            ssh.parse_hops(endpoint.jump)
            for key in filter(None, (endpoint.host_key, endpoint.next_host_key)):
                parse_host_key(key)
    except (msgspec.ValidationError, ValueError, UsageError) as error:
        raise ProviderError(
            "the keeper tells of a server that cannot be",
            why=str(error),
            hint="tell your instructor",
        ) from None
    clean = msgspec.structs.replace(endpoint, proxy_command="", identity="")
    return msgspec.structs.replace(server, provider=PROVIDER, endpoint=clean, account="")


def _error(told: Any) -> LabError:
    """The error that the keeper tells, as one of labctl's own kinds."""
    told = told if isinstance(told, dict) else {}
    kind = getattr(errors, str(told.get("kind")), LabError)
    if not (isinstance(kind, type) and issubclass(kind, LabError)) or kind is CommandError:
        kind = LabError
    what, why, hint = (str(told.get(key, ""))[:2000] for key in ("what", "why", "hint"))
    made: LabError = kind(what or "the keeper refused", why=why, hint=hint)
    return made


def _explained(error: LabError, keeper: str) -> LabError:
    """The same, with what a student can do about it."""
    if isinstance(error, AuthenticationError):
        return PolicyError(
            f"{keeper} does not let your key in",
            why="you have not joined from this account, or your instructor took the key away",
            hint="labctl join FILE   # ask your instructor for one: labctl course invite",
        )
    if isinstance(error, HostKeyError):
        error.hint = "tell your instructor: the keeper shows another host key than your join file"
    elif isinstance(error, BusyError):
        error.hint = "try again in some minutes; what you have runs on without the keeper"
    return error
