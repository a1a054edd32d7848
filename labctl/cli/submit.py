"""The command submit: one verified bundle with a signed receipt."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.exit_codes import print_next, read_typed_command
from labctl.cli.options import RUN, json_option, open_lab, yes_option
from labctl.cli.submit_output import (
    print_bundle_contents,
    print_done,
    print_feedback,
    print_receipts,
    print_regrades,
    print_terms,
    print_total,
    print_verified,
)
from labctl.cli.tables import print_json
from labctl.cli.wrapping import print_message
from labctl.config import find_lab, find_paths
from labctl.errors import BusyError, InterruptError, UsageError
from labctl.submissions import receipts, submit
from labctl.submissions.receiver_host import public_key

if TYPE_CHECKING:
    from collections.abc import Iterator

    from labctl.lab import Lab
    from labctl.submissions.bundling import BundleContents
    from labctl.submissions.submit import Terms

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("submit")
@RUN
@click.option(
    "--assignment", type=FILE, help="Assignment file (default: the lab's assignment.yaml)."
)
@click.option(
    "--checkpoint",
    default="",
    metavar="NAME",
    help="Submit this checkpoint (default: the evaluated one, else the best, else the last).",
)
@click.option(
    "--code-only", is_flag=True, help="Submit the code without a run, if the assignment allows it."
)
@click.option("--fresh", is_flag=True, help="First download, evaluate and report the run again.")
@click.option("--dry-run", is_flag=True, help="Check the bundle and show the rules; send nothing.")
@click.option(
    "--allow", multiple=True, metavar="PATH", help="Ignore secret-like text in this file."
)
@click.option(
    "--verify",
    is_flag=False,
    flag_value="",
    metavar="[RECEIPT]",
    help="Verify RECEIPT (default: the latest).",
)
@click.option(
    "--bundle",
    type=FILE,
    help="With --verify: compare this bundle (default: the one stored with the receipt).",
)
@click.option("--receipts", is_flag=True, help="Download your receipts for this assignment.")
@click.option("--grade", is_flag=True, help="Show your grade, if it has been released.")
@click.option(
    "--ask-regrade",
    metavar="TEXT",
    help="Ask staff to look at your released grade again; --grade shows the answer.",
)
@click.option("--key", is_flag=True, help="Print your public key for the instructor.")
@yes_option
@json_option
@click.pass_context
def submit_command(
    ctx: click.Context,
    run: str,
    assignment: Path | None,
    checkpoint: str,
    code_only: bool,
    fresh: bool,
    dry_run: bool,
    allow: tuple[str, ...],
    verify: str | None,
    bundle: Path | None,
    receipts: bool,
    grade: bool,
    ask_regrade: str | None,
    key: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Submit RUN (default: the latest run): model, logs, report, evaluation, code, and hashes.

    An assignment that requires only code needs no run. The results of a run must be on this
    machine: labctl pull. labctl first shows the assignment's rules.
    Then it checks the bundle's size, looks for secrets and for files that run code when they are
    loaded, and says which results are older than others: --fresh brings them up to date. An
    interrupted upload resumes where it stopped.

    \b
    labctl submit --dry-run
    labctl submit --fresh
    labctl submit
    labctl submit --verify
    """
    if key:
        _print_public_key(json_)
        return
    if verify is not None:
        # This needs only the assignment's file, because a receipt outlives the lab.
        _verify_receipt(ctx, assignment, verify, bundle, json_)
        return
    if code_only and (run or checkpoint or fresh):
        raise UsageError(
            "--code-only cannot be combined with RUN, --checkpoint or --fresh",
            why="these choose and update the results of a run",
            hint="labctl submit --code-only",
        )
    lab = open_lab(ctx, yes=yes, quiet=json_, record_only=not fresh)
    choice = submit.SubmissionChoice(
        run=run, checkpoint=checkpoint, assignment=assignment, allowed=allow, code_only=code_only
    )
    if receipts:
        _fetch_receipts(lab, choice, json_)
    elif ask_regrade is not None:
        _ask_regrade(lab, choice, ask_regrade, json_)
    elif grade:
        _fetch_grade(lab, choice, json_)
    else:
        _check_and_submit(lab, choice, fresh=fresh, dry_run=dry_run, json_=json_)


