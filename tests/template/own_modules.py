"""Modules of a template other than the sample project, which has modules of the same names."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from assembled import assemble_once


def load_modules(template: str, *names: str) -> list[ModuleType]:
    """Import modules of a template, which find each other, and forget their names again."""
    directory = assemble_once(template)
    own = {path.stem for path in directory.glob("*.py")}
    before = {name: sys.modules.pop(name) for name in own if name in sys.modules}
    sys.path.insert(0, str(directory))
    try:
        return [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(directory))
        for name in own:
            sys.modules.pop(name, None)
        sys.modules.update(before)
