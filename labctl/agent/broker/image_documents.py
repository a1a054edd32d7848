"""The documents of an uploaded image, rebuilt from the keys that the Docker Engine knows.

Unknown keys are dropped, and values of an unexpected type are refused. An image that the engine
itself saved keeps every byte of its configuration, and so its id.
"""

from __future__ import annotations

from typing import Any, Callable, Mapping, NamedTuple

from .strict_json import encode_json, parse_json

# Returns the checked value; ValueError if it has the wrong type.
Check = Callable[[Any], Any]


class ManifestEntry(NamedTuple):
    """An image in manifest.json."""

    config: str
    tags: list[str]
    layers: list[str]


def parse_manifest(text: bytes) -> list[ManifestEntry]:
    """Parse manifest.json. ValueError if it is not what `docker save` writes."""
    entries = _check_manifest(parse_json(text))
    if not entries:
        raise ValueError("it names no image")
    return [
        ManifestEntry(
            entry.get("Config") or "", entry.get("RepoTags") or [], entry.get("Layers") or []
        )
        for entry in entries
    ]


def encode_manifest(entries: list[ManifestEntry]) -> bytes:
    return encode_json(
        [
            {"Config": entry.config, "RepoTags": entry.tags, "Layers": entry.layers}
            for entry in entries
        ]
    )


def rebuild_config(text: bytes) -> bytes:
    """Rebuild an image's configuration. ValueError if it is not one."""
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


def _check_empty(value: Any) -> dict[str, str]:
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
        return [check(item) for item in value]

    return check_list


def _make_map_check(check: Check) -> Check:
    """Return a check for an object whose keys are data, such as labels."""

    def check_map(value: Any) -> object:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        return {key: check(item) for key, item in value.items()}

    return check_map


def _make_object_check(known: Mapping[str, Check]) -> Check:
    """Return a check for an object with known keys. It keeps their order, and null values."""

    def check_object(value: Any) -> object:
        if not isinstance(value, dict):
            raise ValueError("expected an object")
        checked = {}
        for key, item in value.items():
            if key not in known:
                continue
            try:
                checked[key] = None if item is None else known[key](item)
            except ValueError as error:
                raise ValueError(f"{key}: {error}") from None
        return checked

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
        # The last container of the classic builder: nothing reads it, but it is part of the id.
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
