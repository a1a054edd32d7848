"""Checks of providers that the lab does not use, so that a newcomer sees what could be used."""

from __future__ import annotations

import msgspec

from labctl.errors import LabError
from labctl.errors.replies import describe_error
from labctl.model import Check
from labctl.providers import CredentialSource, Marketplace, OnThisMachine, list_provider_names
from labctl.servers.clock import list_clock_checks
from labctl.servers.context import LabContext


def list_unused_provider_checks(context: LabContext) -> list[Check]:
    """Check this machine's own provider, and the credentials of each cloud that has some.

    Their problems are warnings, since the lab does not need them.
    """
    if isinstance(context.provider, Marketplace):
        return []  # its own checks are those of all providers
    names = [name for name in list_provider_names() if name != context.config.server.provider]
    return [_as_warning(check) for name in names for check in _check(context, name)]


def _check(context: LabContext, name: str) -> list[Check]:
    try:
        provider = context.make_provider(name)
        if isinstance(provider, OnThisMachine):
            return provider.check()
        if isinstance(provider, CredentialSource) and provider.has_credentials:
            return [*list_clock_checks(provider), provider.check_credentials()]
    except LabError as error:
        return [
            Check(name=f"provider {name}", ok=False, detail=describe_error(error), next=error.hint)
        ]
    except ImportError as error:  # a plugin package whose own packages are missing
        return [Check(name=f"provider {name}", ok=False, detail=str(error), next="pip check")]
    return []


def _as_warning(check: Check) -> Check:
    if check.ok:
        return check
    return msgspec.structs.replace(
        check, ok=True, warning=True, detail=f"{check.detail} (this lab does not need it)"
    )
