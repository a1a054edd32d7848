"""keep: the watch over labs that were handed to this machine."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option

if TYPE_CHECKING:
    from collections.abc import Callable

    from labctl.config import Paths
    from labctl.state import State


@click.command("keep")
@click.option("--install", is_flag=True, help="Write a systemd user unit that runs it.")
@click.option("--list", "list_", is_flag=True, help="The labs in its care, and how they are.")
@click.option("--drop", metavar="LAB", help="End the keeping of LAB; its server stays as it is.")
@json_option
@click.option("--hello", metavar="WARD", hidden=True)
@click.option("--add", is_flag=True, hidden=True)
@click.option("--told", metavar="WARD", hidden=True)
@click.option("--give", nargs=2, metavar="WARD RUN", hidden=True)
@click.option("--attend", metavar="WARD", hidden=True)
@click.pass_context
def keep_command(
    ctx: click.Context,
    install: bool,
    list_: bool,
    drop: str | None,
    json_: bool,
    hello: str | None,
    add: bool,
    told: str | None,
    give: tuple[str, str] | None,
    attend: str | None,
) -> None:
    """Watch over the labs that were handed to this machine: recover, mirror, sweep.

    Runs in the foreground until Ctrl-C. Labs are handed over by `labctl run --recover --keeper
    HOST` on the laptop.

    \b
    labctl keep
    labctl keep --install
    labctl keep --list
    """
    desk = Desk()
    if hello:
        desk.answer(lambda: _hello(desk, hello))
    elif add:
        desk.answer(lambda: _add(desk))
    elif told:
        desk.answer(lambda: _told(desk, told))
    elif give:
        _give(desk, *give)
    elif attend:
        desk.answer(lambda: _attend(desk, attend))
    elif drop:
        _drop(desk, drop, json_)
    elif list_:
        _list(desk, json_)
    elif install:
        _install(desk)
    else:
        _watch(desk)
    ctx.exit(desk.code)


class Desk:
    """What every part of `keep` stands on."""

    def __init__(self) -> None:
        from labctl.config import environment, paths
        from labctl.state import State

        self.environ = environment()
        self.places: Paths = paths(self.environ)
        self.places.keep_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.state: State = State(self.places.database)
        self.code = 0

    def answer(self, deed: Callable[[], dict[str, Any]]) -> None:
        """For another labctl: one JSON object on standard output, an error too."""
        from labctl.errors import LabError
        from labctl.errors.replies import as_reply

        try:
            said = deed()
        except LabError as error:
            said, self.code = as_reply(error), error.exit_code
        import msgspec

        click.echo(json.dumps({"version": 1, **msgspec.to_builtins(said)}))

    def tell(self, name: str, text: str) -> None:
        """One line of the log."""
        import time

        from labctl.cli.exit_codes import clean

        about = f"{name}: " if name else ""
        for line in clean(text).splitlines():
            stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            sys.stderr.write(f"{stamp} {about}{line}\n")
        sys.stderr.flush()


def _watch(desk: Desk) -> None:
    import signal

    from labctl.keeper.labs import Keeper, only_keeper
    from labctl.keeper.workers import Attendants
    from labctl.lifecycle.kept_labs import wards

    attendants = Attendants()
    with only_keeper(desk.places):
        keeper = Keeper(
            desk.places, desk.state, desk.environ, tell=desk.tell, attend=attendants.attend
        )
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: keeper.stop.set())
        count = len(wards(desk.places))
        desk.tell("", f"labctl keep begins, with {count} lab{'' if count == 1 else 's'}")
        keeper.run()
        attendants.end_all()
        desk.tell("", "labctl keep ends; what it was at goes on with the next one")


def _hello(desk: Desk, name: str) -> dict[str, Any]:
    from labctl.keeper.labs import is_running
    from labctl.lifecycle.import_lab import know

    return {"known": know(desk.places, name, is_running(desk.places))}


def _add(desk: Desk) -> dict[str, Any]:
    from labctl.keeper.labs import Journal, is_running
    from labctl.lifecycle.import_lab import take_in

    journal = Journal(lambda name, text: click.echo(text, err=True), "")
    taken = take_in(
        sys.stdin.buffer,
        desk.places,
        desk.state,
        desk.environ,
        journal,
        running=is_running(desk.places),
    )
    return {"taken": taken}


def _told(desk: Desk, name: str) -> dict[str, Any]:
    from labctl.keeper.labs import is_running
    from labctl.lifecycle.kept_labs import known_runs, read_rounds, ward
    from labctl.state.ledgers import lines

    one = ward(desk.places, name)
    return {
        "told": {
            "lines": lines(desk.state, one.lab_id),
            "runs": known_runs(desk.state, one),
            "round": read_rounds(desk.places).get(one.name),
            "running": is_running(desk.places),
        }
    }


def _give(desk: Desk, name: str, run: str) -> None:
    """The index as one line of JSON, then a tar of what the other side does not have."""
    from labctl.errors import LabError
    from labctl.errors.replies import as_reply
    from labctl.lifecycle.kept_labs import directory, ward
    from labctl.runs.saved_copies import give, index_of

    out = sys.stdout.buffer
    try:
        have = json.loads(sys.stdin.buffer.readline() or b"{}")
        root = directory(desk.places, ward(desk.places, name).name)
        files = index_of(root, run)
    except LabError as error:
        out.write(json.dumps(as_reply(error)).encode() + b"\n")
        desk.code = error.exit_code
        return
    listed = {one.path: [one.size, one.sha256] for one in files}
    out.write(json.dumps({"version": 1, "files": listed}).encode() + b"\n")
    give(root, run, [one for one in files if have.get(one.path) != one.sha256], out)
    out.flush()


def _attend(desk: Desk, name: str) -> dict[str, Any]:
    """In a process of its own, which ends when the keeper does."""
    import os
    import signal
    import threading

    from labctl.keeper.labs import Journal
    from labctl.keeper.recovery_worker import attend
    from labctl.lifecycle.kept_labs import ground, ward

    def end_with_the_keeper() -> None:
        # Not through sys.stdin, whose lock must be free when the interpreter ends.
        while os.read(0, 4096):
            pass
        os._exit(143)

    # What is held is let go on the way out, a lease in the store above all: the next keeper need
    # not wait until that is stale.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if not sys.stdin.isatty():
        threading.Thread(target=end_with_the_keeper, daemon=True).start()
    one = ward(desk.places, name)
    journal = Journal(desk.tell, one.name)
    attend(ground(one, desk.places, desk.state, journal, desk.environ), one)
    return {}


def _drop(desk: Desk, name: str, json_: bool) -> None:
    from labctl.lifecycle.kept_labs import drop

    if json_:
        desk.answer(lambda: {"dropped": drop(desk.places, desk.state, name).name})
        return
    one = drop(desk.places, desk.state, name)
    click.echo(f"{one.name} is kept no longer; what it has at its provider stays as it is")


def _install(desk: Desk) -> None:
    import os
    import shutil
    from pathlib import Path

    from labctl.commands.systemd import UNIT, keep_unit
    from labctl.errors import LabError

    folder = desk.places.config_dir.parent / "systemd" / "user"
    found = [shutil.which(name) for name in ("ssh", "python3")]
    known = [str(Path(place).parent) for place in found if place]
    path = os.pathsep.join(dict.fromkeys([*known, "/usr/local/bin", "/usr/bin", "/bin"]))
    text = keep_unit([sys.executable, "-m", "labctl", "keep"], path=path)
    target = folder / f"{UNIT}.service"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    except OSError as error:
        raise LabError(
            f"cannot write {target}", why=error.strerror or "", hint=f"ls -ld {target.parent}"
        ) from error
    click.echo(f"{target} is written; next:")
    click.echo(f"  systemctl --user daemon-reload && systemctl --user enable --now {UNIT}")
    click.echo("  loginctl enable-linger     # so that it goes on when you log out")
    click.echo(f"  journalctl --user -u {UNIT} -f")


def _list(desk: Desk, json_: bool) -> None:
    from labctl.cli.screen import ago, as_json, table
    from labctl.keeper.labs import is_running, listed

    found, running = listed(desk.places, desk.state), is_running(desk.places)
    if json_:
        as_json({"running": running, "labs": found})
        return
    if not running:
        click.echo("labctl keep does not run here; next: labctl keep, or labctl keep --install")
    if not found:
        click.echo("no lab was handed to this machine")
        return
    rows = []
    for one in found:
        server, last = one["server"], one["round"]
        rows.append(
            (
                one["name"],
                ", ".join(_run_state(run) for run in one["runs"]),
                server.id if server else "no server",
                f"{ago(last.at)} ago" if last else "never",
                (last.error or last.state) if last else "",
            )
        )
    table(rows, ("LAB", "RUNS", "SERVER", "LOOKED", "FOUND"))


def _run_state(run: Any) -> str:
    return run if isinstance(run, str) else f"{run.id} {run.state}"
