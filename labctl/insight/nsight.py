"""Record a few steps with NVIDIA Nsight Systems, where the image has it, and bring its report."""

from __future__ import annotations

from pathlib import Path

import msgspec

from labctl.decoding import decode_json
from labctl.errors import LabError, NotFoundError
from labctl.insight.profile import STEPS, UNPACK, WARMUP, run_profiled
from labctl.model import Value
from labctl.runs import outputs
from labctl.servers.context import LabContext

REPORT = "nsight.nsys-rep"
STATUS = "nsight.json"
STATUS_BYTES = 1024
# nsys samples the CPU only where the kernel allows it, which a container's usually does not.
WRAP = UNPACK + (
    'directory="$LABCTL_LOG_DIR/profile"; mkdir -p "$directory" || exit 73; '
    "if ! command -v nsys >/dev/null 2>&1; then "
    f"""printf '{{"missing": true}}' >"$directory/{STATUS}"; exit 127; fi; """
    "exec nsys profile --trace=cuda,nvtx,osrt --sample=none --cpuctxsw=none --force-overwrite=true "
    '--output="$directory/nsight" "$@"'
)


class NsightResult(Value, frozen=True):
    """A report of Nsight Systems on this machine."""

    run: str
    report: str
    size_bytes: int


class _NsightStatus(Value, frozen=True):
    missing: bool = False


def profile_with_nsight(
    context: LabContext, run_id: str = "", *, steps: int = STEPS, warmup: int = WARMUP
) -> NsightResult:
    """Run the command of a run under `nsys profile`, for a few optimizer steps.

    NotFoundError if the image has no nsys. LabError if the command failed or left no report.
    """
    settings = {"LABCTL_PROFILE_NSIGHT": "1"}
    server, run, output = run_profiled(context, run_id, steps, warmup, settings, WRAP)
    outputs.pull(context, server, [run.id], only=("logs",))
    directory = context.config.root / "runs" / run.id / "logs" / "profile"
    if is_nsys_missing(directory):
        raise NotFoundError(
            f"{run.image or 'the image'} has no nsys",
            why="--nsight starts NVIDIA Nsight Systems in the run's container",
            hint="use an image that has it (nvcr.io/nvidia/pytorch), or add the package "
            "nsight-systems-cli of NVIDIA's repository to your Dockerfile\n"
            "labctl profile   # PyTorch's own profiler, without nsys",
        )
    report = directory / REPORT
    if not report.is_file() or report.is_symlink():
        raise LabError(
            "nsys wrote no report", why=output or run.summary, hint=f"labctl explain {run.id}"
        )
    return NsightResult(run=run.id, report=str(report), size_bytes=report.stat().st_size)


def is_nsys_missing(directory: Path) -> bool:
    """Whether the run noted that its image has no nsys."""
    try:
        with (directory / STATUS).open("rb") as file:
            return decode_json(file.read(STATUS_BYTES), _NsightStatus).missing
    except (OSError, msgspec.MsgspecError):
        return False
