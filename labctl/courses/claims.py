"""One seat's server and who of its students holds it: a claim for each lab, on disk at once.

The first claim has the server made, the last one to go has it ended. Making and ending take
minutes: they are done in a thread of their own, and whoever asks meanwhile is told how far it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from labctl.config.identity import write_private
from labctl.courses.records.folder import Seat
from labctl.errors import BusyError, LabError, PolicyError, ProviderError
from labctl.errors.unexpected import as_lab_error
from labctl.model import Endpoint, Offer, Server, ServerState, Value
from labctl.providers.course import PROVIDER

# So long one answer of the provider's holds.
LOOK_S = 5.0
OVER = ("stopped", "ending", "terminated")
# Of one seat.
MOST_CLAIMS = 16
UNKNOWN = Endpoint(host="", port=0)


class Claim(Value, frozen=True):
    """A lab's hold on its seat's server. `leaving`: it was let go, and the server is to end."""

    token: str
    student: str
    lab: str
    lab_id: str
    public_key: str
    offer: Offer
    at: float
    leaving: bool = False


class Holding(Value, frozen=True):
    """What is on disk of one seat: its claims, those that were let in, the server."""

    claims: tuple[Claim, ...] = ()
    ready: tuple[str, ...] = ()
    server: Server | None = None


class Work(Protocol):
    """What is done at a provider and on servers for one seat. Every method may raise LabError."""

    def make(self, seat: Seat) -> Server:
        """A ready server, the one that the seat has or a new one; this may take minutes."""

    def let_in(self, seat: Seat, server: Server, claims: tuple[Claim, ...]) -> Server:
        """Let these claims' keys log in there and no other student's; the way they take."""

    def look(self, seat: Seat, server: Server) -> Server | None:
        """The server as its provider shows it now; None where it is gone."""

    def end(self, seat: Seat, server: Server) -> None:
        """Bring home what is there, end it, and wait until its provider confirms that."""


class SeatDesk:
    """One seat, for any number of threads. `begin` starts a thread's work."""

    def __init__(
        self,
        seat: Seat,
        work: Work,
        file: Path,
        *,
        begin: Callable[[Callable[[], None]], None],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.seat = seat
        self._work, self._file, self._begin, self._tell = work, file, begin, tell
        self._changed = threading.Condition()
        self._busy = self._again = False
        self._errors: dict[str, LabError] = {}
        self._looked_at = 0.0
        self._kept = _read(file)

    @property
    def claims(self) -> tuple[Claim, ...]:
        return self._kept.claims

    @property
    def server(self) -> Server | None:
        return self._kept.server

    def id_of(self, claim: Claim) -> str:
        return f"{PROVIDER}-{self.seat.pseudonym}-{claim.token}"

    def claim(self, new: Claim) -> Server:
        """Hold the seat's server, which is made where there is none; the same token, the same.

        BusyError while it ends. Returns at once.
        """
        with self._changed:
            known = self._claim(new.token)
            if known is None:
                if self.claims and all(one.leaving for one in self.claims):
                    raise BusyError(
                        "the server of this seat is ending at this moment",
                        hint="labctl up   # again, in a minute",
                    )
                if len(self.claims) >= MOST_CLAIMS:
                    raise PolicyError(
                        f"{MOST_CLAIMS} labs have this server already",
                        hint="labctl down   # in a lab that you do not need now",
                    )
                self._errors.pop(new.token, None)
                self._keep(claims=(*self.claims, new))
                self._go()
                known = new
            elif known.student != new.student:
                raise PolicyError("this attempt is somebody else's")
            return self._view(known)

    def find(self, token: str, student: str, wait_s: float = 0.0) -> Server | None:
        """The server as this claim has it, after `wait_s` at most where it is being made.

        The error that kept it from being made is raised once; then there is no such claim.
        """
        with self._changed:
            own = self._claim(token)
            if own is not None and own.student != student:
                return None
            self._changed.wait_for(lambda: self._settled(token), wait_s)
            if (error := self._errors.pop(token, None)) is not None:
                raise error
            own = self._claim(token)
            if own is None:
                return None
            if token not in self._kept.ready or own.leaving or self._busy:
                return self._view(own)
        self.look()
        with self._changed:
            own = self._claim(token)
            return self._view(own) if own is not None else None

    def look(self) -> Server | None:
        """Ask the provider whether the server is still there; claims on one that is not are over.

        A stopped one is over for its students too: the next claim has it started again.
        """
        with self._changed:
            server = self.server
            if server is None or self._busy or time.monotonic() - self._looked_at < LOOK_S:
                return server
        return self.seen(server, self._work.look(self.seat, server))

    def seen(self, server: Server, found: Server | None) -> Server | None:
        """Take over how the provider shows `server` now: as `found`, or as gone where None."""
        with self._changed:
            if self.server is not server or self._busy:
                return self.server
            self._looked_at = time.monotonic()
            if found is None or found.id != server.id or found.state in OVER:
                self._tell(f"its server is {found.state if found else 'gone'}")
                self._keep(claims=(), ready=(), server=None)
            return self.server

    def views(self, student: str) -> list[Server]:
        with self._changed:
            return [self._view(one) for one in self.claims if one.student == student]

    def leave(self, token: str, student: str) -> None:
        """Let the server go; it ends with its last claim. Of what is not there, nothing."""
        with self._changed:
            own = self._claim(token)
            if own is None or own.student != student:
                return
            left = msgspec.structs.replace(own, leaving=True)
            self._keep(claims=tuple(left if one is own else one for one in self.claims))
            self._go()

    def leave_all(self, students: tuple[str, ...] | None = None) -> None:
        """Let go for these students (None: all): who has left the course, or is out of money."""
        with self._changed:
            self._keep(
                claims=tuple(
                    msgspec.structs.replace(one, leaving=True)
                    if students is None or one.student in students
                    else one
                    for one in self.claims
                )
            )
            self._go()

    def go_on(self) -> None:
        """Go on with what was begun: after a restart of the keeper, or a failure that may pass."""
        with self._changed:
            waiting = [one.token for one in self.claims if one.token not in self._kept.ready]
            if waiting or any(one.leaving for one in self.claims):
                self._go()

    def wait(self, timeout_s: float) -> bool:
        """Until nothing is being done for this seat; False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def _claim(self, token: str) -> Claim | None:
        return next((one for one in self.claims if one.token == token), None)

    def _settled(self, token: str) -> bool:
        return token in self._errors or not self._busy

    def _view(self, claim: Claim) -> Server:
        """The server as the claim's owner sees it: under their lab's name and id."""
        server, ready = self.server, claim.token in self._kept.ready
        state: ServerState = "running" if server and ready else "starting"
        if claim.leaving:
            state = "ending"
        offer = server.offer if server and ready else claim.offer
        return Server(
            id=self.id_of(claim),
            provider=PROVIDER,
            lab=claim.lab,
            lab_id=claim.lab_id,
            alias=claim.lab,
            endpoint=_way(server.endpoint) if server and ready else UNKNOWN,
            offer=msgspec.structs.replace(offer, provider=PROVIDER),
            created_at=server.created_at if server and ready else claim.at,
            state=state,
            deadline_at=server.deadline_at if server and ready else None,
        )

    def _keep(self, **changes: object) -> None:
        self._kept = msgspec.structs.replace(self._kept, **changes)
        write_private(self._file, msgspec.json.encode(self._kept))
        self._changed.notify_all()

    def _go(self) -> None:
        """Have a thread do what is to be done, or the one that is at it look again; with the
        condition held."""
        self._again = True
        if not self._busy:
            self._busy = True
            self._begin(self._run)

    def _run(self) -> None:
        """Make, let in, let go, end: until there is nothing more to do."""
        try:
            while self._turn():
                pass
        except Exception as error:
            # Such as a full disk. Whoever waits is answered, and the next sweep goes on.
            with self._changed:
                self._rest()
            self._tell(as_lab_error(error, self._tell).what)
        except BaseException:
            with self._changed:
                self._rest()
            raise

    def _turn(self) -> bool:
        """One deed; whether there may be another. Who comes after that has a thread begun."""
        with self._changed:
            self._again = False
        more = self._step()
        with self._changed:
            if more or self._again:
                return True
            self._rest()
            return False

    def _rest(self) -> None:
        self._busy = False
        self._looked_at = time.monotonic()
        self._changed.notify_all()

    def _step(self) -> bool:
        """One deed; whether another may be needed."""
        with self._changed:
            staying = tuple(one for one in self.claims if not one.leaving)
            if not self.claims:
                return False
        try:
            if staying:
                server = self._work.make(self.seat)
                server = self._work.let_in(self.seat, server, staying)
                return self._made(server, staying)
            if self.server is not None:
                self._work.end(self.seat, self.server)
        except Exception as error:
            self._failed(as_lab_error(error, self._tell), staying)
            return False
        with self._changed:
            if self.server is not None:
                self._tell("its server has ended")
            news = tuple(one for one in self.claims if not one.leaving)
            self._keep(claims=news, ready=(), server=None)
            return bool(news)

    def _made(self, server: Server, served: tuple[Claim, ...]) -> bool:
        """Who had let go before this turn was let out by it, where somebody stays."""
        with self._changed:
            tokens = tuple(one.token for one in served)
            stays = any(not one.leaving for one in self.claims)
            left = tuple(
                one
                for one in self.claims
                if not (stays and one.leaving and one.token not in tokens)
            )
            self._keep(server=server, ready=tokens, claims=left)
            return any(one.leaving or one.token not in tokens for one in left)

    def _failed(self, error: LabError, staying: tuple[Claim, ...]) -> None:
        self._tell(": ".join(filter(None, [error.what, error.why.replace("\n", "; ")])))
        with self._changed:
            failed = {one.token for one in staying} - set(self._kept.ready)
            for token in failed:
                self._errors[token] = _as_provider(error)
            if failed:
                self._keep(claims=tuple(one for one in self.claims if one.token not in failed))


def _way(endpoint: Endpoint) -> Endpoint:
    """What a student may know of the way: not the keeper's key, nor a command of its own."""
    return msgspec.structs.replace(endpoint, identity="", proxy_command="")


def _as_provider(error: LabError) -> LabError:
    """As a provider's error, after which nothing that could cost is left."""
    if isinstance(error, ProviderError):
        return error
    return ProviderError(error.what, why=error.why, hint=error.hint)


def _read(file: Path) -> Holding:
    try:
        return msgspec.json.decode(file.read_bytes(), type=Holding)
    except FileNotFoundError:
        return Holding()
    except msgspec.MsgspecError as error:
        raise LabError(
            f"{file} cannot be read",
            why=str(error),
            hint=f"rm {file}   # its students run labctl up once more",
        ) from None
