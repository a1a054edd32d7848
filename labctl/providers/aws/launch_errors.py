"""What a refused RunInstances means for its offer."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from labctl.errors import CapacityError, LabError, ProviderError, QuotaError, UsageError
from labctl.errors.subject import Subject
from labctl.model import Offer
from labctl.providers.aws.errors import translate_client_error
from labctl.providers.aws.quotas import find_quota

if TYPE_CHECKING:
    from botocore.exceptions import ClientError


def make_launch_error(error: ClientError, offer: Offer) -> LabError:
    """Turn a refused RunInstances into labctl's own error."""
    general = translate_client_error(error)
    if isinstance(general, QuotaError):
        quota = find_quota(offer.type, offer.spot)
        return QuotaError(
            f"the quota {quota.name!r} does not allow {offer.type} in {offer.region}",
            why=f"it needs {offer.cpus} vCPUs; {general.why}",
            hint=partial(_render_quota_hint, quota.link(offer.region), offer.spot),
        )
    if isinstance(general, CapacityError):
        market = "spot" if offer.spot else "on-demand"
        return CapacityError(
            f"no {offer.type} ({market}) in {offer.zone} now",
            why=general.why,
            hint=general.next_step,
        )
    if type(general) is ProviderError:
        # A definite refusal: nothing was created, and the same request would be refused again.
        return UsageError(
            f"AWS refused to launch {offer.type} in {offer.zone}",
            why=general.why,
            hint="labctl config   # shows the settings of server.aws",
        )
    return general


def _render_quota_hint(link: str, spot: bool, subject: Subject) -> str:
    ask = f"ask for more at {link}"
    if not spot:
        return ask
    if subject.kind == "lab":
        return f"{ask}\nlabctl up --spot never   # instead"
    return f"{ask}\nor set spot: never under server: in course.yaml"
