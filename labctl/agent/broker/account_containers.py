"""The containers of accounts, parsed from the engine's listing into typed values.

The engine is trusted, but its responses may be incomplete: it lists a container that is being
removed without a name. One row that cannot be parsed must not hide the others.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

from ..host import engine
from .rules import OWNER

ENDED_STATES = ("exited", "dead", "removing")
LIST_S = 30.0  # an engine that lists no containers within this time counts as hung


class AccountContainer(NamedTuple):
    """A container. `name` has no slash, and is "" if the engine gives none."""

    id: str
    name: str
    state: str
    created_s: float
    uid: int
    labels: dict[str, str]

    @property
    def is_live(self) -> bool:
        """Whether it counts against its account's limits, as one in an unknown state does."""
        return self.state not in ENDED_STATES


def list_containers(uid: int | None = None) -> list[AccountContainer]:
    """List the containers of one account or of all, including stopped ones.

    Rows that cannot be parsed are left out.
    """
    return read_containers(list_rows(uid))[0]


def list_rows(uid: int | None = None) -> Any:
    """List the same as unchecked rows of the engine."""
    label = OWNER if uid is None else f"{OWNER}={uid}"
    filters = quote(json.dumps({"label": [label]}))
    return json.loads(
        engine.call("GET", f"/containers/json?all=1&filters={filters}", timeout_s=LIST_S)
    )


def read_containers(rows: Any) -> tuple[list[AccountContainer], list[str]]:
    """Return the containers, and the problems of the rows that could not be parsed.

    ValueError if it is not a list.
    """
    if not isinstance(rows, list):
        raise ValueError(f"the Docker Engine did not send a list of containers: {str(rows)[:200]}")
    containers, problems = [], []
    for row in rows:
        try:
            containers.append(_read(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            identity = row.get("Id") if isinstance(row, dict) else row
            problems.append(f"container {str(identity)[:64]!a} cannot be read: {error!r}")
    return containers, problems


def _read(row: Any) -> AccountContainer:
    names = [name for name in row.get("Names") or [] if isinstance(name, str)]
    labels = {str(key): str(value) for key, value in row["Labels"].items()}
    created = row.get("Created")
    if not isinstance(row["Id"], str) or not row["Id"]:
        raise ValueError("no id")
    return AccountContainer(
        id=row["Id"],
        name=names[0].lstrip("/") if names else "",
        state=str(row.get("State") or ""),
        created_s=float(created) if isinstance(created, (int, float)) else 0.0,
        uid=int(labels[OWNER]),
        labels=labels,
    )
