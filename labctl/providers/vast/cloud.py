"""The calls of Vast.ai's API that labctl makes."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from labctl.errors import CapacityError, CredentialsError, ProviderError
from labctl.model import Value
from labctl.providers.http import AbsentError, ApiClient, remember_account
from labctl.providers.http.client import Nothing
from labctl.providers.vast.api import (
    VAST,
    AddVastKeyRequest,
    Ask,
    Asks,
    InstancePage,
    ManageRequest,
    Rented,
    RentRequest,
    SearchRequest,
    TargetState,
    VastInstance,
    VastKey,
    VastUser,
)
from labctl.providers.vast.label import parse_label

# Every path ends in a slash, as in Vast.ai's own tools: a redirect would lose the request's body.
INSTANCES = "/api/v1/instances/"
KEYS = "/api/v0/ssh/"
# What one page of instances may have at most.
PAGE_SIZE = 25
# A list that has more pages than this does not end.
MOST_PAGES = 1000
Reply = TypeVar("Reply")


class IdFilter(Value, frozen=True):
    """`select_filters` of a list of instances."""

    id: dict[str, int]


class VastCloud:
    """One account's instances and keys. `cache_dir` remembers which account it is."""

    def __init__(self, cache_dir: Path | None) -> None:
        self._client = ApiClient(VAST)
        self._cache_dir = cache_dir

    def get_account_id(self) -> str:
        return remember_account(VAST, self._cache_dir, lambda: str(self.read_user().id))

    def read_user(self) -> VastUser:
        return self._client.get("read the account", "/api/v0/users/current/", VastUser)

    def search(self, request: SearchRequest) -> tuple[Ask, ...]:
        try:
            path = "/api/v0/bundles/"
            return self._client.post("search for offers", path, Asks, request).offers
        except AbsentError as error:
            # The only meaning of this status that is documented for a search.
            what = f"the {VAST.name} key is not accepted"
            raise CredentialsError(what, why=error.why, hint=VAST.key_help) from error

    def rent(self, ask_id: str, request: RentRequest) -> int:
        """Accept an offer and return the instance's id; 0 if the reply does not say it.

        CapacityError if the offer is gone, or costs more now.
        """
        path = f"/api/v0/asks/{ask_id}/"
        try:
            reply = self._client.call("PUT", "rent the machine", path, Rented, body=request)
        except AbsentError as error:
            raise make_gone_error(error.why) from error
        return reply.new_contract

    def list_instances(self) -> list[VastInstance]:
        """List labctl's instances."""
        return [one for one in self._list_pages({}) if parse_label(one.label)]

    def find_instance(self, instance_id: str) -> VastInstance | None:
        """Find an instance of labctl by its id."""
        if not instance_id.isdecimal():
            return None
        text = msgspec.json.encode(IdFilter(id={"eq": int(instance_id)})).decode()
        listed = self._list_pages({"select_filters": text})
        ours = [one for one in listed if str(one.id) == instance_id and parse_label(one.label)]
        return ours[0] if ours else None

    def _list_pages(self, query: dict[str, str]) -> list[VastInstance]:
        listed: list[VastInstance] = []
        query = {**query, "limit": str(PAGE_SIZE)}
        for _ in range(MOST_PAGES):
            page = self._client.get("list the instances", INSTANCES, InstancePage, query)
            listed += page.instances
            if not page.next_token:
                return listed
            query = {**query, "after_token": page.next_token}
        raise ProviderError(
            "Vast.ai's list of instances does not end",
            why=f"it has more than {MOST_PAGES} pages",
            hint="run the same command again in a minute",
        )

    def destroy(self, instance_id: str) -> None:
        """Destroy an instance with its disk; an absent one counts as success."""
        if not instance_id.isdecimal():
            return
        try:
            path = f"/api/v0/instances/{instance_id}/"
            self._client.delete("destroy the instance", path)
        except AbsentError:
            return

    def set_state(self, instance_id: str, state: TargetState) -> None:
        self._manage(instance_id, f"set the instance to {state}", ManageRequest(state=state))

    def set_label(self, instance_id: str, label: str) -> None:
        self._manage(instance_id, "label the instance", ManageRequest(label=label))

    def _manage(self, instance_id: str, action: str, body: ManageRequest) -> None:
        path = f"/api/v0/instances/{instance_id}/"
        self._client.call("PUT", action, path, Nothing, body=body)

    def list_keys(self) -> tuple[VastKey, ...]:
        try:
            return self._client.get("list the SSH keys", KEYS, tuple[VastKey, ...])
        except AbsentError:
            return ()

    def add_key(self, line: str) -> None:
        self._client.post("add an SSH key", KEYS, Nothing, AddVastKeyRequest(ssh_key=line))

    def delete_key(self, key_id: str) -> None:
        """Delete a key; an absent one counts as success. Vast.ai documents no 404 for it."""
        if not key_id.isdecimal():
            return
        try:
            self._client.delete("delete the SSH key", f"{KEYS}{key_id}/")
        except ProviderError:
            if key_id in {str(key.id) for key in self.list_keys()}:
                raise


def make_gone_error(why: str) -> CapacityError:
    """Return the error of an offer that somebody else has rented, or that costs more now."""
    return CapacityError(
        "Vast.ai no longer has this offer", why=why, hint=lambda subject: subject.offers
    )
