"""Options that several commands share, and the function that opens the lab they work on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from labctl.cli.completion_values import complete_providers, complete_runs
from labctl.cli.number_range import NumberRange
from labctl.cli.screen import Screen
from labctl.config import LAB_FILE, copy_environment, find_lab, find_paths
from labctl.errors import ConfigError, LabError, UsageError
from labctl.events import Note, Reporter
from labctl.lazy import lazy_imports

if TYPE_CHECKING:
    from labctl.cli.timeline import Timeline
    from labctl.lab import Lab

with lazy_imports(__name__):
    from labctl import lab as lab_module
    from labctl import state as state_module
    from labctl.cli import timeline
    from labctl.servers import kept_disks, provider_choice
    from labctl.state import disks

# key of the command's Screen in click's context
SCREEN = "labctl.screen"
ACTING_PERSON = "labctl.acting_person"
# key of the Timeline of a command with --timings
TIMELINE = "labctl.timeline"
F = TypeVar("F", bound=Callable[..., Any])


def require_name(ctx: click.Context, parameter: click.Parameter, value: str) -> str:
    """Refuse a name that is there but empty: `"$RUN"` without a value is not the latest run."""
    source = ctx.get_parameter_source(parameter.name or "")
    if source is ParameterSource.COMMANDLINE and not value and not ctx.resilient_parsing:
        raise make_empty_name_error(parameter.make_metavar(ctx).strip("[]"))
    return value


def make_empty_name_error(name: str) -> UsageError:
    return UsageError(
        f"{name} is empty",
        why="perhaps a shell variable has no value; for the latest run, leave the name out",
        hint="labctl status --all   # lists the runs",
    )


RUN = click.argument("run", default="", callback=require_name, shell_complete=complete_runs)
PROVIDER = click.option(
    "--provider",
    shell_complete=complete_providers,
    help="Overrides server.provider in lab.yaml.",
)
AUTHORIZED_KEYS = click.option(
    "--authorized-keys",
    "keys_file",
    type=click.Path(dir_okay=False, path_type=Path),
    default=Path("~/.ssh/authorized_keys"),
    show_default=True,
    help="authorized_keys file of the account that students log in to.",
)
DISCARD = click.option(
    "--discard",
    is_flag=True,
    help="Remove without downloading. Results that exist only on a server are lost.",
)
FORGET = click.option(
    "--forget",
    is_flag=True,
    help="Only delete this machine's records of servers that your credentials cannot see. The "
    "servers keep running and billing.",
)
PROFILE = click.option(
    "--profile", default="", help="AWS profile from ~/.aws/config, for submissions in a bucket."
)
INSTALL = click.option("--install", is_flag=True, help="Write a systemd user unit for the keeper.")
SSH_AT_ONCE = click.option(
    "--at-once",
    default=32,
    show_default=True,
    type=NumberRange(8, 1, 256),
    help="With several servers: connect to this many at a time.",
)
SSH_JSON = click.option(
    "--json", "json_", is_flag=True, help="With several servers: print one JSON object."
)
SERVER = click.option(
    "--server",
    "rank",
    type=NumberRange(1, min=0),
    default=0,
    metavar="N",
    help="With several servers: use this one. The first is 0.",
)
TIMINGS = click.option(
    "--timings",
    is_flag=True,
    help="Print when each part (such as image, code, data) began and how long it took.",
)
FOLLOW = click.option("-f", "--follow", is_flag=True, help="Keep printing until the run ends.")
TAIL = click.option(
    "-n",
    "--tail",
    type=NumberRange(50, min=1),
    callback=lambda ctx, parameter, value: value or 0,
    metavar="LINES",
    help="Start with the last LINES lines.",
)


def yes_option(function: F) -> F:
    """Add `-y`."""
    return click.option("-y", "--yes", is_flag=True, help="Answer yes to every yes/no question.")(
        function
    )


def json_option(function: F) -> F:
    """Add `--json`."""
    return click.option(
        "--json", "json_", is_flag=True, help="Print one JSON object to standard output."
    )(function)


def need_options(function: F) -> F:
    """Add the options of `up` and `offers` that override the server section of lab.yaml."""
    for option in reversed(
        (
            PROVIDER,
            click.option("--gpu", help="GPU to use: auto, none, any, T4, A100:2, '>=24GB'."),
            click.option("--type", "type", help="Machine type of the provider, such as g5.xlarge."),
            click.option(
                "--min-gpu-memory", "gpu_memory", help="Minimum memory per GPU, for example 16GB."
            ),
            click.option(
                "--arch", type=click.Choice(["x86_64", "arm64"]), help="CPU architecture."
            ),
            click.option(
                "--work",
                type=click.Choice(["fp32", "fp16", "bandwidth"]),
                help="Rank offers by price for this GPU performance, not by price per hour.",
            ),
            click.option(
                "--spot",
                is_flag=False,
                flag_value="only",
                type=click.Choice(["never", "prefer", "only"]),
                help="Whether to use spot servers. Without a value: only spot servers.",
            ),
            click.option("--max-price", help="Maximum price in dollars per hour."),
        )
    ):
        function = option(function)
    return function


def open_lab(
    ctx: click.Context,
    *,
    yes: bool = False,
    quiet: bool = False,
    overrides: dict[str, str] | None = None,
    record_only: bool = False,
    needs_file: bool = True,
    everywhere: bool = False,
    timings: bool = False,
    rank: int | None = None,
    skips_faults: bool = False,
) -> lab_module.Lab:
    """Load the lab of -C's directory or of one above it, with events drawn on the screen.

    With `timings`, `find_timeline` has the times of its parts. With `rank`, the lab is about the
    server with that rank alone.

    With `skips_faults`, a mistake in lab.yaml is a warning; see `Lab.load`.
    An override that is None leaves lab.yaml's value. Expired disks are removed on the way, unless
    only the record is read.
    """
    set_overrides = {k: v for k, v in (overrides or {}).items() if v is not None}
    screen = Screen(yes=yes, quiet=quiet)
    ctx.meta[SCREEN] = screen
    ctx.call_on_close(screen.stop_drawing)
    reporter: Reporter = screen
    if timings:
        reporter = ctx.meta[TIMELINE] = timeline.Timeline(screen)
    directory = Path(ctx.find_root().obj or ".")
    try:
        lab = lab_module.Lab.load(
            directory,
            overrides=set_overrides,
            reporter=reporter,
            record_only=record_only,
            needs_file=needs_file,
            everywhere=everywhere,
            in_process=False,
            skips_faults=skips_faults,
        )
    except ConfigError as error:
        if not (find_lab(directory) / LAB_FILE).exists():
            _name_other_labs(error)
        raise
    if not record_only:
        _remove_expired(lab)
    return lab if rank is None else lab.select_server(rank)


def _name_other_labs(error: ConfigError) -> None:
    """Add to the error of a directory without a lab what lists the servers of the labs there are.

    Whoever wants to end a server may be in the wrong directory.
    """
    database = find_paths(copy_environment()).database
    if not database.exists():
        return
    with state_module.State(database) as state:
        has_servers = bool(state.list_servers())
    if has_servers:
        error.hint = f"labctl cost --all   # lists your labs with servers\n{error.hint}"


def _remove_expired(lab: Lab) -> None:
    """Remove the lab's expired disks, which cost money. A failure is a warning.

    It must not stop the command that was called.
    """
    names = disks.list_expired_providers(lab.context.state, lab.id)
    try:
        for name in names:
            kept_disks.remove_expired(provider_choice.select_provider(lab.context, name))
    except LabError as error:
        text = f"an expired disk could not be removed: {error.what}"
        lab.context.reporter.emit(Note(text=text, level="warning"))


def stop_drawing(ctx: click.Context) -> None:
    """Stop live drawing before other output begins."""
    ctx.meta[SCREEN].stop_drawing()


def has_blocker(ctx: click.Context) -> bool:
    """Whether the command has said that no run can start on the server yet."""
    return bool(ctx.meta[SCREEN].has_blocker)


def find_timeline(ctx: click.Context) -> Timeline | None:
    """Return the Timeline of the command's lab; None without --timings."""
    timeline: Timeline | None = ctx.meta.get(TIMELINE)
    return timeline


@contextmanager
def print_timings_of_failure(ctx: click.Context, *, quiet: bool) -> Iterator[None]:
    """Print the parts that have ended if the block fails, unless that was done or with `quiet`."""
    try:
        yield
    except LabError:
        timeline = find_timeline(ctx)
        if timeline is not None and not quiet:
            stop_drawing(ctx)
            timeline.print_once()
        raise


def list_timings(ctx: click.Context) -> Mapping[str, object]:
    """Return what --json adds with --timings."""
    timeline = find_timeline(ctx)
    return {"timings": timeline.summarize()} if timeline else {}
