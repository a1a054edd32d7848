"""Profile a few optimizer steps of the PyTorch program of this process, and then end it.

Python imports `sitecustomize` at its start, before the program. This one waits until PyTorch is
imported, follows the first optimizer's steps, traces some of them with PyTorch's own profiler, and
ends a program that makes no step in time. It writes to LABCTL_LOG_DIR/profile: trace.json.gz,
profile.json (labctl_trace's summary), index.html, or note.json if it failed. Standard library and
Python 3.8 only.
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
import threading
from pathlib import Path
from typing import Any, NamedTuple, Sequence

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH120, PTH100 (may be inside a zip)
PAGE_MARK = "PROFILE_AS_JSON"
LARGEST_TRACE_BYTES = 512 * 1024**2
# The file that says that a process of the run has made a step.
STEPPED = ".stepped"


def read_sibling(name: str) -> str:
    """Read a file of the same directory or zip as this one."""
    import pkgutil

    content = pkgutil.get_data("sitecustomize", name)
    return (content or b"").decode()


class ProfiledProgram(NamedTuple):
    """The program and its environment, as profile.json has them beside the trace's figures."""

    run: str
    command: Sequence[str]
    torch: str
    device: str
    threads: int
    cores: int | None
    warmup: int


class Profiling:
    """Follows and profiles the optimizer steps of one program."""

    def __init__(self, logs: str, warmup: int, steps: int) -> None:
        self.directory = Path(logs) / "profile"
        self.warmup, self.steps = warmup, steps
        self.seen = 0
        self.process = os.getpid()
        self.optimizer: Any = None
        self.profile: Any = None
        self.memory: Any = None
        # Nsight Systems records the program; only the steps are counted here.
        self.is_nsight = bool(os.environ.get("LABCTL_PROFILE_NSIGHT"))
        self.done = False

    def attach(self, optimizers: Any) -> None:
        """Register the hooks; called with the module torch.optim.optimizer after its import."""
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is None:
            self.write_note(
                "profiling needs PyTorch 2.0 or newer, which has a hook for optimizer steps"
            )
            return
        register(self.on_step)
        atexit.register(self.on_exit)

    def limit_wait(self, seconds: float) -> None:
        """End this process after this long, unless a process of the run has made a step by then."""
        timer = threading.Timer(seconds, self.end_without_step, (seconds,))
        timer.daemon = True
        timer.start()

    def end_without_step(self, seconds: float) -> None:
        if not self.done and not (self.directory / STEPPED).exists():
            self.write_note(f"the command made no optimizer step within {seconds / 60:.3g} min")
            os._exit(0)

    def on_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Count a step. Called for every optimizer, but only the first one's steps count."""
        if os.getpid() != self.process:
            return
        self.optimizer = self.optimizer or optimizer
        if optimizer is not self.optimizer:
            return
        self.seen += 1
        if self.seen == 1:
            self.write(STEPPED, "")
        if os.environ.get("RANK", "0") != "0":
            # Other ranks end together with the recorded one, so that none waits for it forever.
            self.done = self.seen >= self.warmup + self.steps
        else:
            # labctl on the user's machine reads the line from the log.
            sys.stderr.write(f"labctl profile: step {self.seen} of {self.warmup + self.steps}\n")
            sys.stderr.flush()
            self.record(optimizer)
            self.done = self.done or (self.is_nsight and self.seen >= self.warmup + self.steps)
        if self.done:
            raise SystemExit(0)

    def record(self, optimizer: Any) -> None:
        """Start the profiler after the first step; tell it of each later one."""
        if self.is_nsight:
            self.mark_step(sys.modules["torch"])
            return
        if self.profile is None:
            if os.environ.get("LABCTL_PROFILE_MEMORY"):
                self.memory = importlib.import_module("labctl_memory").MemoryRecorder()
                self.memory.start(sys.modules["torch"])
            self.profile = self.start_profiler()
            return
        if self.memory is not None:
            self.memory.note(optimizer)
        self.profile.step()

    def mark_step(self, torch: Any) -> None:
        """Begin the next step's range in the report of Nsight Systems."""
        if torch.cuda.is_available():
            if self.seen > 1:
                torch.cuda.nvtx.range_pop()
            torch.cuda.nvtx.range_push(f"step {self.seen + 1}")

    def start_profiler(self) -> Any:
        """Start a profiler that waits, warms up (its own first step is slow), and then records."""
        import torch
        from torch import profiler

        activities = [profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(profiler.ProfilerActivity.CUDA)
        waits = max(0, self.warmup - 3)
        profile = profiler.profile(
            activities=activities,
            schedule=profiler.schedule(wait=waits, warmup=2, active=self.steps, repeat=1),
            on_trace_ready=self.write_trace,
            record_shapes=False,
            profile_memory=True,
        )
        profile.start()
        return profile

    def write_trace(self, profile: Any) -> None:
        """Write the trace and its summary. An error is written as a note; both end the program."""
        self.done = True
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / "trace.json.gz"
        partial = self.directory / "trace.partial.json"
        profile.export_chrome_trace(str(partial))
        size = partial.stat().st_size
        if size > LARGEST_TRACE_BYTES:
            partial.unlink()
            self.write_note(
                f"the trace is too large ({size // 1024**2} MiB); trace fewer steps (--steps 1)"
            )
            return
        text = partial.read_bytes()
        with gzip.open(str(path), "wb", compresslevel=5) as file:
            file.write(text)
        partial.unlink()
        self.write_summary(profile, json.loads(text).get("traceEvents", ()))

    def write_summary(self, profile: Any, entries: Sequence[Any]) -> None:
        summary = importlib.import_module("labctl_trace").summary
        try:
            figures = summary(entries)
            memory = self.summarize_memory(profile, entries)
        except ValueError as error:
            self.write_note(str(error))
            return
        text = json.dumps({**figures, **self.describe()._asdict(), "memory": memory})
        self.write("profile.json", text)
        page = read_sibling("page.html")
        # Inside a script element, `<` could end the element.
        self.write("index.html", page.replace(PAGE_MARK, text.replace("<", "\\u003c")))

    def summarize_memory(self, profile: Any, entries: Sequence[Any]) -> Any:
        """Write what PyTorch says about memory, and return the figures; None if not asked for."""
        if self.memory is None:
            return None
        torch = sys.modules["torch"]
        self.memory.write_files(torch, profile, self.directory)
        return self.memory.summarize(torch, entries)

    def describe(self) -> ProfiledProgram:
        import torch

        cuda = torch.cuda.is_available()
        return ProfiledProgram(
            run=os.environ.get("LABCTL_RUN_ID", ""),
            command=sys.argv,
            torch=torch.__version__,
            device=torch.cuda.get_device_name() if cuda else "cpu",
            threads=torch.get_num_threads(),
            cores=os.cpu_count(),
            warmup=self.warmup,
        )

    def on_exit(self) -> None:
        """Write a note at the program's end, unless all steps were profiled."""
        first = os.environ.get("RANK", "0") == "0"
        # A launcher that imports PyTorch for its children does not overwrite their results.
        silent = self.seen == 0 and self.directory.exists()
        if not self.done and first and os.getpid() == self.process and not silent:
            needed = self.warmup + self.steps
            self.write_note(f"the program made {self.seen} optimizer steps; {needed} are needed")

    def write_note(self, why: str) -> None:
        self.done = True
        self.write("note.json", json.dumps({"why": why, "steps": self.seen}))

    def write(self, name: str, text: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        partial = self.directory / ("." + name + ".partial")
        partial.write_text(text)
        partial.replace(self.directory / name)


class ImportHook(importlib.abc.MetaPathFinder):
    """Passes on the optimizers' module once it is imported. Costs other programs nothing."""

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


def run_own_sitecustomize() -> None:
    """Run the image's own sitecustomize, which this one hides."""
    others = [path for path in sys.path if os.path.abspath(path) != HERE]  # noqa: PTH100
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def main() -> None:
    logs = os.environ.get("LABCTL_LOG_DIR")
    if logs:
        warmup = int(os.environ.get("LABCTL_PROFILE_WARMUP", "10"))
        steps = int(os.environ.get("LABCTL_PROFILE_STEPS", "5"))
        profiling = Profiling(logs, warmup, steps)
        sys.meta_path.insert(0, ImportHook(profiling))
        if wait_s := os.environ.get("LABCTL_PROFILE_WAIT_S"):
            profiling.limit_wait(float(wait_s))
    run_own_sitecustomize()


if __name__ == "sitecustomize":
    main()
