"""The settings of a rehearsed RunPod."""

from __future__ import annotations

from labctl.rehearsal.core.scenario import BootMode, CloudScenario


class RunPodScenario(CloudScenario, frozen=True):
    """The settings of CloudScenario, and RunPod's own.

    `regions` are the data centers; capacities name a GPU's id as type. `account` is whose key it
    is; "" for a key without access to GraphQL. `no_pool`: GPUs whose pool the account may not use.
    `description` is the file of RunPod's official description, which checks every request and
    reply; "" for none. Pods boot as the image says: every mode but "none" is the same. `quota` has
    no meaning here. Actions are the operation ids of the description.
    """

    regions: tuple[str, ...] = ("EU-RO-1", "US-KS-2")
    boot: BootMode = "sshd"
    account: str = "user_rehearsal"
    no_pool: tuple[str, ...] = ()
    description: str = ""
