"""Buttons that do something: a page that says what it would do, and a form that does it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import RedirectResponse, Response

from labctl.config.scalars import parse_duration
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.web.formatting import span, usd
from labctl.web.request_state import form_of, lens_of, session_of
from labctl.web.view import Machine, Seat

if TYPE_CHECKING:
    from labctl.web.app import Dashboard

# More than a day at once is not a click.
LONGEST_S = 24 * 3600
MOST_WHY = 200


class Asked:
    """Extending a server's time, and cancelling a run."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def add_to(self, app: FastAPI) -> None:
        extend, cancel = "/seats/{key}/extend", "/seats/{key}/runs/{run}/cancel"
        app.add_api_route(extend, self.ask_extend, methods=["GET"], response_class=Response)
        app.add_api_route(extend, self.extend, methods=["POST"], response_class=Response)
        app.add_api_route(cancel, self.ask_cancel, methods=["GET"], response_class=Response)
        app.add_api_route(cancel, self.cancel, methods=["POST"], response_class=Response)

    async def ask_extend(self, request: Request, key: str, by: str = "1h") -> Response:
        board = self._dashboard
        snapshot = await board.feed.snapshot()
        seat = board.seat_of(snapshot, key)
        span_s = span_of(by)
        name = lens_of(request).seat(snapshot, seat)
        if seat.machine is None or seat.machine.state != "running":
            lines = [f"{name} has no server that is up: there is nothing to give more time to."]
            title = "No server is up"
            return board.told(request, snapshot, "told", title=title, lines=lines)
        lines = [
            f"The server then ends {span(span_s)} later, beyond the course's max_ttl too. "
            "For that long it does not end for being idle either.",
            *_price(seat, seat.machine, span_s, snapshot.at),
        ]
        return board.told(
            request,
            snapshot,
            "confirm",
            title=f"{span(span_s)} more for {name}?",
            lines=lines,
            action=f"/seats/{key}/extend",
            fields={"by": by},
            yes=f"Give {span(span_s)} more",
            why=True,
            back=f"/seats/{key}",
        )

    async def extend(self, request: Request, key: str) -> Response:
        form = form_of(request)
        board = self._dashboard
        seat = board.seat_of(await board.feed.snapshot(), key)
        span_s = span_of(form.get("by", ""))
        why = "".join(c for c in form.get("why", "") if c.isprintable())[:MOST_WHY]
        try:
            watch = await asyncio.to_thread(board.deeds.extend, seat.name, span_s, why)
        except LabError as error:
            return await self._back(request, key, "bad", _words(error))
        left = watch.get("ttl_left_s")
        said = f"{span(span_s)} more were given."
        if isinstance(left, int | float):
            said += f" The server ends in {span(left)}."
        return await self._back(request, key, "good", said)

    async def ask_cancel(self, request: Request, key: str, run: str) -> Response:
        board = self._dashboard
        snapshot = await board.feed.snapshot()
        seat = board.seat_of(snapshot, key)
        found = next((one for one in seat.runs if one.id == run), None)
        if found is None:
            raise NotFoundError("this seat has no such run")
        name = lens_of(request).seat(snapshot, seat)
        return board.told(
            request,
            snapshot,
            "confirm",
            title=f"Cancel the run {run} of {name}?",
            lines=[
                "It is told to stop and has a minute to write a checkpoint. "
                f"What it has written stays on the server, which goes on{_hourly(seat)}."
            ],
            action=f"/seats/{key}/runs/{run}/cancel",
            fields={},
            yes="Cancel the run",
            why=False,
            back=f"/seats/{key}",
        )

    async def cancel(self, request: Request, key: str, run: str) -> Response:
        board = self._dashboard
        seat = board.seat_of(await board.feed.snapshot(), key)
        try:
            ended, before = await asyncio.to_thread(board.deeds.cancel, seat.name, run)
        except LabError as error:
            return await self._back(request, key, "bad", _words(error))
        said = f"The run {run} had ended before" if before else f"The run {run} was cancelled"
        return await self._back(request, key, "good", f"{said}: {ended.told or ended.state}.")

    async def _back(self, request: Request, key: str, kind: str, text: str) -> Response:
        board = self._dashboard
        board.messages.setdefault(session_of(request).id, []).append((kind, text))
        await board.feed.renew()
        return RedirectResponse(f"/seats/{key}", 303)


def _price(seat: Seat, machine: Machine, span_s: int, now: float) -> list[str]:
    """What more time comes to, and whether the budget is enough up to the new end."""
    hourly = machine.usd_per_hour
    lines = [f"It costs {usd(hourly * span_s / 3600)} at most."] if hourly else []
    if seat.budget_usd is None:
        return lines
    lines.append(f"{usd(seat.spent_usd)} of {usd(seat.budget_usd)} is spent.")
    left_s = max(0.0, (machine.deadline_at or now) - now)
    whole = seat.spent_usd + hourly * (left_s + span_s) / 3600
    if hourly and whole > seat.budget_usd:
        lines.append(
            f"Up to the new end it would be {usd(whole)}: the budget is not enough, and this will "
            "be refused. Give more of it first: labctl course budget."
        )
    return lines


def _hourly(seat: Seat) -> str:
    price = seat.machine.usd_per_hour if seat.machine else 0.0
    return f", at {usd(price)} an hour" if price else ""


def span_of(text: str) -> int:
    """Seconds of `2h`; UsageError for what is none, or more than a day."""
    try:
        found = parse_duration(text)
    except ValueError as error:
        raise UsageError("no such span", why=str(error)) from None
    if not 0 < found <= LONGEST_S:
        raise UsageError(
            "at most a day at once is given here", why="labctl course extend gives more"
        )
    return found


def _words(error: LabError) -> str:
    return " ".join(filter(None, [f"{error.what}.", error.why]))
