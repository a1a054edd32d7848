"""status, logs, forward."""

from __future__ import annotations

import contextlib
import shlex
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, open_lab, yes_option

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.model import Run, Server
    from labctl.state.disks import KeptDisk


@click.command("status")
@click.option("--refresh", "-r", is_flag=True, help="Ask the provider and the server now.")
@click.option("--why", is_flag=True, help="What the server's watchdog decided last, and why.")
@json_option
@click.pass_context
def status_command(ctx: click.Context, refresh: bool, why: bool, json_: bool) -> None:
    """Server, runs, clocks and dollars; from the record, or with --refresh as they are now.

    \b
    labctl status --refresh
    labctl status --why
    """
    from labctl.cli.screen import as_json

    said = _status(ctx, refresh or why, why, json_)
    if json_:
        as_json(said)
        return
    server: Server | None = said["server"]
    if server is None:
        click.echo(f"{said['lab']}: no server. Next: labctl up")
        for why in list(said["ended"].values())[:1]:
            click.echo(f"  its last server ended: {why}")
    else:
        _draw_server(said, server)
    if said["keeper"]:
        click.echo(f"  looked after by the keeper at {said['keeper']}")
    _draw_kept(said["kept"])
    if why:
        _draw_why(said["watch"])
    elif said["runs"]:
        _draw_runs(said["runs"], server, said["now"], said["ended"])


def _status(ctx: click.Context, asks: bool, why: bool, json_: bool) -> dict[str, Any]:
    lab = open_lab(ctx, quiet=json_, record_only=not asks)
    if asks or not lab.keeper:
        return lab.status(refresh=asks, why=why)
    # What this machine last saw is not how the lab is: somebody else looks after it.
    from labctl.errors import BusyError, ProviderError

    lab = open_lab(ctx, quiet=json_)
    try:
        return lab.status(refresh=True)
    except (BusyError, ProviderError) as error:
        from labctl.cli.exit_codes import clean

        click.echo(f"as recorded here, since {clean(error.what)}", err=True)
        return {**lab.status(), "keeper": lab.keeper}


def _draw_kept(found: list[KeptDisk]) -> None:
    if found:
        from labctl.cli.exit_codes import clean
        from labctl.servers.disks import told

        for one in found:
            click.echo(f"  {clean(told(one))}")


def _draw_server(said: dict[str, Any], server: Server) -> None:
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import size, span

    state = {True: server.state, False: "NOT REACHABLE", None: f"{server.state} (as recorded)"}
    kind = clean(f"{server.provider} {server.offer.type}")
    click.echo(f"{clean(server.alias)}: {state[said['reachable']]}, {kind}")
    if said["why"]:
        click.echo(f"  {clean(said['why'])}")
    price = server.offer.price_usd_per_hour
    cost = f"{said['cost_usd']:.2f} dollars so far at {price:.2f} an hour" if price else "no cost"
    click.echo(f"  up {span(said['clocks']['up_s'])}, {cost}")
    _draw_clocks(said, price)
    if said["disk"]:
        click.echo(f"  disk {size(said['disk']['free_bytes'])} free")
    click.echo(f"  ssh {server.alias}")


def _draw_clocks(said: dict[str, Any], price: float) -> None:
    """When the server ends and by what, as its watchdog said, or what nobody watches."""
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import ago, span

    watch, clocks = said["watch"], said["clocks"]
    if not watch:
        if any(clocks[key] for key in ("ttl_s", "idle_s", "budget_usd")):
            click.echo("  its clocks are not known here; next: labctl status --refresh")
        return
    gone_s = said["now"] - said["watched_at"]
    left = {
        name: watch[key] - gone_s
        for name, key in (("ttl", "ttl_left_s"), ("idle", "idle_left_s"))
        if watch.get(key) is not None
    }
    told = [f"{name} {span(seconds)} left" for name, seconds in left.items()]
    if watch.get("budget_left_s") is not None and price:
        told.append(f"{(watch['budget_left_s'] - gone_s) / 3600 * price:.2f} dollars left")
    if told:
        heard = f" (heard {ago(said['watched_at'], said['now'])} ago)" if gone_s > 5 else ""
        click.echo(f"  {', '.join(told)}{heard}")
    if not watch.get("alive"):
        click.echo(click.style("  its watchdog does not run; next: labctl up", fg="red"))
    if watch.get("busy"):
        for number, one in enumerate(watch["busy"][:3]):
            click.echo(f"  {' ' * 9 if number else 'not idle:'} {clean(one)}")
    if watch.get("mirror"):
        _draw_mirror(watch["mirror"], said["now"])
    for one in watch.get("cannot") or ():
        click.echo(click.style(f"  {clean(one)}", fg="yellow"))


