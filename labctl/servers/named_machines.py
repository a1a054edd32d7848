"""Providers whose servers are machines with names, such as those of a cluster of a course."""

from __future__ import annotations

from labctl.errors import UsageError
from labctl.providers import NamedMachines, Provider
from labctl.transports import Transport


def list_machine_names(provider: Provider) -> tuple[str, ...]:
    """List the machines in their configured order; () if the provider makes its servers itself."""
    return provider.list_machine_names() if isinstance(provider, NamedMachines) else ()


def select_machine(provider: Provider, name: str) -> Provider:
    """Return a provider that has only this machine."""
    return _require_names(provider).select_machine(name)


def open_machine(provider: Provider, name: str) -> Transport:
    """Return a transport to the machine, in use or not. ConnectError if it does not answer."""
    transport: Transport = _require_names(provider).open_machine(name)
    return transport


def _require_names(provider: Provider) -> NamedMachines:
    if not isinstance(provider, NamedMachines):
        raise UsageError(
            f"provider {provider.name} has no machines with names", hint="labctl config"
        )
    return provider
