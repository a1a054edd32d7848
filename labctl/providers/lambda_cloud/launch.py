"""Create an instance exactly once, although a launch at Lambda is not idempotent.

An attempt's token is a tag.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from labctl.errors import ProviderError
from labctl.model import CreateServerRequest, Offer
from labctl.providers.http.creation import AttemptMachines
from labctl.providers.lambda_cloud.api import (
    LAMBDA,
    ImageFamily,
    LambdaInstance,
    LambdaRegion,
    LambdaType,
    LaunchRequest,
)
from labctl.providers.lambda_cloud.cloud import LambdaCloud
from labctl.providers.lambda_cloud.settings import LambdaSettings
from labctl.providers.lambda_cloud.tags import (
    TOKEN,
    get_age_key,
    get_tags,
    make_key_name,
    make_name,
    make_tags,
)

ENDED = ("terminating", "terminated", "preempted")


def launch_once(
    cloud: LambdaCloud,
    settings: LambdaSettings,
    owner: str,
    offer: Offer,
    request: CreateServerRequest,
) -> LambdaInstance:
    """Return the instance of this attempt, after launching it unless it exists."""

    def prepare() -> Callable[[], LambdaInstance]:
        family = settings.image_family
        body = LaunchRequest(
            region_name=offer.region,
            instance_type_name=offer.type,
            ssh_key_names=(_ensure_key(cloud, request),),
            name=make_name(request.lab),
            user_data=request.first_boot,
            tags=make_tags(request, owner),
            image=ImageFamily(family=family) if family else msgspec.UNSET,
        )
        return lambda: _launch(cloud, body)

    return LambdaAttempts(cloud).create_once(request.token, settings.settle_s, prepare)


class LambdaAttempts(AttemptMachines[LambdaInstance]):
    cloud = LAMBDA

    def __init__(self, instances: LambdaCloud) -> None:
        self._instances = instances

    def list_attempts(self, token: str) -> list[LambdaInstance]:
        return [
            instance
            for instance in self._instances.list_instances()
            if get_tags(instance).get(TOKEN) == token and instance.status not in ENDED
        ]

    def get_id(self, machine: LambdaInstance) -> str:
        return machine.id

    def get_age_key(self, machine: LambdaInstance) -> tuple[int, str]:
        return get_age_key(machine)

    def end(self, machine: LambdaInstance) -> None:
        self._instances.terminate(machine.id)


def _launch(cloud: LambdaCloud, body: LaunchRequest) -> LambdaInstance:
    return LambdaInstance(
        id=cloud.launch(body),
        status="booting",
        instance_type=LambdaType(name=body.instance_type_name),
        region=LambdaRegion(name=body.region_name),
        name=body.name,
        tags=body.tags,
    )


def _ensure_key(cloud: LambdaCloud, request: CreateServerRequest) -> str:
    """Have the lab's key at Lambda, which a launch must name; return its name.

    A key that an earlier state of this machine left under the name is replaced: a running instance
    does not need it any more.
    """
    name = make_key_name(request.lab, request.lab_id)
    present = {key.name: key for key in cloud.list_keys()}
    words = request.public_key.split()[:2]
    if name in present:
        if present[name].public_key.split()[:2] == words:
            return name
        cloud.delete_key(present[name].id)
    try:
        cloud.add_key(name, " ".join(words))
    except ProviderError:
        # Another call may have added it meanwhile, or an earlier one whose reply was lost.
        if name not in {key.name for key in cloud.list_keys()}:
            raise
    return name
