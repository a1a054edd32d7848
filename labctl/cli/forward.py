"""The command forward."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import click

from labctl.cli.options import json_option, open_lab, yes_option
from labctl.cli.screen import print_json, print_table
from labctl.errors import UsageError

if TYPE_CHECKING:
    from labctl.lab import Lab


@click.command("forward")
@click.argument("services", nargs=-1)
@click.option("--port", default=0, help="Use this local port; only with a single service.")
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
    yes: bool,
    json_: bool,
) -> None:
    """Forward a local port to each of SERVICES on the server.

    A service is tensorboard, jupyter, a service from lab.yaml, or a port of the server. labctl
    starts the service if it does not run.

    \b
    labctl forward tensorboard jupyter
    labctl forward 8000 --detach
    labctl forward --list
    labctl forward --stop
    """
    if all_ and not (stop or list_):
        raise UsageError(
            "--all can only be used with --stop",
            why="it selects the background forwards to stop",
            hint="labctl forward --stop --all",
        )
    lab = open_lab(ctx, yes=yes, quiet=json_)
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
    if detach:
        from labctl.services.lab_services import forward_detached

        detached = [forward_detached(lab.context, name, port) for name in services]
        _print_urls([(forward.service, forward.url) for forward in detached], open_, json_)
    else:
        from labctl.state.uses import hold_use

        with contextlib.ExitStack() as stack:
            stack.enter_context(hold_use(lab.context.state, lab.id, "forward"))
            forwards = [stack.enter_context(lab.forward(name, port=port)) for name in services]
            _print_urls([(one.service.name, one.url) for one in forwards], open_, json_)
            click.echo("Press Ctrl-C to close; --detach keeps forwards open", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                for forward in forwards:
                    forward.wait()


def _list_forwards(lab: Lab, json_: bool) -> None:
    """List the background forwards of all labs."""
    from labctl.services.background_forwards import list_forwards

    state = lab.context.state
    forwards = list_forwards(state)
    if json_:
        print_json({"forwards": forwards})
    elif forwards:
        labs = {server.id: server.lab for server in state.list_servers()}
        rows = [(one.id, labs.get(one.server_id, ""), one.service, one.url) for one in forwards]
        print_table(rows, ("ID", "LAB", "SERVICE", "URL"))
    else:
        click.echo("No background forwards.", err=True)


def _stop_forwards(lab: Lab, names: tuple[str, ...], every_lab: bool, json_: bool) -> None:
    """Stop the background forwards of this lab or of all labs; with `names`, only those."""
    from labctl.services.background_forwards import find_forwards, list_forwards, stop_forward

    state = lab.context.state
    server_ids = None if every_lab else {one.id for one in state.list_servers(lab.context.lab_id)}
    forwards = find_forwards(state, names, server_ids)
    for forward in forwards:
        stop_forward(state, forward)
    if json_:
        print_json({"forwards": forwards})
        return
    if forwards:
        rows = [(one.id, one.service, "stopped") for one in forwards]
        print_table(rows, ("ID", "SERVICE", "STATE"))
        return
    click.echo("No background forwards.", err=True)
    if others := len(list_forwards(state)):
        click.echo(f"Other labs have {others}. To stop all: labctl forward --stop --all", err=True)


def _print_urls(urls: list[tuple[str, str]], open_: bool, json_: bool) -> None:
    if json_:
        print_json({"forwards": [{"service": name, "url": url} for name, url in urls]})
    for name, url in urls:
        if not json_:
            click.echo(f"{name}: {url}")
        if open_:
            click.launch(url)
