"""What a profile of a few steps says: its figures as values, and rules over them.

Thresholds are rules of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from labctl.errors import LabError, NotFoundError
from labctl.insight.explain.evidence import Evidence, Finding
from labctl.insight.explain.sources import CUDA_NOTES, GPU_BACKGROUND, NVML_USE, TUNING
from labctl.insight.explain.wording import percent
from labctl.model import Value

FILE = "profile.json"
NOTE = "note.json"
LARGEST_BYTES = 4 * 1024**2
MUCH_WAITING, HALF = 0.2, 0.5
MUCH_PYTHON = 0.3
MUCH_OPTIMIZER = 0.2
MUCH_COPYING = 0.1
BUSY = 0.8
SMALL_KERNEL_US = 10.0
MANY_KERNELS = 100
FP32_PRODUCTS = ("sgemm", "gemm_fp32", "_fp32_")


class Row(Value, frozen=True):
    """An operation or a kernel: microseconds and calls per step, its share of all of its kind."""

    name: str
    us: float
    count: float
    share: float


class Profile(Value, frozen=True):
    """Figures of a few steps, from profiler/trace.py. `phases` are shares of a step."""

    steps: int
    step_us: float
    phases: dict[str, float]
    operations: tuple[Row, ...]
    kernels: tuple[Row, ...]
    kernel_count: float
    kernel_us: float
    gpu_busy: float | None
    copies_us: float
    syncs: float
    peak_bytes: int = 0
    run: str = ""
    command: tuple[str, ...] = ()
    torch: str = ""
    device: str = ""
    threads: int = 0
    cores: int | None = None
    warmup: int = 0
    version: int = 1
    steps_us: tuple[float, ...] = ()


class _Note(Value, frozen=True):
    why: str


def read_profile(directory: Path) -> Profile:
    """The profile in a run's logs/profile.

    NotFoundError says why there is none, LabError that what is there is no profile.
    """
    try:
        with (directory / FILE).open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        raise NotFoundError(
            "nothing was profiled", why=_why(directory), hint="labctl profile"
        ) from None
    try:
        if len(text) > LARGEST_BYTES:
            raise ValueError(f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
        return msgspec.json.decode(text, type=Profile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LabError(
            f"{directory / FILE} is no profile", why=str(error), hint="labctl profile"
        ) from None


def _why(directory: Path) -> str:
    try:
        with (directory / NOTE).open("rb") as file:
            return msgspec.json.decode(file.read(LARGEST_BYTES), type=_Note).why
    except (FileNotFoundError, msgspec.MsgspecError):
        return (
            "the command never imported PyTorch's optimizers in a Python that reads "
            "PYTHONPATH (python -I and -E do not)"
        )


def advise(found: Profile) -> tuple[Finding, ...]:
    """What holds a step up, the worst first."""
    every = [*_host(found), *_gpu(found)]
    return tuple(sorted(every, key=lambda one: ("problem", "advice", "good").index(one.level)))


def _seen(said: str) -> Evidence:
    return Evidence(said=said, of="profile.json")


def _host(found: Profile) -> Iterator[Finding]:
    """What the training's own thread does."""
    data = found.phases.get("data", 0.0)
    # Without a GPU the same cores prepare data and compute.
    if data >= (HALF if found.gpu_busy is None else MUCH_WAITING):
        yield Finding(
            rule="step-waits-for-data",
            level="problem" if data >= HALF else "advice",
            what=f"{percent(data)} of a step goes into getting the next batch",
            why="the DataLoader is not done when the step is: too few workers, slow files, or "
            "costly preparation",
            evidence=(_seen(f"enumerate(DataLoader): {percent(data)} of {_ms(found.step_us)}"),),
            next="more DataLoader workers with pin_memory and persistent_workers; or prepare once",
            source=TUNING,
        )
    optimizer = found.phases.get("optimizer", 0.0)
    if optimizer >= MUCH_OPTIMIZER:
        yield Finding(
            rule="step-optimizer",
            level="advice",
            what=f"{percent(optimizer)} of a step goes into the optimizer",
            why="it updates tensor by tensor, which costs a launch each",
            evidence=(_seen(f"Optimizer.step and zero_grad: {percent(optimizer)}"),),
            next="optimizer(..., fused=True) on a GPU, foreach=True else; a larger batch needs "
            "fewer steps",
            source=TUNING,
        )
    other = found.phases.get("other", 0.0)
    if other >= MUCH_PYTHON and (found.gpu_busy is None or found.gpu_busy < BUSY):
        yield Finding(
            rule="step-python",
            level="advice",
            what=f"{percent(other)} of a step is Python between operations",
            why="loops, logging, conversions: nothing that a tensor operation does",
            evidence=(_seen(f"no operation runs for {percent(other)} of {_ms(found.step_us)}"),),
            next="torch.compile(model); log every 100 steps; take loops over tensors out",
            source=TUNING,
        )


