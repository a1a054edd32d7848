"""submit: one verified bundle, handed in."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from labctl.cli.options import json_option, open_lab, yes_option

if TYPE_CHECKING:
    from labctl.actions.receiver_host import ReceiverHost
    from labctl.lab import Lab
    from labctl.submissions.assignment import Assignment

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
    from labctl.actions import submit

    if key:
        _key(json_)
        return
    root = Path(ctx.find_root().obj or ".").resolve()
    path, rules = submit.find_assignment(root, given)
    if verify is not None:
        # By the assignment's file alone: a receipt outlives the lab.
        _verify(ctx, root, rules, verify, bundle, json_)
        return
    lab = open_lab(ctx, yes=yes, quiet=json_, record_only=True)
    if receipts:
        _receipts(lab, rules, json_)
    else:
        _hand_in(ctx, lab, rules, path, (run, checkpoint, allow, dry_run), json_)


def _key(json_: bool) -> None:
    from labctl.actions.receiver_host import public_key
    from labctl.cli.screen import as_json
    from labctl.config import paths

    line = public_key(paths())
    if json_:
        as_json({"key": line})
        return
    click.echo(line)
    click.echo("send this line to your instructor, who lets it hand in under your name", err=True)


def _hand_in(
    ctx: click.Context,
    lab: Lab,
    rules: Assignment,
    path: Path,
    asked: tuple[str, str, tuple[str, ...], bool],
    json_: bool,
) -> None:
    from labctl.actions import Decision, submit
    from labctl.cli.screen import as_json
    from labctl.cli.submitted import draw_contents, draw_done, draw_terms
    from labctl.errors import PolicyError

    run, checkpoint, allow, dry_run = asked
    ground = lab.ground
    beside = [path.resolve().relative_to(ground.config.root.resolve()).as_posix()] if (
        path.resolve().is_relative_to(ground.config.root.resolve())
    ) else []  # fmt: skip
    with ExitStack() as ends:
        host = None if dry_run else _host(lab, rules, ends)
        terms = submit.terms_there(rules, host.hello()) if host else submit.terms_here(rules)
        if not json_:
            draw_terms(terms, offline=dry_run)
        if not dry_run:
            submit.check_terms(ground, terms)
        whole = submit.checked_contents(ground, rules, terms, run, checkpoint, allow, beside)
        if not json_:
            draw_contents(whole, terms)
        if dry_run:
            if json_:
                as_json({"terms": terms, "manifest": whole.manifest,
                         "bundle_bytes": whole.bundle_bytes, "notes": whole.notes})  # fmt: skip
            return
        question = f"hand in {terms.assignment} at {rules.hand_in}?"
        if not ground.reporter.ask(Decision(question=question, default=True)):
            raise PolicyError("nothing was handed in", hint="labctl submit --yes")
        done = submit.hand_in(ground, rules, whole, host)
    if json_:
        as_json({"handed_in": done, "terms": terms})
    else:
        draw_done(done, terms, ground.config.root)


def _host(lab: Lab, rules: Assignment, ends: ExitStack) -> ReceiverHost | None:
    """The receiver on an SSH server; None for a bucket. Without a ticket there is no way to one."""
    from labctl.actions.receiver_host import ReceiverHost
    from labctl.errors import UsageError

    if rules.hand_in.startswith("s3://"):
        if rules.ticket is None:
            raise UsageError(
                "this assignment's file has no ticket of yours",
                why="a bucket takes bundles by a ticket made for one student",
                hint="ask your instructor: labctl receive ticket DIR ASSIGNMENT YOUR-NAME",
            )
        return None
    return ends.enter_context(ReceiverHost(lab.ground, rules))


def _verify(
    ctx: click.Context,
    root: Path,
    rules: Assignment,
    given: str,
    bundle: Path | None,
    json_: bool,
) -> None:
    from labctl.actions import submit
    from labctl.cli.screen import as_json
    from labctl.cli.submitted import draw_verified

    path = Path(given) if given else submit.last_receipt(root, rules)
    found = submit.verify(path, rules.receiver, bundle)
    if json_:
        as_json({"verified": found})
    else:
        draw_verified(found, root)
    ctx.exit(3 if found.bundle == "changed" else 0)


def _receipts(lab: Lab, rules: Assignment, json_: bool) -> None:
    from labctl.actions import submit
    from labctl.cli.screen import as_json
    from labctl.cli.submitted import draw_receipts

    root = lab.config.root
    with ExitStack() as ends:
        kept, refused = submit.fetch_receipts(root, rules, _host(lab, rules, ends))
    if json_:
        found: list[Any] = [{"path": str(path), "receipt": one} for path, one in kept]
        as_json({"receipts": found, "refused": refused})
        return
    draw_receipts(kept, refused, root)
