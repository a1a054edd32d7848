"""The containers of accounts, as the engine lists them: read once, into typed values.

The engine is trusted, but not each of its answers: it lists a container that is being removed
without a name. One row that cannot be read must not hide the others.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple
from urllib.parse import quote

from ..host import engine
from .rules import OWNER

ENDED_STATES = ("exited", "dead", "removing")
LIST_S = 30.0  # an engine that lists no containers within this time counts as hung


class Container(NamedTuple):
    """`name` is without a slash, and empty where the engine gives none."""

    id: str
    name: str
    state: str
    created_s: float
    uid: int
    labels: dict[str, str]

    @property
    def is_live(self) -> bool:
        """Whether it counts against its account's limits. A state that is not known does."""
        return self.state not in ENDED_STATES


def list_containers(uid: int | None = None) -> list[Container]:
    """Those of one account, or of all, stopped ones too; rows that cannot be read are left out."""
    return read_containers(list_rows(uid))[0]


def list_rows(uid: int | None = None) -> Any:
    """The same as the engine says it, not checked."""
    label = OWNER if uid is None else f"{OWNER}={uid}"
    filters = quote(json.dumps({"label": [label]}))
    return json.loads(
        engine.ask("GET", f"/containers/json?all=1&filters={filters}", timeout_s=LIST_S)
    )


def read_containers(rows: Any) -> tuple[list[Container], list[str]]:
    """The containers, and what is wrong with the rows that hold none. ValueError for no list."""
    if not isinstance(rows, list):
        raise ValueError(f"the Docker Engine listed no containers, but {str(rows)[:200]}")
    containers, problems = [], []
    for row in rows:
        try:
            containers.append(_read(row))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            identity = row.get("Id") if isinstance(row, dict) else row
            problems.append(f"container {str(identity)[:64]!a} cannot be read: {error!r}")
    return containers, problems


def _read(row: dict[str, Any]) -> Container:
    names = [name for name in row.get("Names") or [] if isinstance(name, str)]
    labels = {str(key): str(value) for key, value in row["Labels"].items()}
    created = row.get("Created")
    if not isinstance(row["Id"], str) or not row["Id"]:
        raise ValueError("no id")
    return Container(
        id=row["Id"],
        name=names[0].lstrip("/") if names else "",
        state=str(row.get("State") or ""),
        created_s=float(created) if isinstance(created, (int, float)) else 0.0,
        uid=int(labels[OWNER]),
        labels=labels,
    )