def _gpu(found: Profile) -> Iterator[Finding]:
    if found.gpu_busy is None:
        if found.operations:
            yield _processor(found)
        return
    waiting = found.phases.get("waiting", 0.0)
    if found.syncs >= 1 and found.gpu_busy < BUSY:
        yield Finding(
            rule="step-syncs",
            level="advice",
            what=f"each step asks the GPU for a value {found.syncs:.0f} times, and waits",
            why=".item(), float(loss), print(tensor) and `if tensor` stop the program until the "
            "GPU is done, so that nothing is queued meanwhile",
            evidence=(
                _seen(f"{found.syncs:.1f} a step; {percent(waiting)} of it in synchronisation"),
            ),
            next="keep tensors (loss.detach()) and read them every 100 steps",
            source=CUDA_NOTES,
        )
    if found.kernel_us < SMALL_KERNEL_US and found.kernel_count > MANY_KERNELS:
        yield Finding(
            rule="step-small-kernels",
            level="advice",
            what=f"{found.kernel_count:.0f} small kernels a step",
            why="to launch one takes some 5 microseconds, as long as such a kernel runs",
            evidence=(_seen(f"half of the kernels take less than {found.kernel_us:.1f} us"),),
            next="a larger batch, torch.compile (which joins kernels), or CUDA graphs",
            source=GPU_BACKGROUND,
        )
    copying = found.copies_us / found.step_us if found.step_us else 0.0
    if copying >= MUCH_COPYING:
        yield Finding(
            rule="step-copies",
            level="advice",
            what=f"{percent(copying)} of a step is copying to or from the GPU",
            why="from ordinary memory a copy cannot run beside the computation",
            evidence=(_seen(f"memory copies: {_ms(found.copies_us)} of {_ms(found.step_us)}"),),
            next="DataLoader(pin_memory=True) and .to(device, non_blocking=True); bytes in "
            "place of floats",
            source=TUNING,
        )
    yield from _kernels(found)


def _kernels(found: Profile) -> Iterator[Finding]:
    assert found.gpu_busy is not None
    busy = percent(found.gpu_busy)
    plain = sum(r.share for r in found.kernels if any(w in r.name for w in FP32_PRODUCTS))
    if plain >= 0.2:
        yield Finding(
            rule="step-fp32-products",
            level="advice",
            what=f"{percent(plain)} of the GPU's time goes into fp32 matrix products",
            why="tensor cores do them many times as fast in bf16, fp16 or TF32",
            evidence=tuple(_seen(f"{row.name}: {percent(row.share)}") for row in found.kernels[:2]),
            next="torch.autocast('cuda', torch.bfloat16), or "
            "torch.set_float32_matmul_precision('high')",
            source=TUNING,
        )
    top = found.kernels[0] if found.kernels else None
    evidence = (_seen(f"{top.name}: {percent(top.share)} of it"),) if top else ()
    if found.gpu_busy >= BUSY:
        yield Finding(
            rule="step-gpu-busy",
            level="good",
            what=f"the GPU works {busy} of a step",
            why="only other or fewer kernels make it faster",
            evidence=evidence or (_seen(f"{busy} busy"),),
            next="mixed precision, torch.compile, channels_last",
            source=NVML_USE,
        )


def _processor(found: Profile) -> Finding:
    top = found.operations[:3]
    return Finding(
        rule="step-on-processor",
        level="good",
        what="the step was computed on the processor"
        + (f", on {found.threads} threads" if found.threads else ""),
        why="no GPU was traced",
        evidence=tuple(
            _seen(f"{row.name}: {percent(row.share)} of all operations, {row.count:.0f} a step")
            for row in top
        ),
        next="whether a GPU would pay: labctl estimate train.py:build_model --batch 64",
        source=TUNING,
    )


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3g} ms"