def _draw_mirror(mirror: dict[str, Any], now: float) -> None:
    """When all was last in the store, or why it is not."""
    from labctl.cli.exit_codes import clean
    from labctl.cli.screen import ago, size

    when = f"{ago(mirror['at'], now)} ago" if mirror["at"] else "never yet"
    if not mirror["failed"]:
        click.echo(f"  mirrored {when}")
        return
    behind = f", {size(mirror['behind_bytes'])} behind" if mirror["behind_bytes"] else ""
    text = f"  not mirrored (last {when}{behind}), tried again: {clean(mirror['failed'])}"
    click.echo(click.style(text, fg="yellow"))


def _draw_why(watch: dict[str, Any]) -> None:
    import time

    from labctl.cli.screen import table

    rows = [
        (time.strftime("%m-%d %H:%M:%S", time.localtime(one["at"])), one["what"], one["why"])
        for one in watch.get("decisions", [])
    ]
    click.echo()
    if rows:
        table(rows, ("WHEN", "DECIDED", "WHY"))
    else:
        click.echo("no watchdog has decided anything")


def _draw_runs(runs: list[Run], server: Server | None, now: float, ended: dict[str, str]) -> None:
    from labctl.cli.screen import table

    def row(run: Run) -> tuple[str, ...]:
        if run.ended or (server is not None and run.server_id == server.id):
            return run.id, run.state, _progress(run), _how_long(run, now), run.told or _line(run)
        seen = _how_long(run, run.seen_at or now)
        why = ended.get(run.server_id)
        said = f"its server ended: {why}" if why else "its server ended, and nobody saw how"
        return run.id, "not known", _progress(run), seen, said

    rows = [row(run) for run in runs[:15]]
    click.echo()
    table(rows, ("RUN", "STATE", "STEPS", "TIME", "SAID"))
    if len(runs) > 15:
        click.echo(f"and {len(runs) - 15} earlier (--json lists all)")
    for run in runs[:15]:
        if run.state == "running" and run.gpu_lost_at is not None:
            text = f"{run.id} has lost its GPU; next: labctl explain {run.id}"
            click.echo(click.style(text, fg="red"))


def _line(run: Run) -> str:
    return shlex.join(run.command)


def _progress(run: Run) -> str:
    step, total = run.progress.get("step"), run.progress.get("total_steps")
    if step is None:
        return "-"
    return f"{step:.0f}/{total:.0f}" if total else f"{step:.0f}"


def _how_long(run: Run, now: float) -> str:
    from labctl.cli.screen import span

    start = run.started_at or run.created_at
    if not start:
        return "-"
    end = run.ended_at or (run.seen_at if run.ended else now)
    return span(end - start)


@click.command("logs")
@click.argument("run", default="")
@click.option("-f", "--follow", is_flag=True, help="Go on until the run ends.")
@click.option(
    "-n", "--tail", default=0, metavar="LINES", help="Begin so many lines before the end."
)
@click.pass_context
def logs_command(ctx: click.Context, run: str, follow: bool, tail: int) -> None:
    """What RUN (the latest) printed.

    \b
    labctl logs -f
    labctl logs -n 50
    """
    from labctl.cli.exit_codes import clean
    from labctl.cli.runs import write_log
    from labctl.runs import runs

    lab = open_lab(ctx)
    server = _server_with_logs(lab, run)
    found = runs.latest(lab.ground, run)
    if server is None:
        from labctl.lifecycle.reconcile import log_elsewhere

        write_log(_last_lines(log_elsewhere(lab.ground, found.id), tail))
        click.echo("the server has ended; this is what was saved or pulled", err=True)
        return
    try:
        seen = runs.watch(lab.ground, server, found.id, tail=tail, follow=follow, on_log=write_log)
    except KeyboardInterrupt:
        click.echo(f"\nrun {found.id} goes on; labctl cancel {found.id} ends it", err=True)
        ctx.exit(130)
    if seen.ended:
        click.echo(f"run {seen.id}: {clean(seen.told)}", err=True)


