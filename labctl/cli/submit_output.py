"""Output of `submit`: the rules before it, the contents of the bundle, the receipt, the grade."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from datetime import datetime, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING

import click

from labctl.cli.browser import relative_path
from labctl.cli.exit_codes import clean
from labctl.cli.tables import print_table
from labctl.cli.wrapping import indent_words, read_output_width, wrap_lines
from labctl.config.scalars import limit_text
from labctl.lazy import lazy_imports
from labctl.text import bytes_text, duration_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from labctl.submissions.assignment import DeadlineStatus
    from labctl.submissions.bundling import BundleContents
    from labctl.submissions.feedback import Feedback
    from labctl.submissions.receipt import Receipt
    from labctl.submissions.receipts import StoredReceipt, Verified
    from labctl.submissions.submit import SubmitResult, Terms
    from labctl.wire.receiver import RegradeRecord, TotalRecord

with lazy_imports(__name__):
    from labctl.submissions import bundling

# Writes a Unix time in an assignment's time zone.
FormatTime = Callable[[float], str]

PARTS = ("model", "logs", "report", "evaluation", "code")
# characters of a SHA-256 in a table
SHOWN_CHARACTERS = 16


def print_terms(terms: Terms, *, offline: bool = False) -> None:
    """Print the assignment's rules before anything is sent."""
    name = f"{terms.course} {terms.assignment}".strip()
    sender = f" as {terms.student}" if terms.student else ""
    rows = [("due", _due_text(terms)), ("late", _late_rule_text(terms))]
    rows += [
        ("size", f"at most {limit_text(terms.max_bytes)}"),
        ("to", f"{terms.hand_in}{sender}"),
    ]
    if terms.ticket_until:
        until = datetime.fromisoformat(terms.ticket_until).timestamp()
        rows.append(("ticket", f"yours is valid until {terms.format_time(until)}"))
    if terms.number:
        count = "one submission" if terms.number == 1 else f"{terms.number} submissions"
        rows.append(("earlier", f"{count} from you; each is kept"))
    if offline:
        text = "the receiver, which knows your extensions and free late days, was not contacted"
        rows.append(("note", text))
    click.echo(click.style(clean(name), bold=True))
    _print_labeled_lines(rows)


def _print_labeled_lines(rows: list[tuple[str, str]]) -> None:
    width = read_output_width()
    label_width = max(len(label) for label, _ in rows)
    for label, text in rows:
        lines = textwrap.wrap(clean(text), max(20, width - label_width - 4), break_on_hyphens=False)
        for number, line in enumerate(lines or [""]):
            click.echo(f"  {(label if number == 0 else '').ljust(label_width)}  {line}")


def _due_text(terms: Terms) -> str:
    standing = terms.standing
    if standing.due_at is None:
        return "never"
    left_s = standing.due_at - terms.now
    distance = f"in {duration_text(left_s)}" if left_s >= 0 else f"{duration_text(-left_s)} ago"
    extended = ""
    if terms.due and round(datetime.fromisoformat(terms.due).timestamp()) != standing.due_at:
        extended = ", with your extension"
    return f"{terms.format_time(standing.due_at)} ({distance}){extended}"


def _late_rule_text(terms: Terms) -> str:
    standing = terms.standing
    if standing.due_at is None:
        return "not possible"
    grace = f"up to {duration_text(terms.grace_s)} late counts as on time"
    if standing.closes_at is None:
        rule = "accepted at any time"
    elif standing.closes_at <= standing.due_at + terms.grace_s:
        return f"not accepted; {grace}" if terms.grace_s else "not accepted"
    else:
        rule = f"accepted until {terms.format_time(standing.closes_at)}"
    if terms.penalty:
        rule += f", {terms.penalty}% of the points off for each day or part of a day"
    if terms.grace_s:
        rule += f"; {grace}"
    if standing.late_s:
        rule += f"; you are {_lateness_text(standing.late_s, terms)}"
    elif terms.free_days:
        left = f"{terms.free_days_left} of {terms.free_days} free late days left"
        rule += f"; you have {left}, which labctl uses by itself"
    return rule


