"""The providers that a lab names, their settings, and what these providers can do."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import msgspec

from labctl.config.document import Node, escape, quote
from labctl.config.lab_values import LabValues
from labctl.config.reader import LAB_FILE, as_plain, list_keys, make_problem, read, read_struct
from labctl.config.scalars import parse_name
from labctl.config.schema import (
    DEFAULT_PROVIDER,
    LabFile,
    ProviderSettings,
    ProviderTraits,
    ServerFile,
)
from labctl.errors import NotFoundError, Problem, UnknownNameError, UsageError

# Returns the traits of the provider with a name; None, or an error, if it is not installed.
ProviderFinder = Callable[[str], ProviderTraits | None]


class LabProviders:
    """The providers of one lab. `split_server` reads their settings, and so learns their traits.

    `installed` says which providers are installed, once an unknown one was named, and `near` which
    of them was probably meant.
    """

    def __init__(self, values: LabValues, find_provider: ProviderFinder | None) -> None:
        self.values = values
        self.find_provider = find_provider
        self.traits: dict[str, ProviderTraits] = {}
        self.installed = ""
        self.near = ""

    def is_on_this_machine(self, provider: str) -> bool:
        return provider in self.traits and self.traits[provider].on_this_machine

    def is_market(self, provider: str) -> bool:
        return provider in self.traits and self.traits[provider].is_market

    def get_job_executor(self, provider: str) -> str:
        """Return the executor of a provider whose runs are jobs; "" for any other."""
        return self.traits[provider].job_executor if provider in self.traits else ""

    def get_no_engine(self, provider: str) -> str:
        """Return why servers of a provider have no Docker Engine; "" if they may have one."""
        return self.traits[provider].no_engine if provider in self.traits else ""

    def choose_executor(self, file: LabFile) -> str:
        """Return the provider's only executor, else the configured one."""
        provider = file.server.provider
        only = "process" if self.get_no_engine(provider) else ""
        return self.get_job_executor(provider) or only or file.server.executor

    def list_candidates(self, file: LabFile) -> tuple[str, ...]:
        """List the providers to try in turn. An option or a variable selects one alone."""
        provider = file.server.provider
        is_selected = self.values.find_leaf("server.provider").origin.startswith(("--", "LABCTL_"))
        if not file.server.fallback or is_selected:
            return ()
        return tuple(dict.fromkeys((provider, *file.server.fallback)))

    def split_server(self) -> tuple[dict[str, ProviderSettings], Node]:
        """Return the providers' settings, and `server` without their sections."""
        node = self.values.nodes.get("server", Node({}, 0, LAB_FILE))
        if node.value is None:
            node = Node({}, node.line, node.origin)
        if not isinstance(node.value, dict):
            return {}, node
        server_keys = list_keys(ServerFile)
        settings: dict[str, ProviderSettings] = {}
        entries = {}
        for key, item in node.value.items():
            if (
                key in server_keys
                or isinstance(item.value, str | list)
                or not self.read_settings(key, item, settings)
            ):
                entries[key] = item
        self.add_default_settings(node, settings, entries)
        return settings, Node(entries, node.line, node.origin)

    def read_settings(
        self, provider: str, node: Node, settings: dict[str, ProviderSettings]
    ) -> bool:
        """Read one provider's section into `settings`; False for an unknown provider."""
        if self.find_provider is None:
            settings[provider] = as_plain(node) or {}
            return True
        traits = self.find_traits(provider)
        if traits is None:
            return False
        self.traits[provider] = traits
        path = f"server.{escape(provider)}"
        settings[provider] = _read_section(node, traits.settings_type, path, self.values.problems)
        return True

    def find_traits(self, provider: str) -> ProviderTraits | None:
        """Return a provider's traits; None, and note which are installed, if it is unknown."""
        try:
            parse_name(provider)
            return self.find_provider(provider) if self.find_provider else None
        except ValueError:
            return None
        except (UsageError, NotFoundError) as error:
            self.installed = error.why
            self.near = error.near if isinstance(error, UnknownNameError) else ""
            return None

    def add_default_settings(
        self, server: Node, settings: dict[str, ProviderSettings], entries: dict[str, Node]
    ) -> None:
        """Use default settings for the provider in use if it has no section."""
        default = Node(DEFAULT_PROVIDER, server.line, server.origin)
        selected = entries.get("provider", default)
        name = default.value if selected.value is None else selected.value
        if not isinstance(name, str) or name in settings or self.find_provider is None:
            return
        if name in entries and name not in list_keys(ServerFile):
            return
        if not self.read_settings(name, Node({}, selected.line, selected.origin), settings):
            message = f"there is no provider called {quote(name)}"
            message = f"{message}; {self.installed}" if self.installed else message
            self.values.problems.append(
                make_problem(selected, "server.provider", message, self.near)
            )


def _read_section(
    node: Node, kind: type[msgspec.Struct], path: str, problems: list[Problem]
) -> msgspec.Struct | None:
    """Read a provider's section; of one with problems what can be read, None if nothing can."""
    before = len(problems)
    section: msgspec.Struct | None = read(node, kind, path, problems)
    if section is None and len(problems) > before:
        with suppress(ValueError):  # of keys that exclude each other
            section = read_struct(node, kind, path, [])
    return section
