"""The query parameters that are passed on to the engine. All others are dropped."""

from __future__ import annotations

from .http import HttpRefusal
from .strict_json import parse_json

FILTERS = ("label", "status", "name", "id")
PARAMETERS = {
    "logs": ("follow", "stdout", "stderr", "since", "until", "timestamps", "tail", "details"),
    "stats": ("stream", "one-shot"),
    # Nothing: the engine runs ps on the machine itself, with any arguments.
    "top": (),
    "stop": ("t", "signal"),
    "kill": ("signal",),
    "wait": ("condition",),
    "attach": ("detachKeys", "logs", "stream", "stdin", "stdout", "stderr"),
    "resize": ("h", "w"),
    "start": (),
    "json": (),
}


def pick_parameters(action: str, query: dict[str, str]) -> dict[str, str]:
    """Return the parameters that this action on a container or an exec may have."""
    return {key: query[key] for key in PARAMETERS[action] if key in query}


def parse_filters(text: str) -> dict[str, list[str]]:
    """Parse a listing's filters: each a list of words, or an object with the words as its keys."""
    try:
        document = parse_json(text.encode())
        if not isinstance(document, dict):
            raise ValueError("expected an object")
        filters = {
            key: list(document[key])
            for key in FILTERS
            if isinstance(document.get(key), (dict, list))
        }
        if not all(isinstance(word, str) for words in filters.values() for word in words):
            raise ValueError("expected words")
    except ValueError as error:
        raise HttpRefusal(400, f"the filters cannot be read: {error}") from None
    return filters
