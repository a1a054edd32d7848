"""Output of `labctl ssh --all`: the lines of each server after its name, then the failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import Paths, find_paths
from labctl.lazy import lazy_imports
from labctl.state import State
from labctl.text import next_lines

if TYPE_CHECKING:
    from labctl.errors.subject import Subject
    from labctl.model import Server
    from labctl.servers.fan_out import ServerResult

with lazy_imports(__name__):
    from labctl.servers import connections, fan_out

OWN_FAILURE = 255


def run_on_all_servers(line: str, at_once: int, json_: bool) -> int:
    """Run `line` on the servers of all labs and return the exit code. It needs no lab directory."""
    user_paths = find_paths()
    with State(user_paths.database) as state:
        servers = [(server.alias, server) for server in fan_out.list_running_servers(state)]
    return run_on_servers(user_paths, servers, line, at_once, json_)


def run_on_servers(
    user_paths: Paths,
    named: Sequence[tuple[str, Server]],
    line: str,
    at_once: int,
    json_: bool,
    subjects: Sequence[Subject] = (),
) -> int:
    """Run `line` on these servers, print the results after their names, return the exit code."""
    width = max(len(name) for name, _ in named)
    answers = fan_out.run_on_all(
        connections.Connections(user_paths.ssh_dir, user_paths.user_ssh_config),
        [server for _, server in named],
        line,
        names=[name for name, _ in named],
        subjects=subjects,
        at_once=at_once,
        on_result=(lambda answer: None) if json_ else (lambda answer: print_answer(answer, width)),
    )
    if json_:
        print_json({"servers": answers})
    else:
        print_message(summary_text(answers))
    return exit_code(answers)


def print_answer(answer: ServerResult, width: int) -> None:
    """Print a server's lines, each after its name. Errors go to standard error."""
    name = answer.alias.ljust(width)
    for text, err in ((answer.stdout, False), (answer.stderr, True), (answer.error, True)):
        for line in text.splitlines():
            click.echo(f"{name}  {clean(line)}", err=err)
    for line in answer.why.splitlines():
        print_message(f"{name}    {clean(line)}")


def summary_text(answers: Sequence[ServerResult]) -> str:
    """Write one line with the number of successes, and one for each server that failed."""
    done = sum(answer.code == 0 for answer in answers)
    lines = [f"succeeded on {done} of {len(answers)} servers"]
    for answer in answers:
        if answer.code is None:
            lines.append(f"  {answer.alias}: not reached")
            lines += [f"  {line}" for line in next_lines(answer.hint or "labctl doctor")]
        elif answer.code:
            lines.append(f"  {answer.alias}: exit code {answer.code}")
    return "\n".join(lines)


def exit_code(answers: Sequence[ServerResult]) -> int:
    """Return the largest exit code of the servers; 255 if a server was not reached."""
    if any(answer.code is None for answer in answers):
        return OWN_FAILURE
    return max(answer.code or 0 for answer in answers)
