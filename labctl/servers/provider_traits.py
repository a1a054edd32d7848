"""The traits of a provider that decide how a lab or a course is configured."""

from __future__ import annotations

from labctl.config.schema import ProviderTraits
from labctl.providers import (
    Guarded,
    Marketplace,
    OnThisMachine,
    Provider,
    RequiresSettings,
    RunsWithoutEngine,
    SubmitsJobs,
    get_provider_class,
)


def read_provider_traits(name: str) -> ProviderTraits:
    """Return the traits of the provider `name`; UsageError if it is not installed."""
    provider = get_provider_class(name)
    return ProviderTraits(
        settings_type=provider.settings_type,
        on_this_machine=isinstance(provider, OnThisMachine),
        for_students=isinstance(provider, Guarded),
        is_market=isinstance(provider, Marketplace),
        job_executor=provider.job_executor if isinstance(provider, SubmitsJobs) else "",
        no_engine=provider.no_engine if isinstance(provider, RunsWithoutEngine) else "",
    )


def describe_provider(provider: Provider) -> str:
    """Return the provider's name; for one that asks all others, say so."""
    return "all providers" if isinstance(provider, Marketplace) else provider.name


def get_settings_example(name: str) -> str:
    """Return a section of lab.yaml for a provider that requires one; "" for any other."""
    provider = get_provider_class(name)
    return provider.settings_example if isinstance(provider, RequiresSettings) else ""


def check_settings(provider: Provider) -> None:
    """UsageError if settings are missing without which the provider finds no server."""
    if isinstance(provider, RequiresSettings):
        provider.check_settings()
