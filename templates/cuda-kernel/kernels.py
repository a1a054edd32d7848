"""The ways to add two matrices, and why one cannot run on this machine."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("add.cu")
NO_GPU = "there is no GPU here"
# Attributes of a device in CUDA's driver interface.
MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 36, 37


@dataclass(frozen=True)
class Way:
    """One way to add. `add(a, b, total)` writes a + b to `total`; None if it cannot run here."""

    name: str
    add: Callable[[Tensor, Tensor, Tensor], object] | None
    why_not: str = ""
    # Of elements that it reads and writes, for each element of the result.
    accesses: int = 3


def list_ways() -> list[Way]:
    """List all ways. The first is a copy, which no addition can outrun."""
    return [
        Way("copy", lambda a, _, total: total.copy_(a), accesses=2),
        Way("torch", lambda a, b, total: torch.add(a, b, out=total)),
        make_cuda_way("cuda", by_columns=False),
        make_cuda_way("cuda-columns", by_columns=True),
        make_triton_way(),
    ]


def make_cuda_way(name: str, *, by_columns: bool) -> Way:
    """Compile add.cu, also without a GPU, which only cannot run it."""
    if shutil.which("nvcc") is None:
        return Way(name, None, "this image has no nvcc, the compiler of CUDA C")
    launch = compile_cuda()
    if launch is None:
        return Way(name, None, f"compiled by nvcc, but {NO_GPU}")

    def add(a: Tensor, b: Tensor, total: Tensor) -> None:
        rows, columns = total.shape
        stream = torch.cuda.current_stream().cuda_stream
        pointers = (a.data_ptr(), b.data_ptr(), total.data_ptr())
        if error := launch(*pointers, rows, columns, by_columns, stream):
            raise RuntimeError(f"the kernel did not start: CUDA error {error}")

    return Way(name, add)


@functools.cache
def compile_cuda() -> Callable[..., int] | None:
    """Compile add.cu and load its function; None without a GPU, which could not run it."""
    command = ["nvcc", "-O3", "-shared", "-Xcompiler", "-fPIC", str(SOURCE)]
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        command.append(f"-arch=sm_{major}{minor}")
    # A library that is loaded needs its file no longer.
    with tempfile.TemporaryDirectory() as directory:
        library = Path(directory) / "add.so"
        done = subprocess.run(
            [*command, "-o", str(library)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"add.cu does not compile:\n{done.stdout}{done.stderr}")
        if not torch.cuda.is_available():
            return None
        launch = ctypes.CDLL(str(library)).add
    launch.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_int] * 3 + [ctypes.c_void_p]
    return launch


def make_triton_way() -> Way:
    if importlib.util.find_spec("triton") is None:
        return Way("triton", None, "Triton is not installed: pip install triton")
    # Triton's interpreter runs a kernel on the CPU, slowly.
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not torch.cuda.is_available() and not is_interpreted:
        return Way("triton", None, f"{NO_GPU}; TRITON_INTERPRET=1 checks it on the CPU")
    import add_triton

    return Way("triton", add_triton.add)


def read_card_bandwidth() -> float | None:
    """Return the bytes per second of the GPU's memory; None without a GPU or its figures.

    Clock x width of the bus x 2, since memory moves data twice in each clock cycle.
    """
    if not torch.cuda.is_available():
        return None
    driver = ctypes.CDLL("libcuda.so.1")
    clock_khz, bus_bits = ctypes.c_int(), ctypes.c_int()
    device = torch.cuda.current_device()
    failed = driver.cuDeviceGetAttribute(ctypes.byref(clock_khz), MEMORY_CLOCK_KHZ, device)
    failed |= driver.cuDeviceGetAttribute(ctypes.byref(bus_bits), MEMORY_BUS_BITS, device)
    bandwidth = 2 * clock_khz.value * 1e3 * bus_bits.value / 8
    return None if failed else bandwidth or None
