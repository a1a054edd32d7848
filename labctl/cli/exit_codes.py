"""How a command ends: errors told in three parts, exit codes of the house."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import click

from labctl.errors import ConfigError, InterruptError, LabError

INTERRUPTED = 130
BUG = 70
# These exit with the command's own code; labctl's own failure there is always 255, as ssh's.
PASSES_CODES = {"run", "exec", "ssh", "attach", "course ssh"}
OWN_FAILURE = 255


def clean(text: str) -> str:
    """`text` with control characters made visible: names and logs must not steer a terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == " ") else f"\\x{ord(c):02x}" for c in text
    )


def tell(error: LabError) -> None:
    """What failed, why, and what to type next, on standard error."""
    click.echo(f"{click.style('labctl:', fg='red')} {clean(error.what)}", err=True)
    if isinstance(error, ConfigError):
        for problem in error.problems:
            place = f"line {problem.line}: " if problem.line else ""
            path = f"{problem.path}: " if problem.path else ""
            click.echo(f"  {clean(place + path + problem.message)}", err=True)
    for line in clean(error.why).splitlines():
        click.echo(f"  {line}", err=True)
    if error.hint:
        click.echo(f"  {click.style('next:', bold=True)} {clean(error.hint)}", err=True)


def run_and_exit(cli: Callable[..., Any]) -> int:
    """The exit code of the whole process."""
    try:
        code = cli(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (click.Abort, KeyboardInterrupt):
        own = "labctl course" if _called(sys.argv[1:]).startswith("course ") else "labctl"
        said = f"labctl: interrupted; {own} status shows what there is, {own} down removes it"
        click.echo(f"\n{said}", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return _own(error.exit_code)
    except LabError as error:
        tell(error)
        return INTERRUPTED if isinstance(error, InterruptError) else _own(error.exit_code)
    except SystemExit as left:
        # Nothing else exits by itself here: click does, with 1, where the reader of a pipe has
        # left (`labctl logs | head`). That is no failure.
        if left.code == 1:
            return 0
        raise
    except Exception as error:  # a bug: say so shortly, keep the whole of it
        return _own(_bug(error))


def _own(code: int) -> int:
    return OWN_FAILURE if _called(sys.argv[1:]) in PASSES_CODES else code


def _called(words: list[str]) -> str:
    """The command among the words, a course's with its second word; the value of -C is none."""
    rest = iter(words)
    for word in rest:
        if word == "-C":
            next(rest, "")
        elif word == "course":
            return f"course {next(rest, '')}"
        elif not word.startswith("-"):
            return word
    return ""


def _bug(error: Exception) -> int:
    import traceback

    from labctl.config import paths

    directory = paths().log_dir
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = directory / f"bug-{time.strftime('%Y%m%d-%H%M%S')}.log"
    log.write_text("".join(traceback.format_exception(error)))
    log.chmod(0o600)
    click.echo(f"labctl: a bug: {type(error).__name__}: {clean(str(error))[:300]}", err=True)
    click.echo(f"  the whole of it: {log}", err=True)
    return BUG
