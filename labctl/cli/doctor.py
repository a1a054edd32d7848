"""The command doctor."""

from __future__ import annotations

from pathlib import Path

import click

from labctl.cli.checks import print_checks
from labctl.cli.options import PROVIDER, json_option, open_lab
from labctl.cli.screen import Screen
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import find_lab, find_paths
from labctl.errors import ConfigError, LabError, UsageError
from labctl.events import report_wait
from labctl.lazy import lazy_imports
from labctl.model import Check

with lazy_imports(__name__):
    from labctl.cli import doctor_report
    from labctl.keeper import labs
    from labctl.lifecycle import doctor, machine_checks


@click.command("doctor")
@PROVIDER
@click.option(
    "--report",
    is_flag=False,
    flag_value="labctl-report.txt",
    metavar="[FILE]",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the result, without secrets and names, to a new file (labctl-report.txt).",
)
@json_option
@click.pass_context
def doctor_command(
    ctx: click.Context, provider: str | None, report: Path | None, json_: bool
) -> None:
    """Check this machine, the provider, the server and the keeper. Exits with 1 if a check fails.

    It needs no lab. Each line is ok, a warning (!) or an error (!!), with the command that fixes
    it; -- means not checked. For AWS, the clock is compared with that of checkip.amazonaws.com.

    \b
    labctl doctor
    labctl doctor --provider aws
    labctl doctor --report
    """
    if report is not None and report.exists():
        raise UsageError(
            f"{report} exists already",
            why="labctl doctor overwrites no file",
            hint="labctl doctor --report OTHER.txt",
        )
    checks = _run_checks(ctx, provider, quiet=json_)
    if json_:
        print_json({"checks": checks})
    else:
        print_checks(checks)
    if report is not None:
        _write_report(ctx, report, checks)
    ctx.exit(0 if all(check.ok for check in checks) else 1)


def _write_report(ctx: click.Context, file: Path, checks: list[Check]) -> None:
    text = doctor_report.build_report(checks, find_lab(Path(ctx.find_root().obj or ".")))
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except OSError as error:
        raise LabError(
            f"cannot write {file}",
            why=error.strerror or "",
            hint="labctl doctor --report ~/labctl-report.txt",
        ) from error
    print_message(f"wrote {file}; read it before you send it to anybody")


def _run_checks(ctx: click.Context, provider: str | None, *, quiet: bool) -> list[Check]:
    overrides = {"provider": provider} if provider else {}
    with report_wait(Screen(quiet=quiet), "checking this machine"):
        checks = machine_checks.list_machine_checks(find_paths())
    try:
        context = open_lab(ctx, quiet=quiet, overrides=overrides, needs_file=False).context
        with report_wait(context.reporter, "checking the provider, the server and the keeper"):
            checks += doctor.list_lab_checks(context)
    except ConfigError as error:
        checks.append(_describe_config_error(error))
    except LabError as error:
        checks.append(Check(name="lab", ok=False, detail=error.what, next=error.hint))
    return checks + doctor.check_own_keeper(find_paths(), labs.is_running)


def _describe_config_error(error: ConfigError) -> Check:
    """Name the lines with problems, and none of their values, which may be secret."""
    lines = sorted({problem.line for problem in error.problems if problem.line})
    places = f" in line {', '.join(map(str, lines))}" if lines else ""
    count = len(error.problems)
    return Check(
        name="lab.yaml",
        ok=False,
        detail=f"{count} problem{'s' if count != 1 else ''}{places}",
        next="labctl config",
    )
