"""The command forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from labctl.cli.browser import open_in_browser
from labctl.cli.completion_values import complete_services
from labctl.cli.interrupt import close_at_interrupt, wait_until_interrupted
from labctl.cli.number_range import NumberRange
from labctl.cli.options import SCREEN, SERVER, json_option, open_lab, yes_option
from labctl.cli.tables import print_json, print_table
from labctl.cli.wrapping import print_message
from labctl.config.member_ids import list_lab_ids
from labctl.errors import UsageError
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from labctl.cli.screen import Screen
    from labctl.lab import Lab
    from labctl.services.several_forwards import ReadyForward

with lazy_imports(__name__):
    from labctl.services import background_forwards, lab_services, several_forwards
    from labctl.state import uses

# What is printed about a forward that another process holds.
_HOLDERS = {
    "background": "{0} is open in the background; to close it: labctl forward --stop {0}",
    "terminal": "{0} is open in another terminal; Ctrl-C there closes it",
}


@click.command("forward")
@click.argument("services", nargs=-1, shell_complete=complete_services)
@click.option(
    "--port",
    type=NumberRange(8000, 0, 65535),
    default=0,
    help="Use this local port; only with a single service.",
)
@click.option("--detach", "-d", is_flag=True, help="Keep the forward open in the background.")
@click.option("--open", "open_", is_flag=True, help="Open the service in the browser.")
@click.option("--list", "list_", is_flag=True, help="List the background forwards of all labs.")
@click.option(
    "--stop",
    is_flag=True,
    help="Stop the background forwards of this lab, or only those of SERVICES (names or IDs).",
)
@click.option(
    "--all", "all_", is_flag=True, help="With --stop: stop the background forwards of all labs."
)
@SERVER
@yes_option
@json_option
@click.pass_context
def forward_command(
    ctx: click.Context,
    services: tuple[str, ...],
    port: int,
    detach: bool,
    open_: bool,
    list_: bool,
    stop: bool,
    all_: bool,
    rank: int,
    yes: bool,
    json_: bool,
) -> None:
    """Forward a local port to each of SERVICES on the server.

    A service is tensorboard, jupyter, mlflow, a service from lab.yaml, or a port of the server.
    labctl starts the service if it does not run. What labctl serve has started is serve,
    serve-model, or serve-PORT for an image.

    \b
    labctl forward tensorboard jupyter
    labctl forward 8000 --detach
    labctl forward --list
    labctl forward --stop
    """
    if all_ and not stop:
        raise UsageError(
            "--all can only be used with --stop",
            why="--list always includes the background forwards of all labs"
            if list_
            else "it selects the background forwards to stop",
            hint="labctl forward --list" if list_ else "labctl forward --stop --all",
        )
    is_of_any_lab = list_ or (stop and (all_ or bool(services)))
    needs_record = list_ or stop
    lab = open_lab(
        ctx,
        yes=yes,
        quiet=json_,
        record_only=needs_record,
        needs_file=not is_of_any_lab,
        skips_faults=needs_record,
    )
    if stop:
        _stop_forwards(lab, services, all_, json_)
        return
    if list_:
        _list_forwards(lab, json_)
        return
    if not services:
        raise UsageError("no service was named", hint="labctl forward tensorboard jupyter")
    if port and len(services) > 1:
        raise UsageError(
            "--port can be used with a single service only", hint=f"labctl forward {services[0]}"
        )
    for service in services:  # before "no server", which a user would mend first and in vain
        lab_services.require_service(lab.config, service, services)
    ready = _ReadyUrls(ctx.meta[SCREEN], open_, json_)
    context = lab.select_server(rank).context
    if detach:
        with close_at_interrupt(ctx, "interrupted; to list what is open: labctl forward --list"):
            several_forwards.detach_forwards(context, services, port, ready.add)
        ready.print_json()
        return
    with (
        close_at_interrupt(ctx),
        uses.hold_use(lab.context.state, lab.id, "forward"),
        several_forwards.open_forwards(context, services, port, ready.add) as forwards,
    ):
        ready.print_json()
        keys = "Press Ctrl-C to close; --detach keeps forwards open" if forwards else ""
        wait_until_interrupted(forwards, keys)


class _ReadyUrls:
    """Prints each URL as soon as it is ready; --json prints all of them together at the end."""

    def __init__(self, screen: Screen, opens: bool, as_json: bool) -> None:
        self._screen = screen
        self._opens = opens
        self._as_json = as_json
        self._ready: list[ReadyForward] = []

    def add(self, ready: ReadyForward) -> None:
        self._ready.append(ready)
        if not self._as_json:
            self._screen.print_data(f"{ready.service}: {ready.url}")
            if text := _HOLDERS.get(ready.holder):
                print_message(text.format(ready.service))
        if self._opens:
            open_in_browser(ready.url)

    def print_json(self) -> None:
        if self._as_json:
            rows = [{"service": one.service, "url": one.url} for one in self._ready]
            print_json({"forwards": rows})


def _list_forwards(lab: Lab, json_: bool) -> None:
    """List the background forwards of all labs, each with the URL that opens it."""
    state = lab.context.state
    forwards = several_forwards.add_tokens(lab.context, background_forwards.list_forwards(state))
    if json_:
        print_json({"forwards": forwards})
    elif forwards:
        labs = {server.id: server.lab for server in state.list_servers()}
        rows = [(one.id, labs.get(one.server_id, ""), one.service, one.url) for one in forwards]
        print_table(rows, ("ID", "LAB", "SERVICE", "URL"), cut=False)  # a token is at its end
    else:
        print_message("No background forwards.")


def _stop_forwards(lab: Lab, names: tuple[str, ...], every_lab: bool, json_: bool) -> None:
    """Stop the background forwards of this lab or of all labs; with `names`, only those."""
    state = lab.context.state
    servers = [one for each in list_lab_ids(lab.id) for one in state.list_servers(each)]
    server_ids = None if every_lab else {one.id for one in servers}
    forwards = background_forwards.find_forwards(state, names, server_ids)
    for forward in forwards:
        background_forwards.stop_forward(state, forward)
    if json_:
        print_json({"forwards": forwards})
        return
    if forwards:
        rows = [(one.id, one.service, "stopped") for one in forwards]
        print_table(rows, ("ID", "SERVICE", "STATE"))
        return
    print_message("No background forwards.")
    if others := len(background_forwards.list_forwards(state)):
        print_message(f"Other labs have {others}. To stop all: labctl forward --stop --all")
