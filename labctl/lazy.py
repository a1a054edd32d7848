"""Modules that are loaded at their first use, so that a command loads only what it runs.

    with lazy_imports(__name__):
        from labctl.lifecycle import down, up

binds `down` and `up`, but loads neither: `down.down(...)` does. Linters and type checkers read the
block as ordinary imports. It imports modules only: a function or a class cannot wait for its use.

Python 3.15 has this as `lazy from labctl.lifecycle import down, up`.
"""

from __future__ import annotations

import builtins
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

_lock = threading.RLock()


class LazyModule(ModuleType):
    """Stands for the module of this name, and imports it when an attribute is needed.

    It is not in sys.modules: the import system's locks are the only ones, and other importers get
    the module itself.
    """

    def __getattribute__(self, name: str) -> object:
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_load(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_load(self), name)


def _load(module: LazyModule) -> ModuleType:
    return import_module(ModuleType.__getattribute__(module, "__name__"))


def offer_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: it takes each name from its module at the first use.

    `modules` has the module, inside the package, of each name.
    """

    def load_name(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_module(f"{package}.{modules[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load_name


@contextmanager
def lazy_imports(importer: str) -> Iterator[None]:
    """Make the imports in the block lazy, if the module `importer` contains them."""

    def import_lazily(
        name: str,
        globals: Mapping[str, object] | None = None,
        locals: Mapping[str, object] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        if globals is None or globals.get("__name__") != importer:
            return import_now(name, globals, locals, fromlist or (), level)
        if level or ("." in name and not fromlist):
            raise ImportError(f"write `from package import module` instead of {name}", name=name)
        if not fromlist:
            return LazyModule(name)
        package = ModuleType(name)
        vars(package).update({item: LazyModule(f"{name}.{item}") for item in fromlist})
        return package

    with _lock:
        import_now = builtins.__import__
        try:
            builtins.__import__ = import_lazily
            yield
        finally:
            builtins.__import__ = import_now
