"""The settings of a rehearsed Vast.ai."""

from __future__ import annotations

from labctl.rehearsal.core.scenario import CloudScenario


class VastScenario(CloudScenario, frozen=True):
    """The settings of CloudScenario, and Vast.ai's own.

    `regions` are the countries that have machines. `account` is the user's number. `description` is
    the file of Vast.ai's official description, which checks every request and reply; "" for none.
    `gone` are offers that are shown, and that somebody else has rented (ids as patterns). Prices
    and capacities name `1x_RTX_4090`. `quota` has no meaning here, and machines with `boot: sshd`
    run no `onstart`. Actions are the operation ids of the description.
    """

    regions: tuple[str, ...] = ("US", "SE", "TW")
    account: int = 100_001
    description: str = ""
    gone: tuple[str, ...] = ()
