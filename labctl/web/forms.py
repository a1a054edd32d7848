"""Actions of the dashboard: for each, a page that asks for confirmation, and the form it sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from fastapi import FastAPI, Request
from fastapi.responses import Response

from labctl.config.scalars import parse_duration
from labctl.errors import LabError, NotFoundError, UsageError
from labctl.text import price_text
from labctl.web.course_site import describe_failure
from labctl.web.formatting import span, usd
from labctl.web.mutations import BY
from labctl.web.request_state import form_of, pseudonyms_of, session_of
from labctl.web.view import SeatView, ServerView
from labctl.web.web_site import add_routes

if TYPE_CHECKING:
    from labctl.web.app import Dashboard

# longest extension by a click; labctl course extend allows more
LONGEST_S = 24 * 3600
# characters of a reason
MAX_WHY = 200


class ActionForms:
    """The routes that extend a server's time and cancel a run."""

    def __init__(self, dashboard: Dashboard) -> None:
        self._dashboard = dashboard

    def add_to(self, app: FastAPI) -> None:
        extend, cancel = "/seats/{key}/extend", "/seats/{key}/runs/{run}/cancel"
        add_routes(app, "GET", {extend: self.ask_extend, cancel: self.ask_cancel})
        add_routes(app, "POST", {extend: self.extend, cancel: self.cancel})

    async def ask_extend(self, request: Request, key: str, by: str = "1h") -> Response:
        dashboard = self._dashboard
        snapshot = await dashboard.feed.read_snapshot()
        seat = dashboard.find_seat(snapshot, key)
        span_s = parse_span(by)
        name = pseudonyms_of(request).seat(snapshot, seat)
        if seat.machine is None or seat.machine.state != "running":
            lines = [f"{name} has no running server to extend."]
            return await dashboard.render_message(request, "No running server", lines)
        lines = [
            f"The server will stop {span(span_s)} later, even beyond the course's max_ttl. "
            "During this time, it does not stop when it is idle.",
            *_price_lines(seat, seat.machine, span_s, snapshot.at),
        ]
        return await dashboard.render_question(
            request,
            f"Extend {name} by {span(span_s)}?",
            lines,
            f"/seats/{key}/extend",
            f"Extend by {span(span_s)}",
            back=f"/seats/{key}",
            wants_reason=True,
            by=by,
        )

    async def extend(self, request: Request, key: str) -> Response:
        form = form_of(request)
        dashboard = self._dashboard
        seat = dashboard.find_seat(await dashboard.feed.read_snapshot(), key)
        span_s = parse_span(form.get("by", ""))
        why = "".join(c for c in form.get("why", "") if c.isprintable())[:MAX_WHY]
        try:
            by = session_of(request).person or BY
            watch = await asyncio.to_thread(dashboard.actions.extend, seat.name, span_s, why, by)
        except LabError as error:
            return await self._redirect_with_message(request, key, "bad", describe_failure(error))
        message = f"Extended by {span(span_s)}."
        if watch and watch.ttl_left_s is not None:
            message += f" The server stops in {span(watch.ttl_left_s)}."
        return await self._redirect_with_message(request, key, "good", message)

    async def ask_cancel(self, request: Request, key: str, run: str) -> Response:
        dashboard = self._dashboard
        snapshot = await dashboard.feed.read_snapshot()
        seat = dashboard.find_seat(snapshot, key)
        if not any(one.id == run for one in seat.runs):
            raise NotFoundError("this seat has no run with this id")
        name = pseudonyms_of(request).seat(snapshot, seat)
        line = "The run gets SIGTERM and has a minute to write a checkpoint. Its files stay on the "
        line += f"server, which keeps running{_hourly_price_text(seat)}."
        title, action = f"Cancel run {run} of {name}?", f"/seats/{key}/runs/{run}/cancel"
        back = f"/seats/{key}"
        return await dashboard.render_question(
            request, title, [line], action, "Cancel the run", back=back
        )

    async def cancel(self, request: Request, key: str, run: str) -> Response:
        dashboard = self._dashboard
        seat = dashboard.find_seat(await dashboard.feed.read_snapshot(), key)
        try:
            by = session_of(request).person or BY
            ended_run, had_ended = await asyncio.to_thread(
                dashboard.actions.cancel, seat.name, run, by
            )
        except LabError as error:
            return await self._redirect_with_message(request, key, "bad", describe_failure(error))
        event = f"Run {run} had already ended" if had_ended else f"Run {run} was canceled"
        message = f"{event}: {ended_run.summary or ended_run.state_text}."
        return await self._redirect_with_message(request, key, "good", message)

    async def _redirect_with_message(
        self, request: Request, key: str, kind: str, text: str
    ) -> Response:
        return await self._dashboard.redirect_with_message(request, f"/seats/{key}", kind, text)


def _price_lines(seat: SeatView, machine: ServerView, span_s: int, now: float) -> list[str]:
    """Describe the price of an extension, and whether the budget covers the new end."""
    usd_per_hour = machine.usd_per_hour
    lines = [f"This costs at most {usd(usd_per_hour * span_s / 3600)}."] if usd_per_hour else []
    if seat.budget_usd is None:
        return lines
    lines.append(f"{usd(seat.spent_usd)} of {usd(seat.budget_usd)} is spent.")
    left_s = max(0.0, (machine.deadline_at or now) - now)
    total_usd = seat.spent_usd + usd_per_hour * (left_s + span_s) / 3600
    if usd_per_hour and total_usd > seat.budget_usd:
        lines.append(
            f"The cost at the new end would be {usd(total_usd)}, which exceeds the budget, so the "
            "extension will be refused. Raise the budget first: labctl course budget."
        )
    return lines


def _hourly_price_text(seat: SeatView) -> str:
    price = seat.machine.usd_per_hour if seat.machine else 0.0
    return f", at {price_text(price)}" if price else ""


def parse_span(text: str) -> int:
    """Parse `2h` into seconds; UsageError for other text and for more than a day."""
    try:
        span_s = parse_duration(text)
    except ValueError as error:
        raise UsageError("this is not a duration", why=str(error)) from None
    if not 0 < span_s <= LONGEST_S:
        raise UsageError(
            "an extension here is limited to a day", why="labctl course extend allows more"
        )
    return span_s
