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
# Until Python 3.15, two threads that import a package and one of its modules at the same time may
# each get it half-initialized (CPython issue 83065): the import system breaks the deadlock so.
_import_lock = threading.RLock()
# Longer than any import. A thread that waited so long imports without the lock.
_LONGEST_IMPORT_S = 60.0


class LazyModule(ModuleType):
    """Stands for the module of this name, and imports it when an attribute is needed.

    It is not in sys.modules: other importers get the module itself.
    """

    def __getattribute__(self, name: str) -> object:
        return getattr(_load(self), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(_load(self), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(_load(self), name)


def _load(module: LazyModule) -> ModuleType:
    return import_alone(ModuleType.__getattribute__(module, "__name__"))


def import_alone(name: str) -> ModuleType:
    """Import a module while no other thread imports lazily."""
    loaded = sys.modules.get(name)
    is_initializing = getattr(getattr(loaded, "__spec__", None), "_initializing", False)
    if loaded is not None and not is_initializing:
        return loaded
    with hold_imports():
        return import_module(name)


@contextmanager
def hold_imports() -> Iterator[None]:
    """Keep other threads from importing lazily inside the block."""
    is_held = _import_lock.acquire(timeout=_LONGEST_IMPORT_S)
    try:
        yield
    finally:
        if is_held:
            _import_lock.release()


def offer_names(package: str, modules: Mapping[str, str]) -> Callable[[str], object]:
    """Return the `__getattr__` of a package: it takes each name from its module at the first use.

    `modules` has the module, inside the package, of each name.
    """

    def load_name(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value: object = getattr(import_alone(f"{package}.{modules[name]}"), name)
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
