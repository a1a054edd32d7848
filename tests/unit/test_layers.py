"""The house's layers, as import-linter reads them from pyproject.toml."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from labctl import providers

ROOT = Path(__file__).parents[2]
ROOM = re.compile(r"\w+")
LINT = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]


def lint(directory: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*LINT, "--no-cache", "--config", str(directory / "pyproject.toml")],
        cwd=directory,
        capture_output=True,
        text=True,
    )


def test_imports_point_down_only() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_package_of_the_house_stands_in_a_layer() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [one for one in settings["contracts"] if one["type"] == "layers"]
    placed = {name for line in layers["layers"] for name in ROOM.findall(line)}
    there = {
        path.stem
        for path in (ROOT / "labctl").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert there - {"__init__"} <= placed | set(layers["exhaustive_ignores"])


def test_an_import_that_points_up_is_caught(tmp_path: Path) -> None:
    """The check itself works: the same contracts on a house with one wrong import fail."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (layers,) = [one for one in settings["contracts"] if one["type"] == "layers"]
    package = tmp_path / "wrong_house"
    package.mkdir()
    (package / "__init__.py").write_text("")
    names = [name for line in layers["layers"] for name in ROOM.findall(line)]
    for name in names:
        wrong = "import wrong_house.cli\n" if name == "model" else ""
        (package / f"{name}.py").write_text(wrong)
    lines = ",\n".join(f'"{line}"' for line in layers["layers"])
    (tmp_path / "pyproject.toml").write_text(
        '[tool.importlinter]\nroot_package = "wrong_house"\n'
        '[[tool.importlinter.contracts]]\nname = "down"\ntype = "layers"\n'
        f'containers = ["wrong_house"]\nlayers = [\n{lines}\n]\n'
    )
    done = lint(tmp_path)
    assert done.returncode == 1
    assert "wrong_house.model is not allowed to import wrong_house.cli" in done.stdout


@functools.cache
def parse_modules() -> dict[Path, ast.Module]:
    """Every module of labctl, by its path below the package."""
    package = ROOT / "labctl"
    paths = sorted(package.rglob("*.py"))
    return {path.relative_to(package): ast.parse(path.read_text()) for path in paths}


def list_optional_protocols() -> set[str]:
    """What a provider may implement besides `Provider`: the protocols that isinstance can check."""
    return {
        name
        for name, value in vars(providers).items()
        if getattr(value, "_is_runtime_protocol", False)
    }


def list_names(tree: ast.AST) -> set[str]:
    """Every name that a module uses, imports or reaches as an attribute."""
    names = set[str]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("labctl.provider"):
            names.update(alias.name for alias in node.names)
    return names


def test_only_servers_know_what_providers_can_optionally_do() -> None:
    protocols = list_optional_protocols()
    assert {"Stoppable", "Keep", "Bake", "QuotaSource"} <= protocols
    wrong = {
        str(path): sorted(names)
        for path, tree in parse_modules().items()
        if path.parts[0] not in ("servers", "providers") and (names := protocols & list_names(tree))
    }
    assert not wrong


def list_name_branches(tree: ast.Module, names: set[str]) -> list[str]:
    """List the comparisons of a provider with its name, also with one in a constant above."""
    constants = {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
        and names & {inner.value for inner in ast.walk(node) if isinstance(inner, ast.Constant)}
    }
    constants |= {"DEFAULT_PROVIDER", "PROVIDER"}
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and "provider" in ast.unparse(node).lower()
        and any(
            (isinstance(inner, ast.Constant) and inner.value in names)
            or (isinstance(inner, ast.Name) and inner.id in constants)
            for inner in ast.walk(node)
        )
    ]


def test_only_providers_branch_on_a_providers_name() -> None:
    names = {*providers.BUILT_IN, "slurm"}
    for branch in (
        'if server.provider == "local": pass',
        'if provider in ("aws", "static"): pass',
        'OWN = ("local",)\nif config.server.provider not in OWN: pass',
        "if provider != DEFAULT_PROVIDER: pass",
    ):
        assert list_name_branches(ast.parse(branch), names), branch
    wrong = {
        str(path): branches
        for path, tree in parse_modules().items()
        if path.parts[0] not in ("providers", "rehearsal")
        and (branches := list_name_branches(tree, names))
    }
    assert not wrong


# Programs that run elsewhere, or in an environment that labctl made for them.
OWN_ENVIRONMENT = (
    "agent/",
    "services/model_server/",
    "insight/profiler/",
    "estimate/measure.py",
    "insight/bandwidth_program.py",
)
ENVIRONMENT_READERS = re.compile(
    r"os\.(environb?|getenv)|os\.path\.expandvars|getpass\.getuser|Path\.home|(?s:.*)\.expanduser"
)


def list_environment_reads(tree: ast.Module) -> list[str]:
    """List the names and calls with which a module reads the process's environment."""
    reads = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ENVIRONMENT_READERS.fullmatch(ast.unparse(node))
    ]
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return reads + [
        alias.name
        for node in imports
        for alias in node.names
        if ENVIRONMENT_READERS.fullmatch(f"{node.module}.{alias.name}")
    ]


def test_only_config_reads_the_environment() -> None:
    for read in (
        "os.environ['A']",
        "from os import environ",
        "Path('~').expanduser()",
        "Path.home()",
        "getpass.getuser()",
    ):
        assert list_environment_reads(ast.parse(read)), read
    wrong = {
        name: reads
        for path, tree in parse_modules().items()
        if not (name := str(path)).startswith("config/")
        and not name.startswith(OWN_ENVIRONMENT)
        and (reads := list_environment_reads(tree))
    }
    assert not wrong
