"""The JSON objects that accounts send: their fields, read one by one and checked."""

from __future__ import annotations

from .http import HttpRefusal

MOST_TEXT = 4096  # characters of a name or a path


class RequestFields:
    """The fields of one object. A refusal names the field that has the wrong type.

    As the engine does, each method reads null, "", 0, false, [] and {} like a missing field.
    """

    def __init__(self, document: dict[str, object]) -> None:
        self._document = document

    def get(self, key: str) -> object:
        """Return the unchecked value of a field; None if it is missing."""
        return self._document.get(key)

    def is_set(self, key: str) -> bool:
        return bool(self._document.get(key))

    def refuse_others(self, allowed: tuple[str, ...], prefix: str) -> None:
        """Refuse by name a field that is set and not allowed."""
        for key, value in self._document.items():
            if value and key not in allowed:
                raise HttpRefusal(403, f"a shared server does not allow {prefix}{key[:60]}")

    def read_object(self, key: str) -> RequestFields:
        value = self._document.get(key) or {}
        if not isinstance(value, dict):
            raise HttpRefusal(400, f"{key} must be an object")
        return RequestFields(value)

    def read_texts(self, key: str) -> dict[str, str]:
        """Return an object whose keys are data; its values become text."""
        fields = self.read_object(key)._document
        return {name: str(value) for name, value in fields.items()}

    def read_words(self, key: str) -> list[str]:
        """Return a list of strings; a single string is one word."""
        value = self._document.get(key)
        if isinstance(value, str):
            return [value]
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise HttpRefusal(400, f"{key} must be a list of strings")
        return list(value)

    def read_text(self, key: str) -> str:
        value = self._document.get(key) or ""
        if not isinstance(value, str) or len(value) > MOST_TEXT or "\0" in value:
            raise HttpRefusal(400, f"{key} must be a string of at most {MOST_TEXT} characters")
        return value

    def read_number(self, key: str, limit: int) -> int:
        """Return a number from 0 to `limit`."""
        value = self._document.get(key) or 0
        if isinstance(value, bool) or not isinstance(value, int):
            raise HttpRefusal(400, f"{key} must be an integer")
        return min(max(value, 0), limit)
