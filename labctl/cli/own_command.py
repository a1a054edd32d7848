"""Commands of labctl that run a command of the user: `labctl run [OPTIONS] -- COMMAND`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from difflib import get_close_matches

import click

from labctl import shell
from labctl.errors import UsageError
from labctl.lazy import lazy_imports

with lazy_imports(__name__):
    from labctl.runs import missing_script

SEPARATOR = "--"
# the user's command in an error if none was typed
EXAMPLE = ("python", "train.py")
# least similarity of a misspelled option to the one that labctl suggests
_SIMILAR = 0.75
_RULE = "labctl's options come before `--`, your command and its options after it"


class OwnCommand(click.Command):
    """A command whose options come before `--`, and the user's command after it.

    An unknown option is an error that shows where it belongs. Otherwise a misspelled option would
    become the user's command.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        words = list(args)
        try:
            return self.parse_words(ctx, args)
        except click.NoSuchOption as error:
            raise self._make_error(ctx, words, error.option_name) from None

    def parse_words(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Set the parameters from the words of the command line."""
        return super().parse_args(ctx, args)

    def find_default(self, ctx: click.Context) -> tuple[str, ...]:
        """Return the user's command that an error shows if none was typed."""
        return EXAMPLE

    def names_run(self, ctx: click.Context, word: str) -> bool:
        """Whether this word before `--` is the name of a run, and not the value of an option."""
        return False

    def _make_error(self, ctx: click.Context, args: list[str], option: str) -> UsageError:
        before, after = split_words(args)
        ctx.ignore_unknown_options = True
        values, _, _ = self.make_parser(ctx).parse_args(list(before))
        loose = next(
            list(values[str(p.name)]) for p in self.params if isinstance(p, click.Argument)
        )
        kept = _subtract(before, loose)
        if after:  # the words before the unknown option name a run
            count = next(n for n, word in enumerate(loose) if word.startswith("-"))
            names, rest = loose[:count], loose[count:]
            if not names and self.names_run(ctx, rest[-1]):
                names, rest = rest[-1:], rest[:-1]
            kept, moved = [*kept, *names], [*after, *rest]
        else:
            default = self.find_default(ctx) if loose[0].startswith("-") else ()
            moved = [*missing_script.add_interpreter([*default, *loose])]
        call = ["labctl", str(ctx.info_name)]
        as_own = _render(*call, *kept, SEPARATOR, *moved)
        what = f"{_render(*call)} has no option {option}"
        usage = " ".join([*call, *self.collect_usage_pieces(ctx)])
        why = f"{_RULE}\nusage: {usage}"
        names = [name for param in self.get_params(ctx) for name in param.opts if name[0] == "-"]
        similar = next(iter(get_close_matches(option, names, n=1, cutoff=_SIMILAR)), "")
        if not similar:
            return UsageError(what, why=why, hint=as_own)
        words = [similar + w[len(option) :] if w.startswith(option) else w for w in before]
        meant = _render(*call, *words, *([SEPARATOR, *after] if after else []))
        hint = f"{meant}\n{as_own}   # instead, for an option of your command"
        return UsageError(f"{what}; did you mean {similar}?", why=why, hint=hint)


def require_program(
    call: str,
    command: Sequence[str],
    find_example: Callable[[], Sequence[str]] = lambda: EXAMPLE,
) -> None:
    """UsageError if the user's command begins with an option instead of a program.

    `find_example` returns the command that the error shows with that option.
    """
    if command and command[0].startswith("-"):
        raise UsageError(
            f"{command[0]} is not a program",
            why="the words after `--` must be a complete command: a program and its options",
            hint=f"{call} -- {_render(*find_example(), *command)}",
        )


def _render(*words: str) -> str:
    return shell.command(*words).render()


def split_words(args: list[str]) -> tuple[list[str], list[str]]:
    """Return the words before and after `--`."""
    cut = args.index(SEPARATOR) if SEPARATOR in args else len(args)
    return args[:cut], args[cut + 1 :]


def _subtract(words: Sequence[str], taken: Sequence[str]) -> list[str]:
    """Return `words` without `taken`, which are some of them in the same order."""
    left = list(taken)
    return [word for word in words if not (left and word == left[0] and left.pop(0))]
