"""Google's SDK, and only the parts of it that labctl calls.

`google.cloud.compute_v1` imports the clients of all 100 services of Compute Engine when it is
imported, which takes 4 s of CPU time and 150 MB (Python 3.15 imports each when it is used). labctl
puts an empty module in place of that package and imports two clients alone, in 1.5 s. The empty
module loads the complete package when anything else in the process uses a name of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from labctl.config.installation import install_command
from labctl.errors import ProviderError
from labctl.lazy import hold_imports

PACKAGE = "google.cloud.compute_v1"
# Parts of the package that are modules of their own.
PARTS = frozenset({"gapic_version", "services", "types"})


def load_types() -> Any:
    """Return the module of all message types."""
    return _load("types.compute")


def load_client(service: str, name: str) -> Any:
    """Return the class of a service's client, such as InstancesClient of `instances`."""
    return getattr(_load(f"services.{service}"), name)


def _load(part: str) -> Any:
    with hold_imports():
        try:
            _prepare_package()
            return import_module(f"{PACKAGE}.{part}")
        except ModuleNotFoundError as error:
            raise ProviderError(
                "the gcp extra is not installed",
                why=f"the module {error.name} is missing",
                hint=install_command("gcp"),
            ) from error


def _prepare_package() -> None:
    if PACKAGE in sys.modules:
        return
    parent = import_module("google.cloud")
    spec = PathFinder.find_spec(PACKAGE, parent.__path__)
    if spec is None or spec.loader is None:
        raise ModuleNotFoundError(name=PACKAGE)
    sys.modules[PACKAGE] = _make_deferred(spec)


def _make_deferred(spec: ModuleSpec) -> ModuleType:
    """Return a module that runs the package's own code at the first use of a name of it."""
    module = ModuleType(PACKAGE)
    module.__spec__ = spec
    module.__loader__ = spec.loader
    module.__file__ = spec.origin
    module.__path__ = list(spec.submodule_search_locations or ())

    def load_whole(name: str) -> Any:
        if name.startswith("__") or name in PARTS:
            raise AttributeError(name)
        with hold_imports():
            if vars(module).pop("__getattr__", None) is not None and spec.loader is not None:
                spec.loader.exec_module(module)
        return getattr(module, name)

    vars(module)["__getattr__"] = load_whole
    return module
