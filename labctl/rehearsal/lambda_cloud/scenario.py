"""The settings of a rehearsed Lambda."""

from __future__ import annotations

from labctl.rehearsal.core.scenario import CloudDelays, CloudScenario


class LambdaScenario(CloudScenario, frozen=True):
    """The settings of CloudScenario, and Lambda's own.

    `account` is the owner that the audit log names, "" for a log without events. `types` are the
    instance types offered (() for all). Actions are the operation ids of description.yaml.
    """

    regions: tuple[str, ...] = ("us-east-1", "us-west-1")
    delays: CloudDelays = CloudDelays(forget=60.0)
    account: str = "lrn:lambda:account:rehearsal"
    types: tuple[str, ...] = ()
