"""Why a script of the lab fails on its arguments: a module that it imports parses them too."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable
from pathlib import Path

PARSERS = frozenset(("parse_args", "parse_known_args"))
# what argparse prints last for arguments that a parser does not know or lacks
_USAGE_ERROR = re.compile(
    r"^\S+: error: (?:unrecognized arguments|the following arguments are required)", re.MULTILINE
)


def explain_usage_error(script: Path, output: str) -> str:
    """Name the module beside `script` that parses its arguments at import; "" if none is seen."""
    if not _USAGE_ERROR.search(output):
        return ""
    for name in _list_imports(_parse(script)):
        module = script.with_name(f"{name}.py")
        if _parses_at_import(_parse(module)):
            return (
                f"{script.name} imports {module.name}, which parses arguments as it is imported. "
                f'Move that code of {module.name} below `if __name__ == "__main__":`.'
            )
    return ""


def _parse(file: Path) -> ast.Module:
    """Return the tree of a Python file; an empty one if it cannot be read."""
    with contextlib.suppress(OSError, ValueError, SyntaxError, RecursionError):
        return ast.parse(file.read_bytes())
    return ast.Module(body=[], type_ignores=[])


def _list_imports(tree: ast.Module) -> list[str]:
    """List the names of the modules that a script imports, as it writes them."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


def _parses_at_import(tree: ast.Module) -> bool:
    """Whether code outside of functions and of the guard of a program parses arguments.

    It may call a function of the same module that does.
    """
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    parsing = {one.name for one in functions if PARSERS & _list_calls([one])}
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    executed = [
        node for node in tree.body if not isinstance(node, definitions) and not _is_guard(node)
    ]
    return bool((PARSERS | parsing) & _list_calls(executed))


def _list_calls(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of all functions and methods that are called in `nodes`."""
    calls = [node.func for top in nodes for node in ast.walk(top) if isinstance(node, ast.Call)]
    names = {call.id for call in calls if isinstance(call, ast.Name)}
    return names | {call.attr for call in calls if isinstance(call, ast.Attribute)}


def _is_guard(node: ast.stmt) -> bool:
    """Whether it is `if __name__ == "__main__":`."""
    return isinstance(node, ast.If) and any(
        isinstance(one, ast.Name) and one.id == "__name__" for one in ast.walk(node.test)
    )
