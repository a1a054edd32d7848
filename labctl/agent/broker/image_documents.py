"""The documents of an uploaded image, built anew from the keys that the Docker Engine knows.

What is not known is left out, what has another type than the engine expects is refused. An image
that the engine itself saved keeps every byte of its configuration, and so its id.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

from .strict_json import encode_json, parse_json

# Returns the value as it goes on; ValueError where it has the wrong type.
Check = Callable[[Any], Any]


class Entry(NamedTuple):
    """One image of manifest.json."""

    config: str
    tags: list[str]
    layers: list[str]


def parse_manifest(text: bytes) -> list[Entry]:
    """Parse manifest.json; ValueError where it is not what `docker save` writes."""
    entries = _check_manifest(parse_json(text))
    if not entries:
        raise ValueError("it names no image")
    return [
        Entry(entry.get("Config") or "", entry.get("RepoTags") or [], entry.get("Layers") or [])
        for entry in entries
    ]


def encode_manifest(entries: list[Entry]) -> bytes:
    return encode_json(
        [{"Config": one.config, "RepoTags": one.tags, "Layers": one.layers} for one in entries]
    )


def rebuild_config(text: bytes) -> bytes:
    """Build an image's configuration anew; ValueError where it is not one."""
    return encode_json(_check_config(parse_json(text)))


def _check_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected text")
    return value


def _check_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("expected true or false")
    return value


def _check_number(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("expected a whole number")
    return value


def _check_empty(value: Any) -> dict[str, Any]:
    if value != {}:
        raise ValueError("expected {}")
    return {}


def _check_layers(value: Any) -> str:
    if value != "layers":
        raise ValueError('expected "layers"')
    return "layers"


def _make_list_check(check: Check) -> Check:
    def check_list(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise ValueError("expected a list")
        return [check(one) for one in value]

    return check_list


def _make_map_check(check: Check) -> Check:
    """For an object whose keys are data, as those of labels are."""

    def check_map(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        return {key: check(one) for key, one in value.items()}

    return check_map


def _make_object_check(known: Mapping[str, Check]) -> Check:
    """For an object with known keys, kept in the order in which they came. null stands for none."""

    def check_object(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        made = {}
        for key, one in value.items():
            if key not in known:
                continue
            try:
                made[key] = None if one is None else known[key](one)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return made

    return check_object


_check_texts = _make_list_check(_check_text)
_check_set = _make_map_check(_check_empty)
_check_manifest = _make_list_check(
    _make_object_check({"Config": _check_text, "RepoTags": _check_texts, "Layers": _check_texts})
)
_TEXT = ("Hostname", "Domainname", "User", "Image", "WorkingDir", "MacAddress", "StopSignal")
_FLAGS = ("AttachStdin", "AttachStdout", "AttachStderr", "Tty", "OpenStdin", "StdinOnce")
_TEXTS = ("Env", "Cmd", "Entrypoint", "OnBuild", "Shell")
_check_container = _make_object_check(
    {
        **dict.fromkeys(_TEXT, _check_text),
        **dict.fromkeys((*_FLAGS, "NetworkDisabled", "ArgsEscaped"), _check_flag),
        **dict.fromkeys(_TEXTS, _check_texts),
        "ExposedPorts": _check_set,
        "Volumes": _check_set,
        "Labels": _make_map_check(_check_text),
        "StopTimeout": _check_number,
        "Healthcheck": _make_object_check(
            {
                "Test": _check_texts,
                "Interval": _check_number,
                "Timeout": _check_number,
                "StartPeriod": _check_number,
                "StartInterval": _check_number,
                "Retries": _check_number,
            }
        ),
    }
)
_ABOUT = ("architecture", "variant", "os", "os.version", "author", "comment", "created")
_check_config = _make_object_check(
    {
        **dict.fromkeys((*_ABOUT, "container", "docker_version"), _check_text),
        "os.features": _check_texts,
        "config": _check_container,
        # What the classic builder ran last: nothing reads it, and the id is the hash of it too.
        "container_config": _check_container,
        "rootfs": _make_object_check({"type": _check_layers, "diff_ids": _check_texts}),
        "history": _make_list_check(
            _make_object_check(
                {
                    **dict.fromkeys(("created", "author", "created_by", "comment"), _check_text),
                    "empty_layer": _check_flag,
                }
            )
        ),
    }
)
