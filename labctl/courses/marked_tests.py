"""The points of an assignment's tests, read from their files without running them.

`@pytest.mark.points(5, visibility="hidden")` on a test function says what it is worth, and who may
see its result.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from labctl.courses.grading.parts import VISIBILITIES, MarkedTest

FORM = 'write @pytest.mark.points(5, visibility="hidden")'
Function = ast.FunctionDef | ast.AsyncFunctionDef


def list_test_files(root: Path) -> list[Path]:
    """List the files that pytest collects; ValueError if there are none."""
    if not root.is_dir():
        raise ValueError(f"there is no directory {root}")
    files = sorted(path for path in root.rglob("test_*.py") if path.is_file())
    if not files:
        raise ValueError(f"{root} has no file test_*.py, which pytest would run")
    return files


def read_marked_tests(root: Path) -> tuple[MarkedTest, ...]:
    """Return every test function below `root`; ValueError names the line of a wrong marker."""
    tests: list[MarkedTest] = []
    for file in list_test_files(root):
        name = file.relative_to(root).as_posix()
        try:
            tree = ast.parse(file.read_bytes())
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            raise ValueError(f"{name}:{line} is not valid Python") from None
        tests += _read_body(tree.body, name, name)
    return tuple(tests)


def _read_body(body: list[ast.stmt], prefix: str, file: str) -> Iterator[MarkedTest]:
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
            _refuse_marker(node.decorator_list, file)
            yield from _read_body(node.body, f"{prefix}::{node.name}", file)
        elif isinstance(node, Function) and node.name.startswith("test"):
            marker = _find_marker(node.decorator_list, file)
            points, visibility = _read_marker(marker, file) if marker else (0.0, "")
            yield MarkedTest(name=f"{prefix}::{node.name}", points=points, visibility=visibility)
        elif isinstance(node, ast.Assign):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "pytestmark" in names:
                _refuse_marker(list(ast.walk(node.value)), file)


def _refuse_marker(nodes: list[ast.expr] | list[ast.AST], file: str) -> None:
    for node in nodes:
        if _is_marker(node):
            line = getattr(node, "lineno", 1)
            raise ValueError(f"{file}:{line} has points for a class or module: mark each function")


def _is_marker(node: ast.AST) -> bool:
    target = node.func if isinstance(node, ast.Call) else node
    return (
        isinstance(target, ast.Attribute)
        and target.attr == "points"
        and isinstance(target.value, ast.Attribute)
        and target.value.attr == "mark"
    )


def _find_marker(decorators: list[ast.expr], file: str) -> ast.expr | None:
    markers = [node for node in decorators if _is_marker(node)]
    if len(markers) > 1:
        raise ValueError(f"{file}:{markers[1].lineno} has points twice")
    return markers[0] if markers else None


def _read_marker(marker: ast.expr, file: str) -> tuple[float, str]:
    """Return the points and the visibility of a marker; only literals, so that pytest agrees."""
    wrong = ValueError(f"{file}:{marker.lineno} is not valid: {FORM}")
    if not isinstance(marker, ast.Call) or len(marker.args) != 1:
        raise wrong
    arguments = {word.arg: word.value for word in marker.keywords}
    points = _read_literal(marker.args[0])
    visibility = _read_literal(arguments.pop("visibility", ast.Constant("")))
    if arguments or isinstance(points, bool) or not isinstance(points, int | float) or points < 0:
        raise wrong
    if visibility not in ("", *VISIBILITIES):
        raise ValueError(f"{file}:{marker.lineno}: visibility is one of {', '.join(VISIBILITIES)}")
    return float(points), str(visibility)


def _read_literal(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None