def _lateness_text(late_s: int, terms: Terms) -> str:
    """Say how late a submission is, and what that costs after free days."""
    text = f"{duration_text(late_s)} late"
    if not terms.penalty:
        return text
    used, penalty = terms.use_free_days(late_s)
    off = f"{penalty}% off" if penalty else "no points off"
    if used:
        left = terms.free_days_left - used
        return f"{text}: uses {used} of {terms.free_days} free days ({left} left), {off}"
    return f"{text}, {off}" + (", as no free day is left" if terms.free_days else "")


def print_bundle_contents(contents: BundleContents, terms: Terms, *, fresh_command: str) -> None:
    """Print the parts of the bundle with their sizes, and warnings.

    `fresh_command` brings results up to date that are older than others.
    """
    click.echo()
    run = contents.manifest.run
    rows = []
    for part in PARTS:
        files = contents.list_part(part)
        if files:
            count = "1 file" if len(files) == 1 else f"{len(files)} files"
            detail = f"{count}{_version_text(contents, part)}"
            rows.append((part, bytes_text(sum(file.size for file in files)), detail))
        elif run and part in ("model", "logs", "report", "evaluation"):
            in_logs = part == "evaluation" and contents.has_file(bundling.SERVERS_EVALUATION)
            rows.append(
                (part, "-", "the server's, in the logs" if in_logs else "none, not required")
            )
    rows.append(
        ("bundle", bytes_text(contents.bundle_bytes), f"of at most {limit_text(terms.max_bytes)}")
    )
    print_table(rows, ("PART", "SIZE", f"OF RUN {run}" if run else "WITHOUT A RUN"))
    for note in (*contents.notes, *contents.stale):
        width = read_output_width()
        for line in textwrap.wrap(f"! {clean(note)}", width, subsequent_indent="  "):
            click.echo(click.style(line, fg="yellow"))
    if contents.stale:
        click.echo("To bring all of them up to date and submit them:")
        click.echo(f"  {clean(fresh_command)}")
    click.echo("checked: no pickle that runs code, no archive bomb, no secret found")


def _version_text(contents: BundleContents, part: str) -> str:
    """Return the checkpoint of the model or the commit of the code, after a comma."""
    if part == "model" and contents.manifest.checkpoint:
        return f", {contents.manifest.checkpoint}"
    if part == "code" and contents.manifest.code.commit:
        state = ", changed since" if contents.manifest.code.dirty else ""
        return f", commit {contents.manifest.code.commit[:10]}{state}"
    return ""


def print_done(result: SubmitResult) -> None:
    """Print the receipt of a submission, or how to get it if it comes later."""
    if result.signed is None:
        click.echo(f"submitted; sha256 {result.sha256}")
        click.echo("The upload to S3 is complete. You can fetch the receipt after your instructor")
        click.echo("collects the submissions:")
        click.echo("  labctl submit --receipts")
        return
    if result.signed.receipt.number <= (result.terms.number or 0):
        click.echo("already submitted: same bundle; its receipt:")
    print_receipt(
        result.signed.receipt, result.terms.format_time, result.terms, standing=result.standing
    )
    click.echo(f"receipt: {relative_path(Path(result.receipt))}")
    click.echo("  next: labctl submit --verify\n        (at any time, without a network)")


def print_receipt(
    receipt: Receipt,
    format_time: FormatTime,
    terms: Terms | None = None,
    *,
    standing: DeadlineStatus | None = None,
) -> None:
    """Print what a receipt says, with its time as the assignment's `format_time` writes it.

    Only the receiver's `terms` have the student's free days: the receipt's penalty is before them.
    `standing` is what counts now, after an extension.
    """
    state = _receipt_state(receipt, terms)
    if standing is not None and standing.late_s != receipt.late_s:
        counts = _lateness_text(standing.late_s, terms) if terms and standing.late_s else "on time"
        state = f"counts as {counts}, with your extension; {state} when it was signed"
    name = f"{receipt.course} {receipt.assignment}".strip()
    run = f", run {receipt.run}" if receipt.run else ", without a run"
    rows = [
        ("received", f"{format_time(receipt.received_at)} ({state})"),
        ("from", f"{receipt.student}, number {receipt.number}{run}"),
        ("bundle", f"{receipt.bundle_bytes:,} bytes"),
        ("sha256", receipt.bundle_sha256),
    ]
    click.echo(click.style(f"{clean(name)}: accepted", fg="green", bold=True))
    _print_labeled_lines(rows)


