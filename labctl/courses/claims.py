"""One seat's server and the labs that hold it: one claim per lab, on disk at once.

The first claim creates the server, the release of the last one ends it. Both take minutes and run
in a thread of their own; a request in the meantime gets the state that has been reached.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from labctl.config.identity import write_private
from labctl.courses.records.folder import Seat
from labctl.courses.seat_claims import EndFailure, SeatClaim, SeatState, ServerActions
from labctl.decoding import decode_json
from labctl.errors import BusyError, LabError, PolicyError, ProviderError
from labctl.errors.replies import describe_error
from labctl.errors.unexpected import as_lab_error
from labctl.model import Endpoint, Server, ServerState
from labctl.providers.course import PROVIDER
from labctl.text import duration_text

# Seconds for which one answer of the provider counts as current.
FRESH_S = 5.0
OVER = ("stopped", "ending", "terminated")
# For one seat.
MOST_CLAIMS = 16
# How long saving a server's results may take before its students are warned.
LONG_SAVE_S = 3600.0
UNKNOWN = Endpoint(host="", port=0)
# what is stored of a server that has ended
_ENDED: dict[str, object] = {
    "claims": (),
    "ready": (),
    "server": None,
    "ending_since": 0.0,
    "end_failure": None,
}


class SharedSeatServer:
    """One seat's claims and server, safe for several threads. `begin` starts a worker thread."""

    def __init__(
        self,
        seat: Seat,
        work: ServerActions,
        file: Path,
        *,
        begin: Callable[[Callable[[], None]], None],
        notify: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.seat = seat
        self._work, self._file, self._begin, self._notify = work, file, begin, notify
        self._changed = threading.Condition()
        self._busy = self._again = False
        self._errors: dict[str, LabError] = {}
        self._checked_at = 0.0
        self._holding = _read_holding(file)

    @property
    def claims(self) -> tuple[SeatClaim, ...]:
        return self._holding.claims

    @property
    def server(self) -> Server | None:
        return self._holding.server

    def find_end_failure(self) -> EndFailure | None:
        """Return why the server could not end, until a new claim; None while that may succeed."""
        since, failure = self._holding.ending_since, self._holding.end_failure
        if failure is None and since and time.time() - since > LONG_SAVE_S:
            why = f"it has taken longer than {duration_text(LONG_SAVE_S)}"
            return EndFailure(what="saving its results has not finished", why=why, at=since)
        return failure

    def is_ready(self, claim: SeatClaim) -> bool:
        """Tell whether the server is prepared, and lets the claim's owner log in."""
        return self.server is not None and claim.token in self._holding.ready

    def server_id_of(self, claim: SeatClaim) -> str:
        return f"{PROVIDER}-{self.seat.pseudonym}-{claim.token}"

    def claim(self, new: SeatClaim) -> Server:
        """Claim the seat's server, creating it if needed; repeating a token returns the same claim.

        Returns at once. BusyError while the server is ending.
        """
        with self._changed:
            held = self._find_claim(new.token)
            if held is None:
                if self.claims and all(claim.leaving for claim in self.claims):
                    raise BusyError(
                        "the server of this seat is being removed",
                        hint="labctl up   # again, in a minute",
                    )
                if len(self.claims) >= MOST_CLAIMS:
                    raise PolicyError(
                        f"{MOST_CLAIMS} labs use this server already",
                        hint="labctl down   # in a lab that you do not need now",
                    )
                self._errors.pop(new.token, None)
                self._store_changes(claims=(*self.claims, new), end_failure=None)
                self._wake_worker()
                held = new
            elif held.student != new.student:
                raise PolicyError("this attempt belongs to another student")
            return self._view(held)

    def find(self, token: str, student: str, wait_s: float = 0.0) -> Server | None:
        """Return the server of a claim, waiting up to `wait_s` seconds while it is being created.

        None if there is no such claim. If creating failed, the error is raised once and the claim
        is gone.
        """
        with self._changed:
            held = self._find_claim(token)
            if held is not None and held.student != student:
                return None
            self._changed.wait_for(lambda: self._is_settled(token), wait_s)
            if (error := self._errors.pop(token, None)) is not None:
                raise error
            held = self._find_claim(token)
            if held is None:
                return None
            if token not in self._holding.ready or held.leaving or self._busy:
                return self._view(held)
        self.check_server()
        with self._changed:
            held = self._find_claim(token)
            return self._view(held) if held is not None else None

    def check_server(self) -> Server | None:
        """Ask the provider whether the server still exists; drop all claims if it does not.

        A stopped server counts as gone for its students: the next claim starts it again.
        """
        with self._changed:
            server = self.server
            if server is None or self._busy or time.monotonic() - self._checked_at < FRESH_S:
                return server
        return self.update_server(server, self._work.check_server(self.seat, server))

    def update_server(self, server: Server, found: Server | None) -> Server | None:
        """Update `server` to what the provider shows now: `found`, or None if it is gone."""
        with self._changed:
            if self.server is not server or self._busy:
                return self.server
            self._checked_at = time.monotonic()
            if found is None or found.id != server.id or found.state in OVER:
                self._notify(f"its server is {found.state if found else 'gone'}")
                self._store_changes(**_ENDED)
            return self.server

    def list_views(self, student: str) -> list[Server]:
        with self._changed:
            return [self._view(claim) for claim in self.claims if claim.student == student]

    def describe_running(self) -> Server | None:
        """Return the running server under the seat's own name and id, without its address."""
        with self._changed:
            server = self.server
            if server is None or (self.claims and all(claim.leaving for claim in self.claims)):
                return None
            return Server(
                id=server.id,
                provider=PROVIDER,
                lab=self.seat.name,
                lab_id=self.seat.lab_id,
                alias=self.seat.name,
                endpoint=UNKNOWN,
                offer=msgspec.structs.replace(server.offer, provider=PROVIDER),
                created_at=server.created_at,
                state="running",
            )

    def release(self, token: str, student: str) -> None:
        """Release a claim, if it exists; the server ends with its last one."""
        with self._changed:
            held = self._find_claim(token)
            if held is None or held.student != student:
                return
            released = msgspec.structs.replace(held, leaving=True)
            self._store_changes(
                claims=tuple(released if claim is held else claim for claim in self.claims)
            )
            self._wake_worker()

    def release_all(self, students: tuple[str, ...] | None = None) -> None:
        """Release the claims of these students, or of all if None."""
        with self._changed:
            self._store_changes(
                claims=tuple(
                    msgspec.structs.replace(claim, leaving=True)
                    if students is None or claim.student in students
                    else claim
                    for claim in self.claims
                )
            )
            self._wake_worker()

    def resume(self) -> None:
        """Resume unfinished work, after a restart of the keeper or a failure that may pass."""
        with self._changed:
            waiting = [
                claim.token for claim in self.claims if claim.token not in self._holding.ready
            ]
            if waiting or any(claim.leaving for claim in self.claims):
                self._wake_worker()

    def wait(self, timeout_s: float) -> bool:
        """Wait until no work is running for this seat; return False after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def _find_claim(self, token: str) -> SeatClaim | None:
        return next((claim for claim in self.claims if claim.token == token), None)

    def _is_settled(self, token: str) -> bool:
        return token in self._errors or not self._busy

    def _view(self, claim: SeatClaim) -> Server:
        """Return the server as the claim's owner sees it, under their lab's name and id."""
        server = self.server if self.is_ready(claim) else None
        state: ServerState = "running" if server else "starting"
        if claim.leaving:
            state = "ending"
        offer = server.offer if server else claim.offer
        return Server(
            id=self.server_id_of(claim),
            provider=PROVIDER,
            lab=claim.lab,
            lab_id=claim.lab_id,
            alias=claim.lab,
            endpoint=_strip_endpoint(server.endpoint) if server else UNKNOWN,
            offer=msgspec.structs.replace(offer, provider=PROVIDER),
            created_at=server.created_at if server else claim.at,
            state=state,
            deadline_at=server.deadline_at if server else None,
        )

    def _store_changes(self, **changes: object) -> None:
        self._holding = msgspec.structs.replace(self._holding, **changes)
        write_private(self._file, msgspec.json.encode(self._holding))
        self._changed.notify_all()

    def _note_end(self, **changes: object) -> None:
        """Store how the end of the server goes; a full disk must not keep it from ending."""
        with self._changed, suppress(OSError):
            self._store_changes(**changes)

    def _wake_worker(self) -> None:
        """Start the worker thread, or have the running one look again. Needs the condition held."""
        self._again = True
        if not self._busy:
            self._busy = True
            self._begin(self._run)

    def _run(self) -> None:
        """Work until nothing is left to do."""
        try:
            while self._run_step():
                pass
        except Exception as error:
            # Such as a full disk. Waiting requests get an answer, and the next sweep resumes.
            with self._changed:
                self._set_idle()
            self._notify(as_lab_error(error, self._notify).what)
        except BaseException:
            with self._changed:
                self._set_idle()
            raise

    def _run_step(self) -> bool:
        """Take one step; return whether to go on. A change after that starts a new thread."""
        with self._changed:
            self._again = False
        more = self._take_step()
        with self._changed:
            if more or self._again:
                return True
            self._set_idle()
            return False

    def _set_idle(self) -> None:
        self._busy = False
        self._checked_at = time.monotonic()
        self._changed.notify_all()

    def _take_step(self) -> bool:
        """Create and admit, or end; return whether another step may be needed."""
        with self._changed:
            staying = tuple(claim for claim in self.claims if not claim.leaving)
            if not self.claims:
                return False
        try:
            if staying:
                server = self._work.create_server(self.seat)
                server = self._work.authorize_keys(self.seat, server, staying)
                return self._record_server(server, staying)
            if self.server is not None:
                self._note_end(ending_since=self._holding.ending_since or time.time())
                self._work.save_and_remove_server(self.seat, self.server)
        except Exception as error:
            failure = as_lab_error(error, self._notify)
            if not staying:
                self._note_end(
                    end_failure=EndFailure(what=failure.what, why=failure.why, at=time.time())
                )
            self._drop_failed(failure, staying)
            return False
        with self._changed:
            if self.server is not None:
                self._notify("its server has ended")
            remaining = tuple(claim for claim in self.claims if not claim.leaving)
            self._store_changes(**{**_ENDED, "claims": remaining})
            return bool(remaining)

    def _record_server(self, server: Server, served: tuple[SeatClaim, ...]) -> bool:
        """Record the server and who can log in; return whether another step is needed.

        While somebody stays, claims that were released before this step are gone after it.
        """
        with self._changed:
            tokens = tuple(claim.token for claim in served)
            stays = any(not claim.leaving for claim in self.claims)
            remaining = tuple(
                claim
                for claim in self.claims
                if not (stays and claim.leaving and claim.token not in tokens)
            )
            self._store_changes(server=server, ready=tokens, claims=remaining)
            return any(claim.leaving or claim.token not in tokens for claim in remaining)

    def _drop_failed(self, error: LabError, staying: tuple[SeatClaim, ...]) -> None:
        self._notify(describe_error(error))
        with self._changed:
            failed = {claim.token for claim in staying} - set(self._holding.ready)
            for token in failed:
                self._errors[token] = _as_provider_error(error)
            if failed:
                self._store_changes(
                    claims=tuple(claim for claim in self.claims if claim.token not in failed)
                )


def _strip_endpoint(endpoint: Endpoint) -> Endpoint:
    """Return the endpoint without what only the keeper may have: its key and its proxy command."""
    return msgspec.structs.replace(endpoint, identity="", proxy_command="")


def _as_provider_error(error: LabError) -> LabError:
    """Return the error as a ProviderError, which means that nothing is left that could cost."""
    if isinstance(error, ProviderError):
        return error
    return ProviderError(error.what, why=error.why, hint=error.hint)


def _read_holding(file: Path) -> SeatState:
    try:
        return decode_json(file.read_bytes(), SeatState)
    except FileNotFoundError:
        return SeatState()
    except msgspec.MsgspecError as error:
        raise LabError(
            f"{file} cannot be read",
            why=str(error),
            hint=f"rm {file}   # then its students start the lab again",
        ) from None
