"""The records and the scripts of attempts that are jobs of Slurm.

An attempt has a directory of its own outside of the run's, as a plain process has: what was created
(attempt.json), the script that Slurm runs (batch.sh), the one for a command beside it (step.sh),
and the one that sets the environment (enter.sh).
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ...wire.codec import to_json
from ...wire.runs import SlurmAttemptRecord
from ..host.paths import read_record, read_text, write_json, write_text
from ..program import PROGRAM
from .attempt_directories import find_attempt_directory
from .enter_script import ENTER, build_enter_script
from .executor import JobImage, NewAttempt
from .job_containers import OUT_OF_MEMORY, build_container_enter_script

BATCH, STEP = "batch.sh", "step.sh"
# The mark that Slurm has started the job's script.
BEGAN = "began"
# Why Slurm asked the command to end, which saved no checkpoint: "time" or "room".
STOPPED = "stopped"


def write_scripts(directory: Path, attempt: NewAttempt) -> None:
    """Write the scripts of an attempt into its directory."""
    write_text(directory / ENTER, build_job_enter_script(directory, attempt), 0o700)
    write_text(directory / STEP, build_step_script(directory, attempt), 0o700)
    write_text(directory / BATCH, build_batch_script(directory, attempt), 0o700)


def build_job_enter_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that runs a command in the environment of an attempt, on its machine.

    Secrets are variables of the job, and Slurm sets the variables of its GPUs.
    """
    if isinstance(attempt.image, JobImage):
        return build_container_enter_script(attempt, attempt.image)
    own = {"LABCTL_SECRETS_DIR": "/nonexistent"}
    if not attempt.spec.job.gpus:
        own["CUDA_VISIBLE_DEVICES"] = ""
    return build_enter_script(attempt_directory, attempt, own)


def build_batch_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script of the job."""
    modules = attempt.spec.job.modules
    values = {
        "attempt": str(attempt_directory),
        "run": str(attempt.directory),
        "modules": " ".join(modules),
        "recorder": shlex.join(
            [sys.executable, "-I", "-S", str(PROGRAM / "__main__.py"), "telemetry"]
        ),
    }
    return "\n".join(
        [
            choose_interpreter(modules),
            *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
            f"set -- {' '.join(map(shlex.quote, attempt.spec.command))}",
            Path(__file__).with_name("slurm_batch.sh").read_text(),
        ]
    )


def build_step_script(attempt_directory: Path, attempt: NewAttempt) -> str:
    """Return the script that runs a command beside the program."""
    modules = attempt.spec.job.modules
    enter = shlex.quote(str(attempt_directory / ENTER))
    return "\n".join(
        [
            choose_interpreter(modules),
            *load_modules(modules),
            f'LABCTL_ENTER=1 exec sh {enter} "$@"',
            "",
        ]
    )


def load_modules(modules: Sequence[str]) -> list[str]:
    """Return the lines of a script that load the modules of the cluster."""
    return [f"module load {shlex.join(modules)} >&2"] if modules else []


def choose_interpreter(modules: Sequence[str]) -> str:
    """Return the first line of a script. `module` is a function of login shells."""
    return "#!/bin/bash -l" if modules else "#!/bin/sh"


def has_begun(name: str) -> bool:
    """Whether Slurm has ever started the script of an attempt."""
    return (find_attempt_directory(name) / BEGAN).exists()


def is_out_of_memory(name: str) -> bool:
    """Whether the container of an attempt has used up the memory of its job."""
    return (find_attempt_directory(name) / OUT_OF_MEMORY).exists()


def read_start_time(name: str) -> float | None:
    """Return when Slurm first started the script of an attempt, in Unix seconds."""
    text = read_text(find_attempt_directory(name) / BEGAN)
    return float(text) if text.isdigit() else None


def read_stop_reason(name: str) -> str:
    """Return STOPPED of an attempt, "" if Slurm did not ask it to end."""
    return read_text(find_attempt_directory(name) / STOPPED)


def read_attempt(name: str) -> SlurmAttemptRecord | None:
    return read_record(SlurmAttemptRecord, find_attempt_directory(name) / "attempt.json")


def write_attempt(name: str, record: SlurmAttemptRecord) -> None:
    write_json(find_attempt_directory(name) / "attempt.json", to_json(record))
