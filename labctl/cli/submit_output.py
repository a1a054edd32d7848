"""How a hand-in is drawn: the rules before, the contents, the receipt."""

from __future__ import annotations

import shutil
import textwrap
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.exit_codes import clean
from labctl.cli.screen import size, table
from labctl.config.scalars import size_text

if TYPE_CHECKING:
    from labctl.submissions.bundling import Contents
    from labctl.submissions.feedback import Feedback
    from labctl.submissions.receipt import Receipt
    from labctl.submissions.receipts import Verified
    from labctl.submissions.submit import HandedIn, Terms

PARTS = ("model", "logs", "report", "evaluation", "code")
SHOWN_CHARACTERS = 16


def draw_terms(terms: Terms, *, offline: bool = False) -> None:
    """The rules, before anything leaves."""
    name = f"{terms.course} {terms.assignment}".strip()
    whom = f" as {terms.student}" if terms.student else ""
    rows = [("due", _due(terms)), ("late", _late(terms))]
    rows += [("size", f"at most {size_text(terms.max_bytes)}"), ("to", f"{terms.hand_in}{whom}")]
    if terms.ticket_until:
        until = datetime.fromisoformat(terms.ticket_until).timestamp()
        rows.append(("ticket", f"yours is good until {moment(until, terms.due)}"))
    if terms.number:
        count = "one submission" if terms.number == 1 else f"{terms.number} submissions"
        rows.append(("before", f"{count} of yours; each is kept"))
    if offline:
        rows.append(("note", "the receiver was not asked: it may know an extension of yours"))
    click.echo(click.style(clean(name), bold=True))
    _rows(rows)


def _rows(rows: list[tuple[str, str]]) -> None:
    width = shutil.get_terminal_size((100, 24)).columns
    widest = max(len(label) for label, _ in rows)
    for label, text in rows:
        lines = textwrap.wrap(clean(text), max(20, width - widest - 4), break_on_hyphens=False)
        for number, line in enumerate(lines or [""]):
            click.echo(f"  {(label if number == 0 else '').ljust(widest)}  {line}")


def _due(terms: Terms) -> str:
    standing = terms.standing
    if standing.due_at is None:
        return "never"
    left = standing.due_at - terms.now
    said = f"in {length(left)}" if left >= 0 else f"{length(-left)} ago"
    extended = ""
    if terms.due and round(datetime.fromisoformat(terms.due).timestamp()) != standing.due_at:
        extended = ", with your extension"
    return f"{moment(standing.due_at, terms.due)} ({said}){extended}"


def _late(terms: Terms) -> str:
    standing = terms.standing
    if standing.due_at is None:
        return "not possible"
    if standing.closes_at is None:
        rule = "taken in however late"
    elif standing.closes_at == standing.due_at:
        return "not taken in after that"
    else:
        rule = f"taken in until {moment(standing.closes_at, terms.due)}"
    if terms.penalty:
        rule += f", {terms.penalty}% of the points off for each day begun"
    if standing.late_s:
        off = f", {standing.penalty}% off" if terms.penalty else ""
        rule += f"; now it is {length(standing.late_s)} late{off}"
    return rule


def length(seconds: float) -> str:
    """Two units, rounded down, so that nobody waits too long: 7 d 15 h, 2 h 5 min, 40 s."""
    left, parts = int(seconds), []
    for unit, size_s in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size_s)
        if count:
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2]) or "0 s"


def moment(at: float, like: str = "") -> str:
    """A time in the zone of `like` (an ISO time with offset), else UTC."""
    zone = datetime.fromisoformat(like).tzinfo if like else UTC
    found = datetime.fromtimestamp(at, zone or UTC)
    offset = "UTC" if not found.utcoffset() else found.strftime("%z")
    return found.strftime(f"%a %d %b %Y %H:%M {offset}")


