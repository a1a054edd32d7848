"""Lazy imports: loaded at the first use, seen by tools as ordinary imports, modules only."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from labctl.lazy import lazy_imports

ROOT = Path(__file__).parents[2]

with lazy_imports(__name__):
    import wave
    from xml.dom import minidom, pulldom


def test_a_module_is_loaded_at_its_first_use() -> None:
    script = """
    import sys
    from labctl.lazy import lazy_imports
    with lazy_imports(__name__):
        import wave
        from xml.dom import minidom, pulldom as events
    assert not {"wave", "xml", "xml.dom", "xml.dom.minidom"} & set(sys.modules)
    assert events.START_ELEMENT == "START_ELEMENT"
    assert "xml.dom.pulldom" in sys.modules and "xml.dom.minidom" not in sys.modules
    import wave as loaded
    assert wave.open is loaded.open
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    assert subprocess.run(command, cwd=ROOT).returncode == 0


def test_a_replaced_attribute_is_the_modules_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wave, "WAVE_FORMAT_PCM", 7)
    assert sys.modules["wave"].WAVE_FORMAT_PCM == 7  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert sys.modules["wave"].WAVE_FORMAT_PCM == wave.WAVE_FORMAT_PCM == 1  # type: ignore[attr-defined]


def test_threads_that_first_use_a_package_and_its_module_get_both_complete(
    tmp_path: Path,
) -> None:
    package = tmp_path / "slowly"
    package.mkdir()
    (package / "__init__.py").write_text(
        "import time\ntime.sleep(0.2)\nfrom slowly import part\nDONE = part.DONE\n"
    )
    (package / "part.py").write_text(
        "import time\ntime.sleep(0.2)\nimport slowly\ntime.sleep(0.2)\nDONE = 1\n"
    )
    (package / "other.py").write_text("from slowly.part import DONE\n")
    script = """
    import sys, threading
    from labctl.lazy import lazy_imports
    with lazy_imports(__name__):
        import slowly
        from slowly import other, part
    seen, start = [], threading.Barrier(3)
    def use(module):
        start.wait()
        seen.append(module.DONE)
    threads = [threading.Thread(target=use, args=(one,)) for one in (part, slowly, other)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert seen == [1, 1, 1], seen
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    environ = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "PATH": "/usr/bin:/bin"}
    for _ in range(3):
        assert subprocess.run(command, cwd=ROOT, env=environ).returncode == 0


def test_it_is_a_module_for_whoever_asks() -> None:
    assert isinstance(minidom, ModuleType)
    assert pulldom.__name__ == "xml.dom.pulldom"
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        _ = minidom.nothing_of_this_name  # type: ignore[attr-defined]


def test_imports_of_other_modules_are_not_lazy() -> None:
    with lazy_imports("labctl.of_another_name"):
        from string import ascii_letters
    assert ascii_letters.startswith("abc")


def test_a_dotted_import_is_refused() -> None:
    with pytest.raises(ImportError, match="from package import module"), lazy_imports(__name__):
        import xml.dom
    import xml.sax  # the next import is as ever

    assert xml.sax.handler


def list_lazy_names() -> Iterator[tuple[str, str]]:
    """Yield (file, module) of each import in a lazy block of labctl."""
    for path in sorted((ROOT / "labctl").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.With) and "lazy_imports" in ast.unparse(node.items[0]):
                assert ast.unparse(node.items[0]) == "lazy_imports(__name__)", path
                for line in node.body:
                    assert isinstance(line, ast.Import | ast.ImportFrom), path
                    base = f"{line.module}." if isinstance(line, ast.ImportFrom) else ""
                    for alias in line.names:
                        yield str(path.relative_to(ROOT)), base + alias.name


def test_every_lazy_import_names_a_module() -> None:
    """A wrong name would fail only when a user calls the command that needs it."""
    names = list(list_lazy_names())
    assert names
    for path, name in names:
        assert isinstance(import_module(name), ModuleType), path
