"""Parse YAML text into nodes that know their line and origin.

Only what labctl's files need is allowed: one document of mappings, lists and scalars. Scalars stay
the strings that were typed (YAML itself reads `1:30` as 90 and `no` as false). Aliases, tags,
control characters and deep nesting are refused, duplicate keys are reported, all at once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labctl.errors import ConfigError, LabError, Problem
from labctl.lazy import lazy_imports
from labctl.model import Value

if TYPE_CHECKING:
    from yaml.nodes import Node as YamlNode

with lazy_imports(__name__):
    import yaml
    from yaml import composer, events, nodes

MAX_FILE_BYTES = 64 * 1024
MAX_DEPTH = 12
MAX_SHOWN_CHARACTERS = 60

_CONTROL = "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]"


class Node(Value, frozen=True):
    """One value of a file. `value` is a string, a mapping, a list, or None for an empty value.

    `origin` is the file or switch it came from; `line` counts from 1, 0 without a line.
    """

    value: str | dict[str, Node] | list[Node] | None
    line: int = 0
    origin: str = ""

    @property
    def location(self) -> str:
        return f"{self.origin}:{self.line}" if self.line else self.origin


def quote(text: str) -> str:
    """Quote `text`, shorten it to a readable length, and escape everything unprintable."""
    if len(text) > MAX_SHOWN_CHARACTERS:
        text = text[: MAX_SHOWN_CHARACTERS - 1] + "…"
    return repr(text)


def make_read_error(path: Path, error: OSError) -> LabError:
    name = escape(str(path))
    return LabError(f"cannot read {name}", why=error.strerror or "", hint=f"ls -l {name}")


def make_problems_error(
    where: str, problems: Iterable[Problem], *, why: str = "", hint: str
) -> ConfigError:
    """Return the error for a file with these problems, in the order of its lines."""
    distinct = sorted(dict.fromkeys(problems), key=lambda p: (p.line == 0, p.line))
    count = "one problem" if len(distinct) == 1 else f"{len(distinct)} problems"
    return ConfigError(f"{where} has {count}", tuple(distinct), why=why, hint=hint)


def make_problem_at(top: Node | None, path: str, message: str) -> Problem:
    """Make a problem at the line of a dotted path of a file, or of its nearest parent there."""
    node, line = top, 0
    for key in path.split("."):
        inner = node.value if node is not None and isinstance(node.value, dict) else {}
        node = inner.get(key)
        line = node.line if node is not None else line
    return Problem(path, line, message)


def escape(text: str) -> str:
    """Escape everything unprintable in `text`, without quotes."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def read_bytes(path: Path, what: str, *, hint: str) -> bytes:
    """Read one of labctl's files; ConfigError if it is missing, too large or not a regular file.

    At most MAX_FILE_BYTES are read. LabError if it cannot be opened.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{escape(str(path))} is not a file", hint=hint)
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no {what} in {escape(str(path.parent))}", hint=hint) from None
    except OSError as error:
        raise make_read_error(path, error) from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{escape(str(path))} is too large",
            why=f"at most {MAX_FILE_BYTES // 1024} KiB are read",
            hint="put data into separate files and list those under data:",
        )
    return data


def parse(data: bytes, origin: str, problems: list[Problem]) -> Node | None:
    """Parse YAML and return its top node, None for an empty text. Adds errors to `problems`."""
    text = _decode(data, problems)
    if text is None:
        return None
    loader = _loader_type()(text)
    try:
        top = loader.get_single_node()
    except yaml.YAMLError as error:
        problems.extend(loader.problems)
        problems.append(_syntax_problem(error, text))
        return None
    problems.extend(loader.problems)
    return None if top is None else _convert(top, origin, "", problems)


def _decode(data: bytes, problems: list[Problem]) -> str | None:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\x00" in data[:4]:
        problems.append(Problem("", 1, "the file is UTF-16 or UTF-32; save it as UTF-8"))
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        problems.append(Problem("", line, f"byte {data[error.start]:#04x} is not UTF-8"))
        return None
    text = text.replace("\r\n", "\n")
    controls = list(re.finditer(_CONTROL, text))
    for match in controls[:10]:
        line = text.count("\n", 0, match.start()) + 1
        problems.append(Problem("", line, f"a control character, {quote(match.group())}"))
    return None if controls else text


def _syntax_problem(error: Exception, text: str) -> Problem:
    """Describe a YAML error for users who do not know the terms of YAML."""
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    line = mark.line + 1 if mark is not None else 1
    message = getattr(error, "problem", None) or getattr(error, "reason", None) or "not YAML"
    lines = text.split("\n")
    line_text = lines[line - 1] if line <= len(lines) else ""
    if line_text[: len(line_text) - len(line_text.lstrip())].count("\t"):
        return Problem("", line, "a tab at the start of the line; indent with spaces")
    # PyYAML has one class for all that its composer refuses.
    if "another document" in message:
        return Problem("", line, "a second document begins here (`---`); only one is allowed")
    return Problem("", line, f"not valid YAML: {escape(str(message))}")


@cache
def _loader_type() -> type:
    """Define the loader at its first use: importing yaml takes longer than all of labctl.config."""

    class Loader(yaml.SafeLoader):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            self.problems: list[Problem] = []
            self._depth = 0

        def compose_node(self, parent: YamlNode | None, index: int) -> YamlNode | None:
            is_alias = self.check_event(events.AliasEvent)
            event = self.current_event
            line = event.start_mark.line + 1
            if is_alias:
                self.current_event = None
                self.problems.append(Problem("", line, "aliases (`*`) are not allowed: repeat it"))
                mark = event.start_mark
                return nodes.ScalarNode("tag:yaml.org,2002:null", "", mark, mark)
            if event.anchor is not None:
                self.problems.append(Problem("", line, "anchors (`&`) are not allowed"))
                event.anchor = None
            if event.tag is not None:
                self.problems.append(Problem("", line, f"tags ({quote(event.tag)}) are refused"))
                event.tag = None
            if self._depth >= MAX_DEPTH:
                message = f"nested deeper than {MAX_DEPTH} levels"
                raise composer.ComposerError(None, None, message, event.start_mark)
            self._depth += 1
            node: YamlNode | None = super().compose_node(parent, index)
            self._depth -= 1
            return node

    return Loader


def _convert(node: Any, origin: str, path: str, problems: list[Problem]) -> Node:
    line = node.start_mark.line + 1
    if node.id == "scalar":
        if node.tag == "tag:yaml.org,2002:null":
            return Node(None, line, origin)
        if re.search(_CONTROL, node.value):
            problems.append(Problem(path, line, f"a control character in {quote(node.value)}"))
        return Node(node.value, line, origin)
    if node.id == "sequence":
        items = [
            _convert(item, origin, f"{path}[{position}]", problems)
            for position, item in enumerate(node.value)
        ]
        return Node(items, line, origin)
    return Node(_convert_mapping(node, origin, path, problems), line, origin)


def _convert_mapping(node: Any, origin: str, path: str, problems: list[Problem]) -> dict[str, Node]:
    entries: dict[str, Node] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar":
            problems.append(Problem(path, line, "a key must be a word, not a list or a mapping"))
            continue
        key_path = f"{path}.{escape(key.value)}" if path else escape(key.value)
        if re.search(_CONTROL, key.value):
            problems.append(Problem(key_path, line, f"a control character in {quote(key.value)}"))
        elif key.value in entries:
            first = entries[key.value].line
            problems.append(Problem(key_path, line, f"given twice, first on line {first}"))
        else:
            # A value gets the line of its key, which is what users look for.
            inner = _convert(value, origin, key_path, problems)
            entries[key.value] = Node(inner.value, line, origin)
    return entries
