"""docs/lab.yaml is the schema's reference: it loads, and it leaves no key out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from labctl.config import SWITCHES, list_settings, load_lab
from labctl.config.document import parse
from labctl.config.reader import as_plain, list_keys
from labctl.config.schema import MACHINE_KEYS, LabFile
from labctl.servers.provider_traits import read_provider_traits

MODULES = ("labctl.config.schema", "labctl.config.sweep")
REFERENCE = Path(__file__).parents[2] / "docs" / "lab.yaml"


def struct_in(kind: Any) -> type[msgspec.Struct] | None:
    """The Struct that values of this type are made of, wherever it stands in the type."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return kind
    return next(filter(None, map(struct_in, get_args(kind))), None)


def schema_keys(kind: type[msgspec.Struct], path: str = "") -> set[str]:
    keys = set()
    for key, field in list_keys(kind).items():
        here = f"{path}{key}"
        keys.add(here)
        inner = struct_in(field.type)
        if inner is not None and inner.__module__ in MODULES:
            named = get_origin(field.type) is dict
            keys |= schema_keys(inner, f"{here}.*." if named else f"{here}.")
    return keys


def written_keys(value: Any, path: str = "") -> set[str]:
    keys: set[str] = set()
    if isinstance(value, dict):
        for key, item in value.items():
            step = "*" if path in ("services.", "sweep.parameters.") else key
            keys |= {f"{path}{step}"} | written_keys(item, f"{path}{step}.")
    return keys


def test_the_reference_loads_without_a_problem(tmp_path: Path) -> None:
    lab = load_lab(
        REFERENCE,
        environ={"HOME": str(tmp_path)},
        find_provider=read_provider_traits,
    )
    assert lab.name == "digits"
    assert lab.server.need.budget_usd == 5.0
    assert lab.server.need.ttl_s == 8 * 3600
    assert lab.image.build == "."
    assert lab.run == ("python", "train.py", "--epochs", "5")
    assert lab.services["api"].port == 8000
    assert lab.limits.memory_bytes == 8 * 10**9


def test_every_key_of_the_schema_stands_in_the_reference() -> None:
    top = parse(REFERENCE.read_bytes(), "lab.yaml", [])
    assert top is not None
    wanted = schema_keys(LabFile) - set(MACHINE_KEYS)
    # An image is built in one way, so that the other ways stand in comments.
    other_ways = {f"image.{key}" for key in ("requirements", "python", "extras", "conda")}
    assert wanted - written_keys(as_plain(top)) == other_ways
    for key in other_ways:
        assert re.search(rf"^#.*{key.partition('.')[2]}: ", REFERENCE.read_text(), re.MULTILINE)


def test_the_schema_walk_sees_nested_and_named_keys() -> None:
    # Guards the test above: a walk that finds nothing would pass it.
    assert {"server.max_price", "limits.shm", "image.args", "services.*.port"} <= schema_keys(
        LabFile
    )


def test_machine_keys_and_switches_are_explained_in_it() -> None:
    text = REFERENCE.read_text()
    for key in MACHINE_KEYS:
        assert re.search(rf"^# +{key}: ", text, re.MULTILINE), key
    for short in SWITCHES:
        if short != "name":
            assert f"LABCTL_{short.upper()}" in text, short


def test_every_key_of_the_reference_is_shown_with_its_line(tmp_path: Path) -> None:
    lab = load_lab(REFERENCE, environ={"HOME": str(tmp_path)})
    origins = {key: origin for key, _, origin in list_settings(lab)}
    lines = REFERENCE.read_text().splitlines()
    for key, origin in origins.items():
        if key in MACHINE_KEYS or origin == "default":
            continue
        line = lines[int(origin.removeprefix("lab.yaml:")) - 1]
        assert line.strip().startswith(f"{key.rpartition('.')[2]}:"), (key, origin)
    assert sum(origin.startswith("lab.yaml:") for origin in origins.values()) > 20
