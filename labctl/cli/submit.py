"""submit: one verified bundle, handed in."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, open_lab, yes_option

if TYPE_CHECKING:
    from labctl.lab import Lab
    from labctl.submissions.submit import Choice

FILE = click.Path(dir_okay=False, path_type=Path)


@click.command("submit")
@click.argument("run", default="")
@click.option("--assignment", "given", type=FILE, help="Default: assignment.yaml of the lab.")
@click.option("--checkpoint", default="", metavar="NAME", help="Default: the one evaluated; best.")
@click.option("--dry-run", is_flag=True, help="Look through and say the rules; nothing leaves.")
@click.option(
    "--allow", multiple=True, metavar="PATH", help="What looks like a secret in this file is none."
)
@click.option(
    "--verify", is_flag=False, flag_value="", metavar="[RECEIPT]", help="Check a receipt."
)
@click.option("--bundle", type=FILE, help="For --verify: the bundle, where it lies elsewhere.")
@click.option("--receipts", is_flag=True, help="Fetch your receipts of this assignment.")
@click.option("--grade", is_flag=True, help="Your grade, once it was released.")
@click.option("--key", is_flag=True, help="Your public key, for the instructor.")
@yes_option
@json_option
@click.pass_context
def submit_command(
    ctx: click.Context,
    run: str,
    given: Path | None,
    checkpoint: str,
    dry_run: bool,
    allow: tuple[str, ...],
    verify: str | None,
    bundle: Path | None,
    receipts: bool,
    grade: bool,
    key: bool,
    yes: bool,
    json_: bool,
) -> None:
    """Hand in RUN (the latest): model, logs, report, code and a manifest of all their hashes.

    It is looked through first: files that run code when they are loaded, sizes, secrets. The
    assignment's rules are said before anything leaves. Broken off, it goes on where it was.

    \b
    labctl submit --dry-run
    labctl submit
    labctl submit --verify
    """
    from labctl.submissions.submit import Choice

    if key:
        _key(json_)
        return
    if verify is not None:
        # By the assignment's file alone: a receipt outlives the lab.
        _verify(ctx, given, verify, bundle, json_)
        return
    lab = open_lab(ctx, yes=yes, quiet=json_, record_only=True)
    choice = Choice(run=run, checkpoint=checkpoint, assignment=given, allowed=allow)
    if receipts:
        _receipts(lab, choice, json_)
    elif grade:
        _grade(lab, choice, json_)
    elif dry_run:
        _rehearse(lab, choice, json_)
    else:
        _hand_in(lab, choice, json_)


def _key(json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.config import paths
    from labctl.submissions.receiver_host import public_key

    line = public_key(paths())
    if json_:
        as_json({"key": line})
        return
    click.echo(line)
    click.echo("send this line to your instructor, who lets it hand in under your name", err=True)


def _hand_in(lab: Lab, choice: Choice, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import draw_contents, draw_done, draw_terms
    from labctl.submissions.submit import submit

    if json_:
        as_json({"handed_in": submit(lab.ground, choice)})
        return
    done = submit(lab.ground, choice, on_terms=draw_terms, on_contents=draw_contents)
    draw_done(done, lab.config.root)


def _rehearse(lab: Lab, choice: Choice, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import draw_contents, draw_terms
    from labctl.submissions.submit import rehearse

    terms, whole = rehearse(lab.ground, choice)
    if json_:
        about = {"bundle_bytes": whole.bundle_bytes, "notes": whole.notes}
        as_json({"terms": terms, "manifest": whole.manifest, **about})
        return
    draw_terms(terms, offline=True)
    draw_contents(whole, terms)


def _verify(
    ctx: click.Context, given: Path | None, path: str, bundle: Path | None, json_: bool
) -> None:
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import draw_verified
    from labctl.submissions import receipts, submit

    root = Path(ctx.find_root().obj or ".").resolve()
    rules = submit.find_assignment(root, given)
    chosen = Path(path) if path else receipts.last(root, rules)
    found = receipts.verify(chosen, rules.receiver, bundle)
    if json_:
        as_json({"verified": found})
    else:
        draw_verified(found, root)
    ctx.exit(3 if found.bundle == "changed" else 0)


def _receipts(lab: Lab, choice: Choice, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import draw_receipts
    from labctl.submissions import receipts, submit

    root = lab.config.root
    rules = submit.find_assignment(root, choice.assignment)
    with submit.opened(lab.ground, rules) as host:
        kept, refused = receipts.fetch(root, rules, host)
    if json_:
        found: list[Any] = [{"path": str(path), "receipt": one} for path, one in kept]
        as_json({"receipts": found, "refused": refused})
        return
    draw_receipts(kept, refused, root)


def _grade(lab: Lab, choice: Choice, json_: bool) -> None:
    from labctl.cli.screen import as_json
    from labctl.cli.submit_output import draw_feedback
    from labctl.submissions import receipts, submit

    root = lab.config.root
    rules = submit.find_assignment(root, choice.assignment)
    with submit.opened(lab.ground, rules) as host:
        found, path = receipts.fetch_feedback(root, rules, host)
    if json_:
        as_json({"feedback": found, "path": str(path)})
        return
    draw_feedback(found, path, root)
