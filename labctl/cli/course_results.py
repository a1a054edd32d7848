"""Results of the commands that change a course's servers, as texts."""

from __future__ import annotations

from collections.abc import Sequence

import click

from labctl.cli.exit_codes import clean, print_next
from labctl.cli.starter_output import count_files
from labctl.cli.wrapping import print_message
from labctl.courses.leftovers import ProviderLeftovers
from labctl.courses.seat_results import FailureText, SeatFailure, SeatResult
from labctl.courses.servers import SeatOutcome
from labctl.courses.starters import PublishedStarter
from labctl.courses.teardown import GIVE_UP, EndProof, SeatEnding
from labctl.errors.subject import Subject
from labctl.model import Server
from labctl.servers import disks
from labctl.sync.home_files import SAVED
from labctl.text import count_text, names_text, price_text

# For this subject, equal failures of several seats have equal texts.
EACH = Subject("seat", "each")
MAX_NAMES = 8


def print_up(outcomes: list[SeatOutcome]) -> None:
    ready = [outcome for outcome in outcomes if not outcome.error and outcome.server is not None]
    created = sum(outcome.made for outcome in ready)
    price = sum(outcome.server.offer.price_usd_per_hour for outcome in ready if outcome.server)
    cost = f", {price_text(price)} together" if price else ""
    verb = "is" if 1 in (len(ready), len(outcomes)) else "are"
    click.echo(
        f"{len(ready)} of {count_text(len(outcomes), 'seat')} {verb} ready, {created} new{cost}."
    )
    _print_unready([one.server for one in outcomes if one.error and one.server is not None])
    print_failures(outcomes)
    if len(ready) == len(outcomes):
        click.echo("  labctl course status       show the state of every seat")
        click.echo("  labctl course ssh NAME     open a shell on a student's server")
        click.echo("  labctl course down         remove the servers after class")


def _print_unready(servers: list[Server]) -> None:
    """Warn of servers that exist, and may cost money, though their seats are not ready."""
    live = [server for server in servers if server.state not in ("ending", "terminated", "stopped")]
    if not live:
        return
    price = sum(server.offer.price_usd_per_hour for server in live)
    cost = f", at {price_text(price)}" if price else ""
    count = f"{len(live)} servers are" if len(live) > 1 else "one server is"
    text = f"{count} running but not ready{cost}; to remove servers: labctl course down"
    print_message(text, fg="yellow")


def print_failures(outcomes: Sequence[SeatResult]) -> None:
    """Print failures on standard error; seats with the same failure share one entry."""
    groups: dict[FailureText, list[tuple[str, SeatFailure]]] = {}
    for outcome in outcomes:
        if outcome.failure:
            key = outcome.failure.render(EACH)
            groups.setdefault(key, []).append((outcome.seat, outcome.failure))
    for group in groups.values():
        seats, failures = zip(*group, strict=True)
        subjects = [failure.subject for failure in failures]
        failure = failures[0].render(subjects[0] if len(subjects) == 1 else EACH)
        names = click.style(clean(names_text(seats, MAX_NAMES)), fg="red")
        print_message(f"{names}: {clean(failure.what)}")
        for line in failure.why.splitlines():
            print_message(f"  {clean(line)}")
        together = Subject("seat", ",".join(subject.seat for subject in subjects))
        print_next(failures[0].render(together).hint)


def print_down(endings: list[SeatEnding]) -> None:
    ended = [ending for ending in endings if ending.ended]
    files = sum(ending.saved.files for ending in endings)
    edits = sum(ending.saved.edits for ending in endings)
    home_files = sum(ending.saved.home_files for ending in endings)
    edited = f", and {count_text(edits, 'file')} edited on the servers" if edits else ""
    if not endings:
        click.echo("No seat had a server.")
        return
    print_message(
        f"Removed {len(ended)} of {count_text(len(endings), 'server')}; "
        f"downloaded {count_text(files, 'file')} of runs{edited}.",
        err=False,
    )
    if home_files:
        click.echo(
            f"Downloaded {count_text(home_files, 'file')} from home directories to "
            f".course/seats/NAME/{SAVED}/."
        )
    print_failures(endings)


def print_proof(proof: EndProof) -> None:
    for name, result in proof.collected.items():
        click.echo(f"{clean(name)}: {clean(result)}")
    if proof.endings:
        print_down(list(proof.endings))
    click.echo(f"revoked {count_text(proof.revoked_keys, 'key')} of students")
    for left in proof.left:
        if left.error:
            print_message(f"{left.provider} could not be checked: {clean(left.error)}")
        for server in left.servers:
            owner = _owner_text(left, server.lab_id)
            price = price_text(server.offer.price_usd_per_hour)
            click.echo(f"still there{owner}: {clean(server.id)}, {price}")
        for resource in left.resources:
            owner = _owner_text(left, resource.lab_id)
            price = disks.monthly_cost_text(resource)
            click.echo(f"still there{owner}: {clean(resource.kind)} {clean(resource.id)}, {price}")
        if not (left.error or left.servers or left.resources):
            click.echo(f"{left.provider} has nothing of this course in any region")
    if proof.is_clean:
        click.echo(click.style("Nothing of this course is billing.", fg="green"))
    else:
        print_message("Something may still be billing.", fg="red")
        for command in _next_commands(proof):
            print_next(command)


def _owner_text(left: ProviderLeftovers, lab_id: str) -> str:
    name = left.seats.get(lab_id, "")
    return f", {name}'s" if name else ""


def _next_commands(proof: EndProof) -> list[str]:
    """Return the commands that remove what is left; a repetition does not remove everything."""
    commands = []
    for left in proof.left:
        if left.former and left.has_costs:
            setting = f"set provider: {left.provider} in course.yaml"
            commands.append(f"{setting}, then:\nlabctl course down --end-of-term")
        disk_labs = [resource.lab_id for resource in left.resources if resource.expires_at]
        seats = {left.seats.get(lab_id, "") for lab_id in disk_labs} - {""}
        if seats and not left.former:
            up = f"labctl course up --only {','.join(sorted(seats))}"
            commands.append(f"{up}   # attaches kept disks again\n{GIVE_UP}")
        elif disk_labs and not left.former:
            commands.append(GIVE_UP)
    return commands or ["labctl course down --end-of-term   # again"]


def print_published(published: Sequence[PublishedStarter]) -> None:
    """Print which assignments' files students can get now."""
    for starter in published:
        count = count_files(starter.files)
        text = f"{count} published" if starter.changed else "published already"
        ways = "students get them with labctl join, or on their page"
        click.echo(f"{starter.assignment}: {text}; {ways}")
