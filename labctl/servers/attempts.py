"""Create a server. The request is stored before each call; if its reply is lost, it is repeated.

An attempt is one token with one exact request. It is closed by a reply (a server, or a definite
refusal), or by finding the lab's server (adoption.py). The next `up` repeats an open attempt (the
provider returns the server that it created for the token), or abandons it after 10 minutes. `down`
waits for one, and closes it if no server appears.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from pathlib import Path

import msgspec

from labctl.errors import (
    BuildError,
    BusyError,
    CapacityError,
    CredentialsError,
    DeniedError,
    LabError,
    NoOfferError,
    PolicyError,
    QuotaError,
    ThrottledError,
    UsageError,
)
from labctl.events import Note, Step
from labctl.model import Boot, CreateServerRequest, Need, Offer, Server
from labctl.providers import CreatesByList, FirstBoot, Guarded, NamedMachines
from labctl.retry import poll_until, retry_on
from labctl.servers import (
    accounts,
    adoption,
    deadlines,
    end_server,
    kept_disks,
    pending_attempts,
)
from labctl.servers.affordable_offers import budget_left_usd, list_affordable_offers
from labctl.servers.context import LabContext
from labctl.servers.cost import record_start
from labctl.servers.host_keys import ensure_key_pair
from labctl.servers.job_queue import has_job_queue
from labctl.servers.plan import describe_market, describe_offer
from labctl.servers.price_consent import confirm_prices

# An open attempt is repeated for this long; then its price was confirmed too long ago.
REPLAY_S = 600.0
PATIENCE_S = 120.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
MOST_OFFERS = 24
# Errors after which the provider cannot have created a server.
REFUSALS = (
    BuildError,
    CapacityError,
    CredentialsError,
    DeniedError,
    NoOfferError,
    PolicyError,
    QuotaError,
    UsageError,
)
# Refusals that say nothing about an earlier call of the same attempt.
INCONCLUSIVE = (CredentialsError, DeniedError)


def create_server(context: LabContext, need: Need, image: str = "") -> Server:
    """Create a server from the first offer that has capacity. Each offer is tried once.

    `image` is the one that its first run will use, if that is known.
    PolicyError if the price is not confirmed, or the budget does not pay for one hour.
    """
    if server := repeat_open_attempt(context):
        return server
    offers = list_affordable_offers(context, need)
    zones_by_kind: dict[str, list[str]] = {}
    for offer in confirm_prices(
        context, need, kept_disks.sort_by_kept_disks(context, offers)[:MOST_OFFERS]
    ):
        try:
            return attempt_offer(context, need, offer, image)
        except CapacityError as error:
            context.reporter.emit(Note(text=error.what))
            if isinstance(context.provider, NamedMachines):
                remove_unused_resources(context)
                raise  # it has tried all of its machines, and names their holders
            kind = f"{offer.type} {describe_market(offer)}".strip()
            zones_by_kind.setdefault(kind, []).append(offer.zone or offer.region)
        except REFUSALS:
            remove_unused_resources(context)
            raise
    remove_unused_resources(context)
    provider = context.provider.name
    raise CapacityError(
        lambda subject: f"{provider} has no machine left for {context.name_for(subject)}",
        why="\n".join(
            f"no {kind} in {', '.join(zones)}" if any(zones) else f"no {kind}"
            for kind, zones in zones_by_kind.items()
        ),
        hint=lambda subject: (
            f"{subject.offers}   # other types and regions; or try again in some minutes"
            if subject.kind == "lab"
            else subject.offers
        ),
        subject=context.subject,
    )


def repeat_open_attempt(context: LabContext) -> Server | None:
    """Repeat the exact request of an attempt whose reply was lost; return its server, if any."""
    for attempt in context.state.list_open_attempts(context.lab_id):
        if attempt.provider != context.provider.name or attempt.request.moving != context.moving:
            continue
        if time.time() - attempt.created_at > REPLAY_S:
            context.state.end_attempt(attempt.token, "abandoned")
            continue
        text = f"repeating the request of an interrupted `{context.subject.up}`"
        context.reporter.emit(Note(text=text))
        if server := _await_listed(context):
            return server
        try:
            return _complete_attempt(context, attempt.offer, attempt.request, repeated=True)
        except INCONCLUSIVE:
            raise
        except REFUSALS:
            continue
    return None


def _await_listed(context: LabContext) -> Server | None:
    """Where a second request would create a second server, wait for the list to show the first."""
    found: Server | None = None

    def is_settled() -> bool:
        nonlocal found
        found = adoption.adopt(context)
        return found is not None or not pending_attempts.list_pending_attempts(context)

    if isinstance(context.provider, CreatesByList):
        settle_s = context.provider.settle_s
        poll_until(is_settled, pause_s=min(1.0, settle_s), deadline_s=settle_s)
    return found


def remove_unused_resources(context: LabContext) -> None:
    """Remove what was created for a server that does not exist. `down` removes what remains."""
    if context.state.list_open_attempts(context.lab_id):
        return
    with contextlib.suppress(LabError):
        end_server.sweep(context)


def attempt_offer(context: LabContext, need: Need, offer: Offer, image: str) -> Server:
    """Create a server from one offer whose price is confirmed."""
    request = _build_request(context, need, offer, image)
    account = context.provider.get_account()
    accounts.note_profile(context, account)
    context.state.begin_attempt(request.token, request, offer, account.id)
    context.state.record("attempt", lab_id=context.lab_id, detail={"token": request.token})
    return _complete_attempt(context, offer, request)


def _complete_attempt(
    context: LabContext, offer: Offer, request: CreateServerRequest, *, repeated: bool = False
) -> Server:
    """Create the server of one attempt, through throttling and lost replies, and close it.

    `repeated`: the request was sent before, and its reply was lost.
    """
    action = _describe_creation(context)
    step = Step(name=f"{action}: {context.provider.name} {describe_offer(offer)}")
    context.reporter.emit(step)
    server = context.assign_alias(_create(context, offer, request, unsure=repeated), None)
    context.reporter.emit(msgspec.structs.replace(step, done=True, detail=server.id))
    context.state.save_server(server)
    context.state.end_attempt(request.token, "created")
    record_start(context.state, server, "created")
    return server


def _describe_creation(context: LabContext) -> str:
    """Say in a few words where the server comes from; a course may have created it before."""
    if adoption.is_leased(context):
        return "leasing a machine"
    if has_job_queue(context):
        return "using a login node"
    return "getting a server" if isinstance(context.provider, Guarded) else "creating a server"


def _create(
    context: LabContext, offer: Offer, request: CreateServerRequest, *, unsure: bool
) -> Server:
    """Call the provider until it replies.

    `unsure`: an earlier call may have created the server, so an INCONCLUSIVE refusal does not
    close the attempt.
    """

    def create() -> Server:
        nonlocal unsure
        if policy.statistics["attempt_number"] > 1:
            context.state.renew_attempt(request.token)
        try:
            return context.provider.create(offer, request)
        except REFUSALS as error:
            if not (unsure and isinstance(error, INCONCLUSIVE)):
                context.state.end_attempt(request.token, f"refused: {error.what}")
            raise
        except BusyError:
            unsure = True
            raise

    policy = retry_on(
        (ThrottledError, BusyError),
        pause_s=FIRST_PAUSE_S,
        longest_pause_s=LONGEST_PAUSE_S,
        deadline_s=PATIENCE_S,
    )
    return policy(create)


def _build_request(
    context: LabContext, need: Need, offer: Offer, image: str
) -> CreateServerRequest:
    identity = context.identity
    tags = {"labctl.lab-id": context.lab_id}
    left = budget_left_usd(context, need)
    if left is not None:
        tags["labctl:budget"] = f"{left:.4f}"
    request = CreateServerRequest(
        lab=context.config.name,
        lab_id=context.lab_id,
        token=secrets.token_hex(8),
        public_key=ensure_key_pair(identity),
        identity=str(identity),
        need=need,
        tags=tags,
        group=context.group,
        group_name=context.group_name,
        image=image,
        gang=context.group if context.rank is not None else "",
        moving=context.moving,
    )
    if not isinstance(context.provider, FirstBoot):
        return request
    private, host_key = _make_host_key(identity.parent)
    boot = Boot(
        lab=request.lab,
        public_key=request.public_key,
        host_key=host_key,
        host_private_key=private,
        ttl_s=deadlines.boot_span_s(need, offer.price_usd_per_hour, left),
    )
    script = context.provider.build_first_boot(boot)
    return msgspec.structs.replace(request, host_key=host_key, first_boot=script)


def _make_host_key(folder: Path) -> tuple[str, str]:
    """Create a key pair for first contact: (private, public). Only the attempt's record has it."""
    path = folder / f"first-contact-{secrets.token_hex(4)}"
    try:
        public = ensure_key_pair(path).rpartition(" ")[0]
        return path.read_text(), public
    finally:
        path.unlink(missing_ok=True)
        path.with_name(path.name + ".pub").unlink(missing_ok=True)
