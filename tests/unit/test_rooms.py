"""scripts/check_rooms.py on a small package of its own: what it counts, and what it refuses."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CHECK = Path(__file__).parents[2] / "scripts" / "check_rooms.py"
RULES = """
limit = 0
public = "__init__"
layers = ["top", "left | right", "one : two"]
[apart]
agent = ["one"]
[rooms]
"labctl" = "__init__.py"
"labctl.*" = "left/"
"labctl.top" = "top.py"
"labctl.right" = "right/right.py"
"labctl.one" = "one.py"
"labctl.two" = "two.py"
"labctl.agent" = "agent/agent.py"
"""


@pytest.fixture
def house(tmp_path: Path) -> Path:
    for name in ("", "top", "left", "right", "one", "two", "agent"):
        write_module(tmp_path, name or "__init__", "")
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(CHECK, scripts)
    (scripts / "rooms.toml").write_text(RULES)
    return tmp_path


def write_module(house: Path, name: str, text: str) -> None:
    (house / "labctl").mkdir(exist_ok=True)
    (house / "labctl" / f"{name}.py").write_text(text)


def check(house: Path) -> subprocess.CompletedProcess[str]:
    script = house / "scripts" / "check_rooms.py"
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("left", "from labctl.top import x"),
        ("left", "from labctl import top"),
        ("left", "from . import top"),
        ("left", "import labctl.right"),
        ("left", "def load():\n    with x:\n        from labctl.right import y"),
        ("left", "try:\n    pass\nexcept OSError:\n    from labctl import right"),
        ("left", "if TYPE_CHECKING:\n    pass\nelse:\n    from labctl import top"),
        ("left", "from labctl.agent import x"),
        ("agent", "from labctl.two import x"),
    ],
)
def test_an_import_that_breaks_the_layers_is_counted(house: Path, importer: str, text: str) -> None:
    assert check(house).returncode == 0
    write_module(house, importer, text)
    done = check(house)
    assert done.returncode == 1
    assert done.stdout.startswith(f"labctl/{importer}.py:")
    assert "1 imports break the layers of the rooms, at most 0" in done.stdout


@pytest.mark.parametrize(
    ("importer", "text"),
    [
        ("top", "from labctl import left, one, right"),
        ("one", "from labctl import two"),
        ("two", "from labctl import one"),
        ("agent", "from labctl import one"),
        ("left", "from labctl import __version__"),
        ("left", "if TYPE_CHECKING:\n    from labctl import top"),
    ],
)
def test_an_import_that_keeps_the_layers_is_allowed(house: Path, importer: str, text: str) -> None:
    write_module(house, importer, text)
    assert check(house).returncode == 0


def test_the_limit_can_be_lowered_once_fewer_imports_break_the_layers(house: Path) -> None:
    rules = house / "scripts" / "rooms.toml"
    rules.write_text(RULES.replace("limit = 0", "limit = 2"))
    write_module(house, "left", "from labctl import top")
    done = check(house)
    assert done.returncode == 0
    assert "1 imports break the layers; lower the limit" in done.stdout


def test_every_module_has_a_room_and_a_file_of_its_own(house: Path) -> None:
    rules = house / "scripts" / "rooms.toml"
    rules.write_text(RULES.replace('"labctl.*" = "left/"', '"labctl.left" = "two.py"'))
    write_module(house, "new", "")
    done = check(house)
    assert done.returncode == 1
    assert "labctl.new: has no room" in done.stdout
    assert "two.py: planned for several modules" in done.stdout


def test_imports_of_labctl_break_the_layers_of_the_rooms_no_more_than_before() -> None:
    done = subprocess.run([sys.executable, str(CHECK)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
