"""The command of a run that torchrun starts, once for each GPU."""

from __future__ import annotations

import re
import shlex

from labctl.config import LabConfig
from labctl.errors import UsageError
from labctl.errors.subject import Subject

PYTHON = re.compile(r"(?:.*/)?python[0-9.]*")
TORCHRUN = ("-m", "torch.distributed.run")


def build_launch_command(
    config: LabConfig, typed: tuple[str, ...], gpu_count: int
) -> tuple[str, ...]:
    """Return the command that starts the processes of `typed`, or of `run:` in lab.yaml without it.

    `gpu_count` is that of one server. The command is unchanged for a single process, and if it
    starts torchrun itself, as that of an earlier run does. A typed command that is not a Python
    program, such as `nvidia-smi`, is unchanged too.

    torchrun is called as a module of the command's own Python, the one in which PyTorch is
    installed. What other processes than the first print goes to files in logs/ranks of the run.

    Raises UsageError if `run:` is not a Python program.
    """
    launch, command = config.launch, typed or config.run
    processes = max(1, launch.processes or gpu_count)
    servers = config.server.count
    if not launch.launcher or processes * servers == 1 or command[1:3] == TORCHRUN:
        return command
    python, *words = command
    if not PYTHON.fullmatch(python) or not words or (words[0].startswith("-") and words[0] != "-m"):
        if typed:
            return command
        raise UsageError(
            f"torchrun cannot start `{shlex.join(command)}`",
            why="`launch:` in lab.yaml needs `python FILE` or `python -m MODULE`",
            hint=_hint_launch,
        )
    is_module = words[0] == "-m"
    others = ",".join(f"{rank}:3" for rank in range(1, processes))
    # A program starts in the directory of its code.
    logs = "/lab/run/logs" if config.uses_containers else "../logs"
    return (
        *(python, *TORCHRUN),
        # On several servers, the agent gives torchrun its place in the environment, and only labctl
        # can restart: torchrun cannot replace a server.
        *([] if servers > 1 else ["--standalone"]),
        f"--nproc-per-node={processes}",
        f"--max-restarts={0 if servers > 1 else launch.restarts}",
        f"--log-dir={logs}/ranks",
        *([f"--redirects={others}"] if others else []),
        *(["--module", *words[1:]] if is_module else words),
    )


def _hint_launch(subject: Subject) -> str:
    return f"remove `launch:` from {subject.config_file}, or run a Python program"
