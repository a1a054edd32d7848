"""The profile of a few steps: its figures, and rules that find a step's bottlenecks.

Thresholds are rules of thumb.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError
from labctl.insight.explain.evidence import Evidence, Finding
from labctl.insight.explain.memory_profile import MemoryProfile, advise_on_memory
from labctl.insight.explain.sources import CUDA_NOTES, GPU_BACKGROUND, NVML_USE, TUNING
from labctl.insight.explain.wording import percent
from labctl.model import Value
from labctl.text import count_text, timing_text

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


class ProfileRow(Value, frozen=True):
    """An operation or a kernel: microseconds and calls per step, and its share of its kind."""

    name: str
    us: float
    count: float
    share: float


class Profile(Value, frozen=True):
    """Figures of a few steps, from profiler/trace.py. `phases` are shares of a step."""

    steps: int
    step_us: float
    phases: dict[str, float]
    operations: tuple[ProfileRow, ...]
    kernels: tuple[ProfileRow, ...]
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
    memory: MemoryProfile | None = None


NO_OPTIMIZER = (
    "a profile follows PyTorch's optimizers, and the command did not import them, or its Python "
    "ignored PYTHONPATH (as `python -I` and `python -E` do)"
)
MORE_STEPS = "labctl profile --warmup 3 --steps 2   # or a command with more steps"


class _MissingProfileNote(Value, frozen=True):
    why: str = ""
    steps: int = 0


def read_profile(directory: Path) -> Profile:
    """Read the profile in a run's logs/profile.

    NotFoundError, with the reason, if none exists; LabError if it is invalid.
    """
    try:
        with (directory / FILE).open("rb") as file:
            text = file.read(LARGEST_BYTES + 1)
    except FileNotFoundError:
        note = _read_note(directory)
        raise NotFoundError(
            "nothing was profiled",
            why=note.why or NO_OPTIMIZER,
            hint=MORE_STEPS
            if note.steps
            else "labctl explain   # what the server measured in a run",
        ) from None
    try:
        if len(text) > LARGEST_BYTES:
            raise ValueError(f"it is larger than {LARGEST_BYTES // 1024**2} MiB")
        return decode_json(text, Profile)
    except (msgspec.MsgspecError, ValueError) as error:
        raise LabError(
            f"{directory / FILE} is not a valid profile", why=str(error), hint="labctl profile"
        ) from None


def _read_note(directory: Path) -> _MissingProfileNote:
    """Return why the profiler has recorded nothing, an empty note if it never started."""
    try:
        with (directory / NOTE).open("rb") as file:
            return decode_json(file.read(LARGEST_BYTES), _MissingProfileNote)
    except (FileNotFoundError, msgspec.MsgspecError):
        return _MissingProfileNote()


def advise(profile: Profile) -> tuple[Finding, ...]:
    """Find the bottlenecks of a step, the worst first."""
    memory = advise_on_memory(profile.memory) if profile.memory else ()
    findings = [*memory, *_check_host(profile), *_check_gpu(profile)]
    levels = ("problem", "advice", "good")
    return tuple(sorted(findings, key=lambda finding: levels.index(finding.level)))


def _from_profile(text: str) -> Evidence:
    return Evidence(text=text, source="profile.json")


def _check_host(profile: Profile) -> Iterator[Finding]:
    """Check what the training's own thread does."""
    data = profile.phases.get("data", 0.0)
    # Without a GPU the same cores prepare data and compute.
    if data >= (HALF if profile.gpu_busy is None else MUCH_WAITING):
        yield Finding(
            rule="step-waits-for-data",
            level="problem" if data >= HALF else "advice",
            what=f"{percent(data)} of a step is spent getting the next batch",
            why="the DataLoader is slower than the step: too few workers, slow files, or expensive "
            "preparation",
            evidence=(
                _from_profile(
                    f"enumerate(DataLoader): {percent(data)} of {_us_text(profile.step_us)}"
                ),
            ),
            next="use more DataLoader workers with pin_memory and persistent_workers; or prepare "
            "the data once",
            source=TUNING,
        )
    optimizer = profile.phases.get("optimizer", 0.0)
    if optimizer >= MUCH_OPTIMIZER:
        yield Finding(
            rule="step-optimizer",
            level="advice",
            what=f"{percent(optimizer)} of a step is spent in the optimizer",
            why="it updates tensor by tensor, with a kernel launch for each",
            evidence=(_from_profile(f"Optimizer.step and zero_grad: {percent(optimizer)}"),),
            next="use optimizer(..., fused=True) on a GPU, else foreach=True; a larger batch needs "
            "fewer steps",
            source=TUNING,
        )
    other = profile.phases.get("other", 0.0)
    if other >= MUCH_PYTHON and (profile.gpu_busy is None or profile.gpu_busy < BUSY):
        yield Finding(
            rule="step-python",
            level="advice",
            what=f"{percent(other)} of a step is Python between operations",
            why="loops, logging and conversions run outside of tensor operations",
            evidence=(
                _from_profile(
                    f"no operation runs for {percent(other)} of {_us_text(profile.step_us)}"
                ),
            ),
            next="use torch.compile(model); log every 100 steps; avoid loops over tensors",
            source=TUNING,
        )


