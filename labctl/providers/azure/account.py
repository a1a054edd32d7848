"""Subscription and credentials from the environment and the Azure CLI's own files.

They are read without Microsoft's SDK, which takes most of a second to import.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from labctl.config import expand_user, find_home
from labctl.decoding import decode_json
from labctl.model import Value

SUBSCRIPTION = "AZURE_SUBSCRIPTION_ID"
PROFILE = "azureProfile.json"
# Any of these sets of variables has azure-identity sign in without the Azure CLI.
VARIABLES = (
    ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_SECRET"),
    ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_CLIENT_CERTIFICATE_PATH"),
    ("AZURE_TENANT_ID", "AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE"),
    ("IDENTITY_ENDPOINT", "IDENTITY_HEADER"),
)


class CliSubscription(Value, frozen=True, rename="camel"):
    id: str
    is_default: bool = False


class CliProfile(Value, frozen=True):
    """The file in which `az login` records the subscriptions of the user."""

    subscriptions: tuple[CliSubscription, ...] = ()


def has_credentials(environ: Mapping[str, str]) -> bool:
    """Whether azure-identity would find credentials: variables, or a login of the Azure CLI."""
    if any(all(environ.get(name) for name in names) for names in VARIABLES):
        return True
    return bool(_read_profile(environ).subscriptions)


def resolve_subscription(chosen: str, environ: Mapping[str, str]) -> str:
    """Return the id of the subscription that pays; "" if none is named."""
    if chosen or environ.get(SUBSCRIPTION):
        return chosen or environ[SUBSCRIPTION]
    listed = _read_profile(environ).subscriptions
    return next((one.id for one in listed if one.is_default), "")


def _read_profile(environ: Mapping[str, str]) -> CliProfile:
    named = environ.get("AZURE_CONFIG_DIR", "")
    directory: Path = expand_user(named) if named else find_home(environ) / ".azure"
    try:
        # The Azure CLI writes a byte order mark.
        text = (directory / PROFILE).read_text(encoding="utf-8-sig")
        return decode_json(text, CliProfile)
    except (OSError, UnicodeDecodeError, msgspec.DecodeError):
        return CliProfile()
