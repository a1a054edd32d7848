"""Machine images of providers that can make one from a server (protocol `Bake`)."""

from __future__ import annotations

import msgspec

from labctl.config import LabConfig
from labctl.errors import BusyError, PolicyError, ProviderError
from labctl.model import Server
from labctl.providers import Bake, Provider, get_provider_class
from labctl.retry import poll_until
from labctl.text import duration_text

READY_S = 3600.0
POLL_S = 5.0


def can_make_images(provider: Provider) -> bool:
    """Whether the provider can make machine images."""
    return isinstance(provider, Bake)


def estimate_usd_per_month(provider: Provider) -> float | None:
    """Return the most that a machine image costs per month; None if the provider makes none."""
    return provider.estimate_image_usd_per_month() if isinstance(provider, Bake) else None


def require_images(provider: Provider) -> Bake:
    """Return the provider as one that makes machine images; PolicyError if it cannot."""
    if isinstance(provider, Bake):
        return provider
    raise PolicyError(
        f"{provider.name} cannot make machine images",
        why="its machines keep their disks, so each pulls the Docker image only once",
        hint="labctl course up   # a few days before the class",
    )


def make_image(provider: Provider, server: Server, name: str, tags: dict[str, str]) -> str:
    """Make an image of the server; return its id once other servers can boot from it."""
    baker = require_images(provider)
    image_id = baker.bake(server.id, name, tags)
    state = "pending"

    def is_decided() -> bool:
        nonlocal state
        state = baker.get_image_state(image_id)
        return state != "pending"

    if not poll_until(is_decided, pause_s=POLL_S, deadline_s=READY_S):
        raise BusyError(
            f"the image {image_id} is not ready after {duration_text(READY_S)}",
            hint="labctl course bake   # again\nlabctl course bake --drop   # removes it",
        )
    if state != "ready":
        raise ProviderError(
            f"the image {image_id} cannot be used", why=state, hint="labctl course bake   # again"
        )
    return image_id


def use_image(lab: LabConfig, provider_name: str, image_id: str) -> LabConfig:
    """Return the lab with servers that boot from this image at this provider."""
    provider = get_provider_class(provider_name)
    if not issubclass(provider, Bake):
        return lab
    all_settings = lab.server.provider_settings
    settings = all_settings.get(provider_name)
    changed = provider.with_image(
        provider.settings_type() if settings is None else settings, image_id
    )
    server = msgspec.structs.replace(
        lab.server, provider_settings={**all_settings, provider_name: changed}
    )
    return msgspec.structs.replace(lab, server=server)