def draw_contents(whole: Contents, terms: Terms) -> None:
    from labctl.submissions.bundling import SERVERS_EVALUATION

    click.echo()
    rows = []
    for part in PARTS:
        files = whole.of(part)
        if files:
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            rows.append(
                (part, size(sum(one.size for one in files)), f"{count}{_about(whole, part)}")
            )
        elif part in ("model", "logs", "report", "evaluation"):
            there = part == "evaluation" and whole.holds(SERVERS_EVALUATION)
            rows.append((part, "-", "the server's, in its logs" if there else "none here"))
    rows.append(("bundle", size(whole.bundle_bytes), f"of at most {size_text(terms.max_bytes)}"))
    table(rows, ("PART", "SIZE", f"OF RUN {whole.manifest.run}"))
    for note in whole.notes:
        width = shutil.get_terminal_size((100, 24)).columns
        for line in textwrap.wrap(f"! {clean(note)}", width, subsequent_indent="  "):
            click.echo(click.style(line, fg="yellow"))
    click.echo("looked through: found no pickle that runs code, no exploding archive, no secret")


def _about(whole: Contents, part: str) -> str:
    if part == "model" and whole.manifest.checkpoint:
        return f", {whole.manifest.checkpoint}"
    if part == "code" and whole.manifest.code.commit:
        state = ", changed since" if whole.manifest.code.dirty else ""
        return f", commit {whole.manifest.code.commit[:10]}{state}"
    return ""


def draw_done(done: HandedIn, root: Path) -> None:
    if done.signed is None:
        click.echo(f"handed in; sha256 {done.sha256}")
        click.echo("S3 has all of it. The receipt comes when your instructor has looked into it:")
        click.echo("  labctl submit --receipts")
        return
    if done.signed.receipt.number <= (done.terms.number or 0):
        click.echo("this very bundle was handed in before; its receipt:")
    draw_receipt(done.signed.receipt)
    click.echo(f"receipt: {_below(done.receipt, root)}")
    click.echo("  next: labctl submit --verify   # at any time, without a network")


def draw_receipt(one: Receipt) -> None:
    name = f"{one.course} {one.assignment}".strip()
    state = "on time"
    if one.late_s:
        off = f", {one.penalty}% off" if one.penalty else ""
        state = f"{length(one.late_s)} late{off}"
    elif not one.due:
        state = "no due date"
    rows = [
        ("received", f"{one.received} ({state})"),
        ("from", f"{one.student}, number {one.number}, run {one.run}"),
        ("bundle", f"{one.bundle_bytes:,} bytes"),
        ("sha256", one.bundle_sha256),
    ]
    click.echo(click.style(f"{clean(name)}: taken in", fg="green", bold=True))
    _rows(rows)


def draw_verified(found: Verified, root: Path) -> None:
    draw_receipt(found.receipt)
    click.echo("signature: valid, by the receiver that the assignment names")
    if found.bundle == "same":
        click.echo("bundle:    the one here is the one that was taken in")
    elif found.bundle == "changed":
        click.echo(click.style("bundle:    the one here was CHANGED after it was signed", fg="red"))
    else:
        click.echo("bundle:    not here (--bundle FILE compares one)")
    click.echo(f"receipt:   {_below(found.path, root)}")


def draw_receipts(kept: list[tuple[Path, Receipt]], refused: list[str], root: Path) -> None:
    if not kept and not refused:
        click.echo("the receiver has signed nothing of yours yet")
        return
    rows = [
        (
            str(one.number),
            one.received,
            f"{length(one.late_s)} late" if one.late_s else "on time",
            one.bundle_sha256[:SHOWN_CHARACTERS],
            path.name,
        )
        for path, one in kept
    ]
    if rows:
        table(rows, ("NO", "RECEIVED", "STATE", "SHA256", "RECEIPT"))
        click.echo(f"they lie in {_below(str(kept[0][0].parent), root)}")
    for line in refused:
        click.echo(click.style(f"refused {clean(line)}", fg="red"))


def draw_feedback(found: Feedback, path: Path, root: Path) -> None:
    head = f"{found.score:g} of {found.points:g} points"
    click.echo(click.style(f"{clean(found.assignment)}: {head}", bold=True))
    click.echo(f"submission {found.number}")
    for line in found.text.splitlines():
        click.echo(clean(line))
    click.echo(f"all of it: {_below(str(path), root)}")


def _below(path: str, root: Path) -> str:
    place = Path(path)
    return str(place.relative_to(root)) if place.is_relative_to(root) else path
