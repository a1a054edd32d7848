"""Profiles a few optimizer steps of whatever PyTorch program starts here, and then ends it.

Python imports `sitecustomize` at its start, before the program; this one waits until PyTorch is
imported, follows the first optimizer's steps, lets PyTorch's own profiler trace some of them, and
writes to LABCTL_LOG_DIR/profile: trace.json.gz, profile.json (labctl_trace's summary), index.html,
or note.json where it came to nothing. Standard library and Python 3.8 only.
"""

from __future__ import annotations

import atexit
import gzip
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH120, PTH100 (may lie within a zip)
PAGE_MARK = "PROFILE_AS_JSON"
LARGEST_TRACE_BYTES = 512 * 1024**2


def beside(name: str) -> str:
    """A file that travelled with this one, in the same directory or zip."""
    import pkgutil

    content = pkgutil.get_data("sitecustomize", name)
    return (content or b"").decode()


class Profiling:
    """One program's steps. `note` is what came of it."""

    def __init__(self, logs: str, warmup: int, steps: int) -> None:
        self.directory = Path(logs) / "profile"
        self.warmup, self.steps = warmup, steps
        self.seen = 0
        self.process = os.getpid()
        self.optimizer: Any = None
        self.profile: Any = None
        self.done = False

    def attach(self, optimizers: Any) -> None:
        """PyTorch has been imported: `optimizers` is its module torch.optim.optimizer."""
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is None:
            self.tell(
                "this PyTorch has no hook for every optimizer's steps: 2.0 or newer is needed"
            )
            return
        register(self.stepped)
        atexit.register(self.ended)

    def stepped(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """After a step of any optimizer. Of several, the first one's steps are counted."""
        if os.getpid() != self.process:
            return
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        self.seen += 1
        if os.environ.get("RANK", "0") != "0":
            # The others end with the one that is recorded: none waits for it in vain.
            self.done = self.seen >= self.warmup + self.steps
        elif self.profile is None:
            self.profile = self.begun()
        else:
            self.profile.step()
        if self.done:
            raise SystemExit(0)

    def begun(self) -> Any:
        """A profiler that waits, warms up (its own first step is slow), and then records."""
        import torch
        from torch import profiler

        wanted = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            wanted.append(profiler.ProfilerActivity.CUDA)
        waits = max(0, self.warmup - 3)
        made = profiler.profile(
            activities=wanted,
            schedule=profiler.schedule(wait=waits, warmup=2, active=self.steps, repeat=1),
            on_trace_ready=self.ready,
            record_shapes=False,
            profile_memory=True,
        )
        made.start()
        return made

    def ready(self, made: Any) -> None:
        """Write all of it. Whatever goes wrong is told, and ends the program too."""
        self.done = True
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "trace.json.gz"
        partial = self.directory / "trace.partial.json"
        made.export_chrome_trace(str(partial))
        size = partial.stat().st_size
        if size > LARGEST_TRACE_BYTES:
            partial.unlink()
            self.tell(f"the trace has {size // 1024**2} MiB: fewer steps (--steps 1) are needed")
            return
        text = partial.read_bytes()
        with gzip.open(str(path), "wb", compresslevel=5) as file:
            file.write(text)
        partial.unlink()
        self.summed_up(json.loads(text))

    def summed_up(self, trace: dict[str, Any]) -> None:
        summary = importlib.import_module("labctl_trace").summary
        try:
            found = summary(trace)
        except ValueError as error:
            self.tell(str(error))
            return
        found.update(self.about())
        text = json.dumps(found)
        self.write("profile.json", text)
        page = beside("page.html")
        # Within a script element, `<` could end it.
        self.write("index.html", page.replace(PAGE_MARK, text.replace("<", "\\u003c")))

    def about(self) -> dict[str, Any]:
        import torch

        cuda = torch.cuda.is_available()
        return {
            "run": os.environ.get("LABCTL_RUN_ID", ""),
            "command": sys.argv,
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if cuda else "cpu",
            "threads": torch.get_num_threads(),
            "cores": os.cpu_count(),
            "warmup": self.warmup,
        }

    def ended(self) -> None:
        """At the program's end: nothing was written unless all steps were seen."""
        first = os.environ.get("RANK", "0") == "0"
        # A launcher that imports PyTorch for its children has nothing to add to what they say.
        silent = self.seen == 0 and self.directory.exists()
        if not self.done and first and os.getpid() == self.process and not silent:
            needed = self.warmup + self.steps
            self.tell(f"it made {self.seen} optimizer steps; {needed} are needed")

    def tell(self, why: str) -> None:
        self.done = True
        self.write("note.json", json.dumps({"why": why, "steps": self.seen}))

    def write(self, name: str, text: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / ("." + name + ".partial")
        partial.write_text(text)
        partial.replace(self.directory / name)


class Watch(importlib.abc.MetaPathFinder):
    """Hands the optimizers' module on once it is imported; costs other programs nothing."""

    NAME = "torch.optim.optimizer"

    def __init__(self, profiling: Profiling) -> None:
        self.profiling = profiling

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self.NAME:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def loaded(module: Any) -> None:
            load(module)
            self.profiling.attach(module)

        spec.loader.exec_module = loaded  # type: ignore[method-assign]
        return spec


def own_sitecustomize() -> None:
    """The image's own, which this one stands before."""
    others = [path for path in sys.path if os.path.abspath(path) != HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    logs = os.environ.get("LABCTL_LOG_DIR")
    if logs:
        warmup = int(os.environ.get("LABCTL_PROFILE_WARMUP", "10"))
        steps = int(os.environ.get("LABCTL_PROFILE_STEPS", "5"))
        sys.meta_path.insert(0, Watch(Profiling(logs, warmup, steps)))
    own_sitecustomize()


if __name__ == "sitecustomize":
    main()
