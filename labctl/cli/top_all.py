"""`labctl top` for all servers of a lab: one snapshot, JSON, or a live view."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli import top
from labctl.cli.options import stop_drawing
from labctl.cli.tables import print_json
from labctl.errors import AuthenticationError, HostKeyError
from labctl.insight.top import ServerMetrics, follow_always
from labctl.lazy import lazy_imports
from labctl.lifecycle import gang
from labctl.servers import gang as gang_servers
from labctl.text import price_or_free_text

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from labctl.cli.top_overview import ServerSamples
    from labctl.errors import LabError
    from labctl.lab import Lab
    from labctl.lifecycle.fleet import LabOutcome
    from labctl.servers.context import LabContext

with lazy_imports(__name__):
    from rich import console as rich_console
    from rich import live as rich_live

    from labctl.cli import top_overview

REFRESHES_PER_S = 2
HINT = f"{top.HINT}; --server N shows one"


def print_once(ctx: click.Context, lab: Lab, json_: bool) -> None:
    """Print one sample of each server, then exit as the first error of one that did not answer.

    LabError if no server answered.
    """
    outcomes = lab.top_all()
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if len(errors) == len(outcomes):
        raise errors[0]
    stop_drawing(ctx)
    if json_:
        servers = [_describe(outcome) for outcome in outcomes]
        print_json({"lab": lab.config.name, "lab_id": lab.id, "servers": servers})
    else:
        views = [_make_view(outcome.context) for outcome in outcomes]
        for view, outcome in zip(views, outcomes, strict=True):
            if outcome.value is not None:
                view.add(outcome.value)
            elif outcome.error is not None:
                view.cut = outcome.error.what
        console = rich_console.Console(highlight=False)
        bars = top.choose_bars(console.encoding)
        console.print(
            top_overview.render_overview(_make_title(lab), views, console.width, bars=bars)
        )
    if errors:
        ctx.exit(errors[0].exit_code)


def _describe(outcome: LabOutcome[ServerMetrics]) -> dict[str, object]:
    """Return the JSON of one server: its metrics are null if it did not answer."""
    context, error = outcome.context, outcome.error
    return {
        "rank": context.rank,
        "name": context.config.name,
        "server": outcome.value,
        "error": error.what if error else "",
    }


def show_live(lab: Lab) -> None:
    """Show all servers until the user ends the view. Each is shown again once it answers."""
    lab.context.get_server()  # without servers, say which command creates them
    console = rich_console.Console(highlight=False)
    screen = _OverviewScreen(lab, console)
    with rich_live.Live(
        console=console,
        screen=True,
        refresh_per_second=REFRESHES_PER_S,
        get_renderable=screen.render,
    ) as live:

        def show_help() -> None:
            screen.foot.switch()
            live.refresh()

        try:
            with top.read_view_keys(show_help):
                gang.call_for_each(screen.members, screen.follow)
        except KeyboardInterrupt:
            return
    if screen.errors:
        raise screen.errors[0]


class _OverviewScreen:
    """What the live view shows. Each server's thread calls `follow`, another one `render`."""

    def __init__(self, lab: Lab, console: Console) -> None:
        self.members = gang.build_members(lab.context)
        self._views: Sequence[ServerSamples] = [_make_view(one) for one in self.members]
        self._console = console
        self._lab = lab
        self._title = _make_title(lab)
        self._bars = top.choose_bars(console.encoding)
        self.foot = top.Foot(HINT)
        # of the servers that are not tried again
        self.errors: list[LabError] = []
        self._lock = threading.Lock()

    def follow(self, context: LabContext) -> None:
        """Show one server until it refuses the login or has another host key."""
        view = self._views[context.rank or 0]

        def add_sample(now: ServerMetrics) -> None:
            if view.cut:
                self._update_title()
            with self._lock:
                view.add(now)

        def show_cut(error: LabError, pause_s: float) -> None:
            self._require_server()
            self._update_title()
            with self._lock:
                view.history.add_gap()
                when = time.strftime("%H:%M:%S")
                view.cut = f"{when} {error.what}; retrying in {pause_s:g} s"

        try:
            follow_always(context, add_sample, show_cut)
        except (HostKeyError, AuthenticationError) as error:
            self.errors.append(error)
            with self._lock:
                view.cut = f"{error.what}; not tried again"

    def _require_server(self) -> None:
        """End the view with NotFoundError once none of the lab's servers is left to show."""
        servers = [self._lab.context.state.get_lab_server(one.lab_id) for one in self.members]
        if all(server is None or server.state == "stopped" for server in servers):
            self._lab.context.get_server()

    def _update_title(self) -> None:
        """Compute the title anew: a server that was replaced may have another price.

        Not while drawing: rich swallows errors there, and would query the records twice a second.
        """
        self._title = _make_title(self._lab)

    def render(self) -> RenderableType:
        width, height = self._console.size
        with self._lock:
            return top_overview.render_overview(
                self._title, self._views, width, height, foot=self.foot.text, bars=self._bars
            )


def _make_view(context: LabContext) -> ServerSamples:
    return top_overview.ServerSamples(context.rank or 0, context.config.name, context.lab_id)


def _make_title(lab: Lab) -> str:
    """Return the name of the lab, the number of its servers, and their price."""
    price = price_or_free_text(gang_servers.sum_prices(lab.context))
    return f"{lab.config.name}: {lab.config.server.count} servers, {price}"
