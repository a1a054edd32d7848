#!/usr/bin/env python3
"""Count violations of the rules of CONTRIBUTING.md for names and imports; fail if a count grew.

usage: check_wording.py [--list]

wording.toml has the limit of each count. If you lower a count, lower its limit too.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RULES = tomllib.loads((ROOT / "scripts" / "wording.toml").read_text())
NO_VERBS = frozenset(RULES["words"]["no_verbs"].split())
VAGUE_MODULES = frozenset(RULES["words"]["vague_modules"].split())
PHRASES = [re.compile(pattern) for pattern in RULES["words"]["phrases"]]
UNTYPED = re.compile(r"(?:dict|Mapping)\[str, Any\]")
PROSE = ("labctl", "docs", "templates", "images", "playbooks", "scripts", "*.md")


@dataclass
class Findings:
    """Violations by rule, and the files of each class name, which may be in one file only."""

    places: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    classes: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))

    def finish(self) -> dict[str, list[str]]:
        shared = {name: files for name, files in self.classes.items() if len(files) > 1}
        self.places["shared_class_names"] = [
            f"{name}: {', '.join(sorted(files))}" for name, files in sorted(shared.items())
        ]
        return self.places


def list_tracked(*patterns: str) -> Iterator[tuple[str, str]]:
    """Yield (path relative to the repository, text) of each tracked text file."""
    words = ["git", "-C", str(ROOT), "ls-files", "-z", "--", *patterns]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    for name in filter(None, output.split("\0")):
        try:
            yield name, (ROOT / name).read_text()
        except (UnicodeDecodeError, IsADirectoryError, FileNotFoundError):
            continue


def check_source(findings: Findings, name: str, text: str) -> None:
    """Check names, untyped dictionaries, misused strings, and imports inside functions."""
    places = findings.places
    if Path(name).stem.strip("_") in VAGUE_MODULES:
        places["vague_modules"].append(name)
    places["untyped_dictionaries"] += [name] * len(UNTYPED.findall(text))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name.strip("_") in NO_VERBS:
                places["functions_without_verb"].append(f"{name}:{node.lineno}: {node.name}")
            places["indented_imports"] += [f"{name}:{line}" for line in find_imports(node)]
        elif isinstance(node, ast.ClassDef):
            findings.classes[node.name.strip("_")].add(name)
        places["strings_below_constants"] += [
            f"{name}:{line}" for line in find_strings_below_constants(node)
        ]


def find_imports(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[int]:
    """Yield the lines of a function's imports, without those of functions inside it."""
    nodes: list[ast.AST] = [*function.body]
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node.lineno
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


def find_strings_below_constants(node: ast.AST) -> Iterator[int]:
    """Yield the lines of strings after an assignment, where a comment above it belongs."""
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for before, after in pairwise(body):
        match before, after:
            case ast.Assign() | ast.AnnAssign(), ast.Expr(value=ast.Constant(value=str())):
                yield after.lineno


def check_prose(findings: Findings, name: str, text: str) -> None:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in PHRASES:
            if pattern.search(line):
                findings.places["phrases"].append(f"{name}:{number}: {line.strip()[:90]}")


def main() -> int:
    findings = Findings()
    for name, text in list_tracked("labctl/*.py", "labctl/**/*.py"):
        check_source(findings, name, text)
    for name, text in list_tracked(*PROSE):
        if name != "scripts/wording.toml":
            check_prose(findings, name, text)
    places = findings.finish()
    if "--list" in sys.argv[1:]:
        for rule in RULES["limits"]:
            print(f"{rule}:", *places[rule], sep="\n  ")
    grown = []
    for rule, limit in RULES["limits"].items():
        count = len(places[rule])
        if count > limit:
            grown.append(f"{rule}: {count}, at most {limit}")
        elif count < limit:
            print(f"{rule}: {count}; lower its limit of {limit} in scripts/wording.toml")
    if grown:
        print(
            "These counts exceed their limits (see CONTRIBUTING.md):",
            *grown,
            sep="\n  ",
        )
        print("To see them: scripts/check_wording.py --list")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())
