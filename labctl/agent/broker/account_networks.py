"""The network of each account, in which its containers are."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager
from typing import Iterator
from urllib.parse import quote

from ..host import engine
from ..host.engine_objects import Network
from .http import HttpRefusal
from .networks import BRIDGE
from .rules import OWNER, BrokerAccount

# Statuses of the engine for a network that containers use, and for one that is gone.
IN_USE, GONE = 403, 404


class AccountNetworks:
    """The networks of accounts. The engine has addresses for about 30, and a class more accounts.

    So networks without a running container are removed when there are too many; but never while
    their account starts a container.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._starting: Counter[int] = Counter()

    @contextmanager
    def hold(self, account: BrokerAccount) -> Iterator[None]:
        """Create the account's network if it does not exist, and keep it inside."""
        with self._lock:
            self._starting[account.uid] += 1
        try:
            self.ensure(account)
            yield
        finally:
            with self._lock:
                self._starting[account.uid] -= 1

    def ensure(self, account: BrokerAccount) -> str:
        """Return the name of the account's own network, created if it does not exist."""
        name = f"labctl-u{account.uid}"
        body = {
            "Name": name,
            "CheckDuplicate": True,
            "Driver": "bridge",
            "Options": {"com.docker.network.bridge.name": f"{BRIDGE}{account.uid}"},
            "Labels": {OWNER: str(account.uid)},
        }
        try:
            engine.call("GET", f"/networks/{name}")
        except engine.EngineRequestError as absent:
            if absent.status != GONE:
                raise
            try:
                _create(body)
            except engine.EngineRequestError:
                self._remove_unused()
                try:
                    _create(body)
                except engine.EngineRequestError as refused:
                    raise HttpRefusal(
                        500, f"could not create a network for {account.name}: {refused.message}"
                    ) from None
        return name

    def _remove_unused(self) -> None:
        """Remove the networks of accounts that have no running container, and start none."""
        filters = quote(json.dumps({"label": [OWNER]}))
        with self._lock:
            for row in json.loads(engine.call("GET", f"/networks?filters={filters}")):
                network = engine.convert_object(Network, row)
                uid = (network.Labels or {}).get(OWNER, "")
                if not (uid.isdigit() and self._starting[int(uid)]):
                    _remove_unless_used(network.Id)


def _create(body: dict[str, object]) -> None:
    """Create a network; one that another request has created meanwhile is fine."""
    try:
        engine.call("POST", "/networks/create", body)
    except engine.EngineRequestError as refused:
        if refused.status != 409:
            raise


def _remove_unless_used(network: str) -> None:
    try:
        engine.call("DELETE", f"/networks/{network}")
    except engine.EngineRequestError as refused:
        if refused.status not in (IN_USE, GONE):
            raise