def _check_gpu(profile: Profile) -> Iterator[Finding]:
    if profile.gpu_busy is None:
        if profile.operations:
            yield _make_processor_finding(profile)
        return
    if profile.syncs >= 1 and profile.gpu_busy < BUSY:
        yield _make_syncs_finding(profile)
    if profile.kernel_us < SMALL_KERNEL_US and profile.kernel_count > MANY_KERNELS:
        yield _make_small_kernels_finding(profile)
    copying = profile.copies_us / profile.step_us if profile.step_us else 0.0
    if copying >= MUCH_COPYING:
        yield _make_copies_finding(profile, copying)
    yield from _check_kernels(profile)


def _make_syncs_finding(profile: Profile) -> Finding:
    waiting = profile.phases.get("waiting", 0.0)
    return Finding(
        rule="step-syncs",
        level="advice",
        what=f"each step waits {profile.syncs:.0f} times for a value from the GPU",
        why=".item(), float(loss), print(tensor) and `if tensor` stop the program until the "
        "GPU is done, and nothing is queued meanwhile",
        evidence=(
            _from_profile(
                f"{profile.syncs:.1f} per step; synchronization takes {percent(waiting)} of it"
            ),
        ),
        next="keep tensors (loss.detach()) and read them every 100 steps",
        source=CUDA_NOTES,
    )


def _make_small_kernels_finding(profile: Profile) -> Finding:
    return Finding(
        rule="step-small-kernels",
        level="advice",
        what=f"{profile.kernel_count:.0f} small kernels per step",
        why="a launch takes about 5 microseconds, as long as such a kernel runs",
        evidence=(_from_profile(f"half of the kernels take less than {profile.kernel_us:.1f} us"),),
        next="use a larger batch, torch.compile (which fuses kernels), or CUDA graphs",
        source=GPU_BACKGROUND,
    )


def _make_copies_finding(profile: Profile, copying: float) -> Finding:
    why = "copies from memory that is not pinned cannot overlap with computation"
    next_ = "use DataLoader(pin_memory=True) and .to(device, non_blocking=True); copy bytes "
    next_ += "instead of floats"
    largest = next((row.name for row in profile.kernels if row.name.startswith("Memcpy")), "")
    if "Pinned" in largest:
        why = "the memory is pinned already, but the step waits until its batch has arrived"
        next_ = "copy bytes instead of floats, or copy the next batch in a torch.cuda.Stream while "
        next_ += "the GPU computes"
    return Finding(
        rule="step-copies",
        level="advice",
        what=f"{percent(copying)} of a step is spent copying to or from the GPU",
        why=why,
        evidence=(
            _from_profile(
                f"memory copies: {_us_text(profile.copies_us)} of {_us_text(profile.step_us)}"
            ),
        ),
        next=next_,
        source=TUNING,
    )


def _check_kernels(profile: Profile) -> Iterator[Finding]:
    assert profile.gpu_busy is not None
    busy = percent(profile.gpu_busy)
    plain = sum(r.share for r in profile.kernels if any(w in r.name for w in FP32_PRODUCTS))
    if plain >= 0.2:
        yield Finding(
            rule="step-fp32-products",
            level="advice",
            what=f"{percent(plain)} of the GPU's time is spent in fp32 matrix products",
            why="in bf16, fp16 or TF32, tensor cores compute them many times faster",
            evidence=tuple(
                _from_profile(f"{row.name}: {percent(row.share)}") for row in profile.kernels[:2]
            ),
            next="use torch.autocast('cuda', torch.bfloat16), or "
            "torch.set_float32_matmul_precision('high')",
            source=TUNING,
        )
    top = profile.kernels[0] if profile.kernels else None
    evidence = (
        (_from_profile(f"{top.name}: {percent(top.share)} of the GPU's time"),) if top else ()
    )
    if profile.gpu_busy >= BUSY:
        yield Finding(
            rule="step-gpu-busy",
            level="good",
            what=f"the GPU is busy for {busy} of a step",
            why="only faster or fewer kernels can speed it up",
            evidence=evidence or (_from_profile(f"{busy} busy"),),
            next="try mixed precision, torch.compile, channels_last",
            source=NVML_USE,
        )


def _make_processor_finding(profile: Profile) -> Finding:
    top = profile.operations[:3]
    return Finding(
        rule="step-on-processor",
        level="good",
        what="the step was computed on the CPU"
        + (f", by {count_text(profile.threads, 'thread')}" if profile.threads else ""),
        why="the trace has no GPU",
        evidence=tuple(
            _from_profile(
                f"{row.name}: {percent(row.share)} of all operations, {row.count:.0f} per step"
            )
            for row in top
        ),
        next="labctl estimate FILE.py:FUNCTION --batch 64   # is a GPU worth it?",
        source=TUNING,
    )


def _us_text(microseconds: float) -> str:
    return timing_text(microseconds / 1e6)
