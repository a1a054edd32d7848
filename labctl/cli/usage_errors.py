"""What click finds wrong in a command line, as an error of labctl in three parts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from labctl.errors import UsageError

GLOBAL_OPTION = "-C"


def convert_error(error: click.ClickException, words: Sequence[str], command: str) -> UsageError:
    """Return click's error about the `words` of the command line as labctl's own.

    `command` is the name of the command, for an error that does not know it.
    """
    ctx = error.ctx if isinstance(error, click.UsageError) else None
    call = _name_call(ctx, command)
    usage = "usage: " + " ".join([call, *ctx.command.collect_usage_pieces(ctx)]) if ctx else ""
    help_line = f"{call} --help"
    if isinstance(error, click.NoSuchOption):
        return _make_unknown_option_error(error, words, call, usage)
    if isinstance(error, click.BadOptionUsage):
        name = error.option_name
        return UsageError(f"{name} needs a value", hint=f"{help_line}   # describes {name}")
    if isinstance(error, click.MissingParameter):
        name = _name_parameter(error, words)
        return UsageError(f"{call} needs {name}", why=usage, hint=help_line)
    if isinstance(error, click.BadParameter):
        name = _name_parameter(error, words)
        hint = f"{help_line}   # describes {name}"
        return UsageError(f"{name} is not valid", why=_lower(error.message), hint=hint)
    return UsageError(f"{call}: {_lower(error.message)}", why=usage, hint=help_line)


def _make_unknown_option_error(
    error: click.NoSuchOption, words: Sequence[str], call: str, usage: str
) -> UsageError:
    option = error.option_name
    if option == GLOBAL_OPTION and option in words:
        place = words.index(option)
        moved, others = words[place : place + 2], [*words[:place], *words[place + 2 :]]
        line = shlex.join(["labctl", *(moved if len(moved) > 1 else [option, "DIR"]), *others])
        return UsageError(f"{option} comes before the command", why=usage, hint=line)
    similar = error.possibilities[0] if error.possibilities else ""
    places = [at for at, word in enumerate(words) if word.partition("=")[0] == option]
    hint = f"{call} --help"
    if similar and len(places) == 1:
        corrected = list(words)
        corrected[places[0]] = similar + words[places[0]].removeprefix(option)
        hint = shlex.join(["labctl", *corrected])
    question = f"; did you mean {similar}?" if similar else ""
    return UsageError(f"{call} has no option {option}{question}", why=usage, hint=hint)


def _name_call(ctx: click.Context | None, command: str) -> str:
    """Return the program and the command, such as `labctl up`; the program may be `python -m`."""
    if ctx is not None:
        command = ctx.command_path.removeprefix(ctx.find_root().command_path).strip()
    return f"labctl {command}".strip()


def _name_parameter(error: click.BadParameter, words: Sequence[str]) -> str:
    """Return the option or the argument that the error is about, as a user types it."""
    if error.param_hint is not None:
        hint = error.param_hint
        return hint if isinstance(hint, str) else " or ".join(hint)
    if error.param is None:
        return "the command line"
    if isinstance(error.param, click.Argument) and error.ctx is not None:
        return error.param.make_metavar(error.ctx).strip("[]")
    names = error.param.opts
    return next((name for name in names if any(word.startswith(name) for word in words)), names[-1])


def _lower(message: str) -> str:
    """Return a sentence of click as a part of labctl's errors, which begin small."""
    text = message.rstrip(".")
    return text[:1].lower() + text[1:]
