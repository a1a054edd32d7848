"""The provider account of a server. labctl neither changes nor judges servers of other accounts.

A provider shows only what belongs to the credentials in use. With the credentials of another
account every server looks as if it had ended, while it still costs money.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from labctl.errors import LabError, PolicyError
from labctl.model import CreateServerRequest, ProviderAccount, Server
from labctl.providers import OpensBuckets, Provider
from labctl.servers.context import LabContext
from labctl.state import Attempt
from labctl.text import price_text

ENDED = ("ending", "terminated")
# Kind of the ledger's line that says which profile of this machine opens an account. It names no
# lab, so that it stays on this machine when a lab is exported.
PROFILE = "account"
# Kind of the ledger's line about a server that the user told labctl to forget.
FORGOTTEN = "forgotten"


def require_same_account(
    context: LabContext,
    servers: Iterable[Server],
    attempts: Iterable[Attempt] = (),
    *,
    command: str = "",
) -> None:
    """Raise PolicyError if one of these belongs to another account than the credentials.

    Servers of other providers and forgotten servers are skipped. `command` is the command to type
    with the right credentials, by default the one that ends the server.
    """
    name, command = context.provider.name, command or context.subject.down
    for server in servers:
        foreign = server.provider == name and _is_of_another_account(context, server)
        if foreign and not is_forgotten(context, server):
            subject = f"the server {server.id} of {_name_lab(context, server)}"
            raise make_refusal(
                context, server.account, subject, server.offer.price_usd_per_hour, command
            )
    for attempt in attempts:
        if attempt.provider == name and is_elsewhere(context, attempt.account):
            lab = _name_lab(context, attempt.request)
            subject = f"a server that an interrupted `up` of {lab} may have created"
            raise make_refusal(
                context, attempt.account, subject, attempt.offer.price_usd_per_hour, command
            )


def _name_lab(context: LabContext, record: Server | CreateServerRequest) -> str:
    return context.name if record.lab_id == context.lab_id else record.lab


def is_elsewhere(context: LabContext, account: str) -> bool:
    """Whether `account` is on record and is not the account of the credentials in use."""
    if not account:
        return False
    current = context.provider.get_account().id
    return bool(current) and current != account


def _is_of_another_account(context: LabContext, server: Server) -> bool:
    """Like `is_elsewhere`. If the account of the credentials cannot be found out, credentials that
    show the server belong to its account: they can end it."""
    try:
        return is_elsewhere(context, server.account)
    except LabError:
        shown = context.provider.find(server.id)
        if shown is None or shown.account != server.account:
            raise
        return False


def is_attributed(context: LabContext, account: str, *, costs: bool = True) -> bool:
    """Whether the account to look in is known, or does not matter.

    It is unknown for what costs money and was recorded by a labctl that did not record accounts.
    """
    return bool(account) or not costs or not context.provider.get_account().id


def is_gone(context: LabContext, server: Server) -> bool:
    """Whether a server that its provider does not show has ended.

    It has if the provider has shown it ending, or if it is older than `settle_s`, for which a
    provider may not show a new server. PolicyError if the credentials belong to another account,
    or if the server's account is not on record.
    """
    require_same_account(context, [server])
    if server.state in ENDED or is_forgotten(context, server):
        return True
    if not is_attributed(context, server.account, costs=bool(server.offer.price_usd_per_hour)):
        raise _make_unattributed_error(context, server)
    return time.time() - server.created_at >= context.provider.settle_s


def is_forgotten(context: LabContext, server: Server) -> bool:
    return bool(context.state.list_events(server_id=server.id, kind=FORGOTTEN, limit=1))


def note_profile(context: LabContext, account: ProviderAccount) -> None:
    """Record which profile opens an account, for hints to a user with other credentials."""
    if account.id and account.profile and find_profile(context, account.id) != account.profile:
        detail = {"provider": context.provider.name, "id": account.id, "profile": account.profile}
        context.state.record(PROFILE, detail=detail)


def find_profile(context: LabContext, account_id: str) -> str:
    """Return the profile that last opened the account from this machine; "" if unknown."""
    account = (context.provider.name, account_id)
    for line in reversed(context.state.list_events(kind=PROFILE)):
        if (line.detail["provider"], line.detail["id"]) == account:
            return str(line.detail["profile"])
    return ""


def find_s3_profile(provider: Provider) -> str:
    """Return the profile of ~/.aws/config with which the user opens buckets; "" for the default."""
    return provider.s3_profile if isinstance(provider, OpensBuckets) else ""


def find_missing_bucket_setup(provider: Provider) -> str:
    """Say what the provider's servers lack to write to a bucket; "" if nothing is known."""
    return provider.missing_bucket_setup if isinstance(provider, OpensBuckets) else ""


def describe(provider: str, account: ProviderAccount) -> str:
    """Describe an account, for example `aws account 123456789012 (profile work)`."""
    profile = f" (profile {account.profile})" if account.profile else ""
    return f"{provider} account {account.id}{profile}"


def switch_command(context: LabContext, account_id: str, command: str) -> str:
    """Return the command as it is typed with the credentials of the account."""
    name = context.provider.name
    if profile := find_profile(context, account_id):
        # This variable overrides the profile in lab.yaml and keys in the environment.
        return f"LABCTL_SERVER_{name.upper()}_PROFILE={profile} {command}"
    return f"sign in to {describe(name, ProviderAccount(id=account_id))}, then:\n{command}"


def make_refusal(
    context: LabContext, account_id: str, subject: str, usd_per_hour: float, command: str
) -> PolicyError:
    """Build the error about something that belongs to another account."""
    name = context.provider.name
    theirs = ProviderAccount(id=account_id, profile=find_profile(context, account_id))
    bills = f" at {price_text(usd_per_hour)}" if usd_per_hour else ""
    return PolicyError(
        f"{subject} belongs to {describe(name, theirs)}",
        why=f"these credentials belong to {describe(name, context.provider.get_account())}, so "
        f"its state is unknown. It may still be running{bills}. Nothing was changed",
        hint=switch_command(context, account_id, command),
    )


def _make_unattributed_error(context: LabContext, server: Server) -> PolicyError:
    name, here = context.provider.name, context.provider.get_account()
    price, subject = server.offer.price_usd_per_hour, context.subject
    lab = _name_lab(context, server)
    return PolicyError(
        f"{describe(name, here)} does not show the server {server.id} of {lab}",
        why="an earlier labctl recorded it without its account. It has ended, or it is running in "
        f"another account at {price_text(price)}",
        hint=f"sign in to the account that made it, then:\n{subject.down}\n"
        f"or, without it:\n{subject.forget}",
    )
