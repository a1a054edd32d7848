"""How a command ends: error messages in three parts, and exit codes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from labctl.errors import (
    ConfigError,
    InterruptError,
    LabError,
    NotFoundError,
    SchedulerBusyError,
    UnknownNameError,
)
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    import shlex
    import traceback

    from labctl import config
    from labctl import text as texts
    from labctl.cli import usage_errors, wrapping

INTERRUPTED = 130
BUG = 70
# These commands exit with the code of the user's own command. A failure of labctl itself is then
# always OWN_FAILURE, as with ssh.
PASSES_CODES = {"run", "exec", "ssh", "attach", "course ssh"}
OWN_FAILURE = 255
# After an interruption, nothing of these commands is on a server or costs money.
WITHOUT_SERVER = {
    *("config", "cost", "docs", "doctor", "estimate", "images", "init", "inventory", "join"),
    *("offers", "report", "secret", "trust"),
    *("course budget", "course collect", "course comment", "course cost", "course due"),
    *("course excuse", "course grades", "course init", "course invite", "course mark"),
    *("course plan", "course regrades", "course roster", "course similarity"),
    "course statistics",
}
# These do what is left to do if they are typed again.
CONTINUED = {
    *("down", "move", "pull", "push", "start", "stop"),
    *("course bake", "course down", "course up"),
}


def clean(text: str) -> str:
    """Make control characters visible, so that names and logs cannot steer a terminal."""
    return "".join(
        c if c in "\n\t" or (c.isprintable() or c == " ") else f"\\x{ord(c):02x}" for c in text
    )


def print_error(error: LabError) -> None:
    """Print what failed, why, and the next command on standard error."""
    _print_below(f"{click.style('labctl:', fg='red')} ", 8, clean(error.what))
    if isinstance(error, ConfigError):
        for problem in error.problems:
            line_number = f"line {problem.line}: " if problem.line else ""
            path = f"{problem.path}: " if problem.path else ""
            _print_below("  ", 4, clean(line_number + path + problem.message))
    if error.why:
        _print_below("  ", 2, clean(error.why).rstrip("\n"))
    print_next(error.hint)


def _print_below(start: str, indent: int, text: str) -> None:
    """Print a text of one or more lines after `start`, the others after `indent` spaces."""
    for number, line in enumerate(wrapping.wrap_lines(text, indent)):
        click.echo(f"{' ' * indent if number else start}{line}", err=True)


def print_next(hint: str) -> None:
    """Print the commands of a hint on standard error."""
    if hint:
        text = "\n".join(format_next(hint))
        _print_below(f"  {click.style('next:', bold=True)} ", len("  next: "), text)


def format_next(hint: str) -> list[str]:
    """Return the lines that show a hint, without control characters."""
    return texts.hint_lines(clean(hint))


def run_and_exit(cli: Callable[..., Any]) -> int:
    """Run the command line and return the exit code of the process."""
    try:
        code = cli(standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except (click.Abort, KeyboardInterrupt) as interrupt:
        # The line of a Ctrl-C has ended already, but not that of a question.
        if not isinstance(interrupt.__cause__, KeyboardInterrupt):
            click.echo(err=True)
        _print_interrupted(_parse_command_name(sys.argv[1:]))
        return INTERRUPTED
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()  # it is the help of a group of commands
        return error.exit_code
    except click.ClickException as error:
        words = sys.argv[1:]
        print_error(usage_errors.convert_error(error, words, _parse_command_name(words)))
        return _own_code(error.exit_code)
    except InterruptError as error:
        leave_interrupted_line()
        print_error(error)
        return INTERRUPTED
    except SchedulerBusyError as error:
        print_error(error)
        return error.exit_code
    except (NotFoundError, UnknownNameError) as error:
        error.hint = _correct_words(sys.argv[1:], {error.typed: error.near}) or error.hint
        print_error(error)
        return _own_code(error.exit_code)
    except ConfigError as error:
        slips = {problem.typed: problem.near for problem in error.problems}
        error.hint = _correct_words(sys.argv[1:], slips) or error.hint
        print_error(error)
        return _own_code(error.exit_code)
    except LabError as error:
        print_error(error)
        return _own_code(error.exit_code)
    except SystemExit as end:
        # Only click exits by itself, with 1, when the reader of a pipe has closed it
        # (`labctl logs | head`). That is not a failure.
        if end.code == 1:
            return 0
        raise
    except Exception as error:  # a bug: print one line, keep the traceback in a file
        return _own_code(_report_bug(error))


def read_typed_command() -> str:
    """Return the command line as the user typed it, to be typed again."""
    return shlex.join(["labctl", *sys.argv[1:]])


def _correct_words(words: Sequence[str], slips: Mapping[str, str]) -> str:
    """Return the command line with the names that were probably meant; "" if that is unclear.

    `slips` has the name that was meant by each typed one. Words after `--` are the user's own
    command.
    """
    own = list(words).index("--") if "--" in words else len(words)
    corrected = list(words)
    for typed, near in slips.items():
        places = [at for at, word in enumerate(words[:own]) if _get_value(word) == typed]
        # A name that is on the line already was not meant once more.
        if not near or len(places) != 1 or near in map(_get_value, words[:own]):
            return ""
        place = places[0]
        corrected[place] = words[place].removesuffix(typed) + near
    return shlex.join(["labctl", *corrected]) if slips else ""


def _get_value(word: str) -> str:
    """Return the value in `--option=value`, or the word itself."""
    return word.partition("=")[2] if word.startswith("--") and "=" in word else word


def leave_interrupted_line(*, has_output: bool = False) -> None:
    """Erase the ^C that the terminal has written, so that no line stays blank.

    If the line `has_output` of a program, such as its progress bar, end the line instead.
    """
    if sys.stderr.isatty():
        click.echo("" if has_output else "\r\033[K", nl=has_output, err=True)


def _print_interrupted(command: str) -> None:
    """Print that the command was interrupted and, if it may have left a server, how to go on."""
    course = command.startswith("course ")
    program = "labctl course" if course else "labctl"
    if command in CONTINUED:
        hint = f"{read_typed_command()}   # continues\n{program} status   # shows what is running"
        print_error(InterruptError("interrupted", hint=hint))
        return
    click.echo("labctl: interrupted", err=True)
    if command in WITHOUT_SERVER:
        return
    left = "all servers" if course else "the server, if there is one"
    click.echo(f"  {program} status    show what is running", err=True)
    effect = f"download new results and remove {left}"
    click.echo(f"  {program} down      {effect}", err=True)


def _own_code(code: int) -> int:
    """Return the exit code of a failure of labctl itself."""
    return OWN_FAILURE if _parse_command_name(sys.argv[1:]) in PASSES_CODES else code


def _parse_command_name(words: list[str]) -> str:
    """Return the command among `words`: "run", "course ssh", or "" without one.

    The values of -C and --as are skipped.
    """
    start = ""
    remaining = iter(words)
    for word in remaining:
        if word in ("-C", "--as"):
            next(remaining, "")
        elif word == "course" and not start:
            start = "course "
        elif not word.startswith("-"):
            return start + word
    return start


def _report_bug(error: Exception) -> int:
    directory = config.find_paths().log_dir
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    log = directory / f"bug-{time.strftime('%Y%m%d-%H%M%S')}.log"
    log.write_text("".join(traceback.format_exception(error)))
    log.chmod(0o600)
    click.echo(
        f"labctl: internal error: {type(error).__name__}: {clean(str(error))[:300]}", err=True
    )
    click.echo(f"  full traceback: {log}", err=True)
    return BUG
