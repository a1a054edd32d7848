"""The command orphans: everything at a provider that labctl created, on record here or not."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click
import msgspec

from labctl.cli.exit_codes import clean
from labctl.cli.options import PROVIDER, json_option, open_lab, yes_option
from labctl.cli.tables import age_text, print_json, print_table
from labctl.cli.wrapping import print_message, wrap_lines
from labctl.errors import BusyError
from labctl.lazy import lazy_imports
from labctl.state.disks import find_stopped_disk
from labctl.text import add_next, count_text, dollars_text, list_text, price_or_free_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from labctl.model import Resource, Server
    from labctl.servers.context import LabContext
    from labctl.servers.leftovers import Orphans
    from labctl.state import State

with lazy_imports(__name__):
    from labctl.servers import disks, leftovers, provider_choice


@click.command("orphans")
@PROVIDER
@click.option("--all-regions", is_flag=True, help="Search every region of the account.")
@click.option(
    "--terminate",
    is_flag=True,
    help="Terminate every listed server, even one in use, and remove the other resources, except "
    "kept disks that have not expired. Unsaved results are lost.",
)
@click.option(
    "--kept-too",
    is_flag=True,
    help="With --terminate: also remove kept disks that have not expired.",
)
@click.option(
    "--everyone",
    is_flag=True,
    help="Include servers of other users of the same Docker Engine, and of other home directories. "
    "With --terminate: terminate those of each user whose name you type.",
)
@yes_option
@json_option
@click.pass_context
def orphans_command(
    ctx: click.Context,
    provider: str | None,
    all_regions: bool,
    terminate: bool,
    kept_too: bool,
    everyone: bool,
    yes: bool,
    json_: bool,
) -> None:
    """List everything at the provider that labctl created, including servers in use.

    That includes what was created on other machines and for other labs. Servers of other users of
    the same Docker Engine, or of your login name with another home directory, are counted, and
    listed only with --everyone. --provider auto searches all providers that this machine has
    credentials for.

    Exits with 1 if a server is left, or anything else that costs money, and with 75 if the list is
    incomplete, since a provider could not be asked.

    \b
    labctl orphans --provider auto
    labctl orphans --provider aws --all-regions
    labctl orphans --terminate
    """
    overrides = {"provider": provider} if provider else {}
    lab = open_lab(
        ctx,
        yes=yes,
        quiet=json_,
        overrides=overrides,
        needs_file=False,
        everywhere=all_regions,
        skips_faults=True,
    )
    context = lab.context
    if provider and provider_choice.is_market(provider):
        # The lab itself uses the provider that its server came from.
        context = provider_choice.select_provider(context, provider)
    resources = leftovers.find_orphans(context)
    if terminate:
        resources = leftovers.end_orphans(context, resources, kept_too=kept_too)
        resources = leftovers.end_others(context, resources) if everyone else resources
    if json_:
        others = resources.others if everyone else ()
        shown = msgspec.structs.replace(resources, others=others)
        print_json({"orphans": shown, "billing": resources.is_billing})
    else:
        _print_orphans(context, resources, everyone, with_region=all_regions)
        _print_free([one for one in resources.resources if _is_free(one)], "")
        _print_free(resources.caches, "image ")
        _print_failures(resources)
    if resources.failures:
        ctx.exit(BusyError.exit_code)
    ctx.exit(1 if resources.is_billing else 0)


def _print_orphans(
    context: LabContext, orphans: Orphans, everyone: bool, *, with_region: bool
) -> None:
    others = orphans.others if everyone else ()
    if orphans.others and not everyone:
        _print_others_count(context, orphans.others)
    if not orphans.servers and not orphans.resources and not others:
        if orphans.failures:
            return
        scope = " with these credentials" if orphans.elsewhere else ""
        scope += " for you" if orphans.others else ""
        names = orphans.asked or (context.provider.name,)
        what = f"nothing at {clean(list_text(names, 'or'))}"
        what += " but image caches" if orphans.caches else ""
        print_message(f"Found {what} that labctl created{scope}.", err=False)
        return
    _print_billing_table(context, orphans, others, with_region=with_region)
    for resource in orphans.resources:
        if resource.expires_at:
            click.echo(
                f"kept disk {disks.get_id_without_region(resource)}: {disks.cost_text(resource)}"
            )


def _print_billing_table(
    context: LabContext, orphans: Orphans, others: tuple[Server, ...], *, with_region: bool
) -> None:
    """Print the servers and what else costs money, with the provider if several were searched."""
    now = time.time()
    has_several = len(orphans.asked) > 1
    rows = [
        (
            *((server.provider,) if has_several else ()),
            "server",
            server.id if with_region else server.id.partition(".")[0],
            server.lab,
            _price_text(context.state, server),
            age_text(server.created_at, now),
            f"{server.state}{' (on record)' if server.id in orphans.here else ''}"
            f"{_describe_owner(context, server) if server in others else ''}",
        )
        for server in (*orphans.servers, *others)
    ]
    rows += [
        (
            *((resource.provider,) if has_several else ()),
            resource.kind,
            resource.id,
            resource.lab,
            disks.monthly_cost_text(resource),
            age_text(resource.created_at, now),
            "kept" if resource.expires_at else resource.note,
        )
        for resource in orphans.resources
        if not _is_free(resource)
    ]
    if rows:
        place = ("PROVIDER",) if has_several else ()
        print_table(rows, (*place, "KIND", "ID", "LAB", "PRICE", "AGE", "STATE"), cut=False)


def _describe_owner(context: LabContext, server: Server) -> str:
    is_namesake = server.owner == context.owner_name
    return f", of {server.owner}{' with another home' if is_namesake else ''}"


def _price_text(state: State, server: Server) -> str:
    """Return the price of a server; a stopped one costs only what its disk costs."""
    if disk := find_stopped_disk(state, server):
        return f"{dollars_text(disk.usd_per_month)} a month" if disk.usd_per_month else "free"
    return price_or_free_text(server.offer.price_usd_per_hour)


def _is_free(resource: Resource) -> bool:
    """Whether it costs nothing and nobody keeps it."""
    return not resource.price_usd_per_month and not resource.expires_at


def _print_free(resources: Iterable[Resource], kind_prefix: str) -> None:
    """Print a line for each: its id and what removes it are too long for the table."""
    for resource in resources:
        text = f"{kind_prefix}{resource.kind} {resource.id}: free, {resource.note or 'unused'}"
        click.echo("\n  ".join(wrap_lines(text, 2, err=False)))


def _print_failures(orphans: Orphans) -> None:
    """Print which providers could not be asked, so that nobody takes the list for complete."""
    for name, why in orphans.failures.items():
        print_message(clean(add_next(f"{name}: {why}", f"labctl orphans --provider {name}")))
    if orphans.failures:
        count = count_text(len(orphans.failures), "provider")
        print_message(f"The list is incomplete: {count} could not be asked.")


def _print_others_count(context: LabContext, others: Sequence[Server]) -> None:
    """Count the servers that are not listed; those of the own login name may be the user's too."""
    name = context.owner_name
    namesakes = sum(server.owner == name for server in others)
    strangers = len(others) - namesakes
    parts = []
    if strangers:
        whose = "another user" if strangers == 1 else "other users"
        parts.append(f"{count_text(strangers, 'server')} of {whose}")
    if namesakes:
        parts.append(f"{count_text(namesakes, 'server')} of {name} with another home directory")
    text = f"{' and '.join(parts)} {'is' if len(others) == 1 else 'are'} not listed"
    print_message(f"{clean(text)}; to list all: labctl orphans --everyone")