def _server_with_logs(lab: Lab, run: str) -> Server | None:
    """The lab's server; None where it has ended, and the run's log was saved or pulled."""
    from labctl.errors import NotFoundError

    if lab.keeper:
        from labctl.lifecycle.reconcile import come_back

        come_back(lab.ground)
    try:
        return lab.ground.server()
    except NotFoundError:
        from labctl.lifecycle import reconcile
        from labctl.runs import runs

        here = reconcile.log_here(lab.ground, runs.latest(lab.ground, run).id).is_file()
        if not (here or lab.keeper or lab.config.store):
            raise
        return None


def _last_lines(text: bytes, count: int) -> bytes:
    return b"".join(text.splitlines(keepends=True)[-count:]) if count else text


@click.command("forward")
@click.argument("services", nargs=-1)
@click.option("--port", default=0, help="The local port to use, if there is one service.")
@click.option("--detach", "-d", is_flag=True, help="Keep it after this terminal closes.")
@click.option("--open", "open_", is_flag=True, help="Open the browser.")
@click.option("--list", "list_", is_flag=True, help="What is kept by --detach.")
@click.option("--stop", is_flag=True, help="End those named, or all.")
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
    yes: bool,
    json_: bool,
) -> None:
    """SERVICES on localhost: tensorboard, jupyter, one from lab.yaml, or a port of the server.

    \b
    labctl forward tensorboard jupyter
    labctl forward 8000 --detach
    labctl forward --list
    """
    from labctl.errors import UsageError

    lab = open_lab(ctx, yes=yes, quiet=json_)
    if list_ or stop:
        _kept_forwards(lab, services, stop, json_)
        return
    if not services:
        raise UsageError("which service?", hint="labctl forward tensorboard jupyter")
    if port and len(services) > 1:
        raise UsageError("--port goes with one service", hint=f"labctl forward {services[0]}")
    if detach:
        from labctl.services.lab_services import forward_detached

        made = [forward_detached(lab.ground, name, port) for name in services]
        _show([(one.service, one.url) for one in made], open_, json_)
    else:
        with contextlib.ExitStack() as opened:
            here = [opened.enter_context(lab.forward(name, port=port)) for name in services]
            _show([(one.service.name, one.url) for one in here], open_, json_)
            click.echo("Ctrl-C ends; --detach keeps them open", err=True)
            with contextlib.suppress(KeyboardInterrupt):
                for one in here:
                    one.wait()


def _kept_forwards(lab: Lab, services: tuple[str, ...], stop: bool, json_: bool) -> None:
    """List or end what --detach keeps."""
    from labctl.cli.screen import as_json, table
    from labctl.services.forwards import list_forwards, stop_forward

    state = lab.ground.state
    if stop:
        kept = [one for name in services or ("all",) for one in stop_forward(state, name)]
    else:
        kept = list_forwards(state)
    if json_:
        as_json({"forwards": kept})
    elif kept:
        rows = [(one.id, one.service, "stopped" if stop else one.url) for one in kept]
        table(rows, ("ID", "SERVICE", "URL"))
    else:
        click.echo("no forwards are kept", err=True)


def _show(urls: list[tuple[str, str]], open_: bool, json_: bool) -> None:
    from labctl.cli.screen import as_json

    if json_:
        as_json({"forwards": [{"service": name, "url": url} for name, url in urls]})
    for name, url in urls:
        if not json_:
            click.echo(f"{name}: {url}")
        if open_:
            click.launch(url)