def _check_and_submit(
    lab: Lab, choice: submit.SubmissionChoice, *, fresh: bool, dry_run: bool, json_: bool
) -> None:
    if fresh:
        lab.refresh_results(choice)
    (_rehearse if dry_run else _submit)(lab, choice, json_)


def _print_public_key(json_: bool) -> None:
    line = public_key(find_paths())
    if json_:
        print_json({"key": line})
        return
    click.echo(line)
    print_message("Send this line to your instructor, who registers it under your name.")


def _submit(lab: Lab, choice: submit.SubmissionChoice, json_: bool) -> None:
    def show_terms(terms: Terms) -> None:
        if not json_:
            print_terms(terms)

    def show_contents(contents: BundleContents, terms: Terms) -> None:
        if not json_:
            print_bundle_contents(contents, terms, fresh_command=submit.fresh_command(choice))

    try:
        result = submit.submit(lab.context, choice, on_terms=show_terms, on_contents=show_contents)
    except (KeyboardInterrupt, click.Abort):  # from packing on, it is an InterruptError
        raise InterruptError(
            "interrupted; nothing was submitted", hint=read_typed_command()
        ) from None
    if json_:
        print_json({"handed_in": result})
    else:
        print_done(result, lab.config.root)


def _rehearse(lab: Lab, choice: submit.SubmissionChoice, json_: bool) -> None:
    terms, contents = submit.rehearse(lab.context, choice)
    if json_:
        details = {
            "bundle_bytes": contents.bundle_bytes,
            "notes": contents.notes,
            "stale": contents.stale,
        }
        print_json({"terms": terms, "manifest": contents.manifest, **details})
        return
    print_terms(terms, offline=True)
    print_bundle_contents(contents, terms, fresh_command=submit.fresh_command(choice))


def _verify_receipt(
    ctx: click.Context, assignment: Path | None, path: str, bundle: Path | None, json_: bool
) -> None:
    root = find_lab(Path(ctx.find_root().obj or ".")).resolve()
    rules = submit.find_assignment(root, assignment)
    receipt = Path(path) if path else receipts.find_last_receipt(root, rules)
    verified = receipts.verify(receipt, rules.receiver, bundle)
    if json_:
        print_json({"verified": verified})
    else:
        print_verified(verified, rules.format_time, root)
    ctx.exit(3 if verified.bundle == "changed" else 0)


@contextlib.contextmanager
def _suggest_again() -> Iterator[None]:
    """Let an error that may pass suggest this command, and not another submission."""
    try:
        yield
    except BusyError as error:
        error.hint = f"{read_typed_command()}   # again later"
        raise


def _fetch_receipts(lab: Lab, choice: submit.SubmissionChoice, json_: bool) -> None:
    root = lab.config.root
    rules = submit.find_assignment(root, choice.assignment)
    with _suggest_again(), submit.open_receiver(lab.context, rules) as host:
        saved, refused = receipts.fetch(root, rules, host)
    if json_:
        rows: list[Any] = [{"path": str(path), "receipt": receipt} for path, receipt in saved]
        print_json({"receipts": rows, "refused": refused})
        return
    print_receipts(saved, refused, rules.time_zone, root)


def _fetch_grade(lab: Lab, choice: submit.SubmissionChoice, json_: bool) -> None:
    root = lab.config.root
    rules = submit.find_assignment(root, choice.assignment)
    with _suggest_again(), submit.open_receiver(lab.context, rules) as host:
        fetched = receipts.fetch_feedback(root, rules, host)
    if json_:
        regrades = [request._asdict() for request in fetched.regrades]
        path = str(fetched.path)
        total = fetched.total._asdict() if fetched.total else None
        rest = {"path": path, "regrades": regrades, "total": total}
        print_json({"feedback": fetched.feedback, **rest})
        return
    print_feedback(fetched.feedback, fetched.path, root)
    print_regrades(fetched.regrades)
    if fetched.total:
        print_total(fetched.total)


def _ask_regrade(lab: Lab, choice: submit.SubmissionChoice, text: str, json_: bool) -> None:
    rules = submit.find_assignment(lab.config.root, choice.assignment)
    with submit.open_receiver(lab.context, rules) as host:
        number = receipts.ask_regrade(rules, host, text)
    if json_:
        print_json({"regrade": {"assignment": rules.name, "number": number}})
        return
    click.echo(f"request {number} for {rules.name} was sent to staff")
    print_next("labctl submit --grade   # shows the answer")