def _receipt_state(receipt: Receipt, terms: Terms | None) -> str:
    if not receipt.due:
        return "no due date"
    if not receipt.late_s:
        due_at = datetime.fromisoformat(receipt.due).timestamp()
        after_s = round(receipt.received_at - due_at)
        in_grace = f"{duration_text(after_s)} after the due time, which counts as "
        return f"{in_grace if after_s > 0 else ''}on time"
    if terms is not None:
        return _lateness_text(receipt.late_s, terms)
    off = f", {receipt.penalty}% off before free days" if receipt.penalty else ""
    return f"{duration_text(receipt.late_s)} late{off}"


def print_verified(verified: Verified, format_time: FormatTime) -> None:
    """Print a receipt and whether its signature and its bundle match."""
    print_receipt(verified.receipt, format_time)
    click.echo("signature: valid, from the receiver that the assignment names")
    if verified.bundle == "same":
        click.echo("bundle:    your file is the accepted one")
    elif verified.bundle == "changed":
        click.echo(click.style("bundle:    your file was CHANGED after it was signed", fg="red"))
    else:
        click.echo("bundle:    not on this machine (to compare one: --bundle FILE)")
    click.echo(f"receipt:   {relative_path(Path(verified.path))}")


def table_time_text(at: float, zone: tzinfo) -> str:
    """Write a Unix time for a table, below which the zone is named."""
    return f"{datetime.fromtimestamp(at, zone):%d %b %Y %H:%M:%S}"


def print_receipts(saved: list[StoredReceipt], refused: list[str], zone: tzinfo) -> None:
    """Print a table of the downloaded receipts, and the submissions that were refused."""
    if not saved and not refused:
        click.echo("The receiver has not signed a receipt for you yet.")
        return
    rows = [
        (
            str(one.receipt.number),
            table_time_text(one.receipt.received_at, zone),
            f"{duration_text(late_s)} late" if late_s else "on time",
            one.receipt.bundle_sha256[:SHOWN_CHARACTERS],
            one.path.name,
        )
        for one in saved
        for late_s in [(one.standing or one.receipt).late_s]
    ]
    if rows:
        print_table(rows, ("NO", "RECEIVED", "STATE", "SHA256", "RECEIPT"))
        click.echo(f"Times are in {zone}.")
        click.echo(f"saved in {relative_path(saved[0].path.parent)}")
    for line in refused:
        click.echo(click.style(f"refused {clean(line)}", fg="red"))


def print_feedback(feedback: Feedback, path: Path) -> None:
    """Print a released grade with its comments."""
    score = f"{feedback.score:g} of {feedback.points:g} points"
    click.echo(click.style(f"{clean(feedback.assignment)}: {score}", bold=True))
    click.echo(f"submission {feedback.number}")
    for line in wrap_lines(clean(feedback.text), has_commands=False, err=False):
        click.echo(line)
    click.echo(f"complete feedback: {relative_path(path)}")


def print_regrades(regrades: Sequence[RegradeRecord]) -> None:
    """Print a student's own regrade requests with staff's answers."""
    for request in regrades:
        click.echo(click.style(f"regrade request {request.number}:", bold=True))
        click.echo(indent_words(clean(request.text), "  "))
        if not request.answered_at:
            click.echo("  no answer yet")
            continue
        word = "accepted" if request.accepted else "declined"
        click.echo(indent_words(f"{word}: {clean(request.answer)}", "  "))
        if request.accepted:
            click.echo("  staff releases the new grade separately")


def print_total(total: TotalRecord) -> None:
    """Print a student's total, what it is made of, and which grades do not count in it."""
    text = f"{total.final:g}%" if total.groups else f"{total.final:g} of {total.points:g}"
    click.echo(click.style(f"total so far: {text}", bold=True))
    for group in total.groups:
        click.echo(f"  {clean(group)}")
    for name in total.missing:
        click.echo(f"  {clean(name)}: nothing was submitted, which counts as 0")
    for text in total.dropped:
        click.echo(f"  {clean(text)}")
