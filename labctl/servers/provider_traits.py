"""The traits of a provider that decide how a lab or a course is configured."""

from __future__ import annotations

from labctl.config.schema import ProviderTraits
from labctl.providers import Guarded, OnThisMachine, get_provider_class


def read_provider_traits(name: str) -> ProviderTraits:
    """Return the traits of the provider `name`; UsageError if it is not installed."""
    provider = get_provider_class(name)
    return ProviderTraits(
        settings_type=provider.settings_type,
        on_this_machine=isinstance(provider, OnThisMachine),
        for_students=isinstance(provider, Guarded),
    )
