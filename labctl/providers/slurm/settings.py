"""The section `slurm:` of lab.yaml."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from labctl.config.document import quote
from labctl.config.reader import Parsed
from labctl.config.scalars import parse_duration
from labctl.model import Value
from labctl.providers.static.machines import HostEntry

PROVIDER = "slurm"
SETTINGS_EXAMPLE = """\
slurm:
  login: alice@login.hpc.example
  partition: gpu
  time: 2h
"""
# Options of sbatch that labctl needs for itself.
RESERVED = {
    *("array", "chdir", "comment", "error", "export", "job-name", "open-mode", "output"),
    *("no-requeue", "parsable", "requeue", "signal", "test-only", "wait", "wrap"),
}
RUNTIMES = ("auto", "apptainer", "pyxis", "podman", "none")


def parse_word(text: str) -> str:
    """Parse the name of a partition, an account, a QOS or a module."""
    if not re.fullmatch(r"[A-Za-z0-9_.+@/-]+", text) or text.startswith("-"):
        raise ValueError(f"{quote(text)}: use only letters, digits and ._+@/- in this name")
    return text


def parse_option_name(text: str) -> str:
    if not re.fullmatch(r"[a-z][a-z0-9-]+", text):
        raise ValueError(f"{quote(text)} is not a long option of sbatch: write constraint")
    if text in RESERVED:
        raise ValueError(f"{text}: labctl sets this option of sbatch itself")
    return text


def parse_option(text: str) -> str:
    if not text or not text.isprintable():
        raise ValueError(f"{quote(text)} is not the value of an option of sbatch")
    return text


def parse_base(text: str) -> str:
    """Parse a directory on the login node; $USER in it is the name of the account."""
    if not re.fullmatch(r"~?(/([\w.-]+|\$USER))+", text) or ".." in text:
        raise ValueError(
            f"{quote(text)} is not a directory of the login node: write /scratch/$USER/labctl"
        )
    return text


def parse_runtime(text: str) -> str:
    if text == "docker":
        raise ValueError(
            "docker would run the image outside of the job, with GPUs of other jobs: "
            "write apptainer, podman or pyxis"
        )
    if text not in RUNTIMES:
        raise ValueError(f"{quote(text)} is not a runtime: write one of {', '.join(RUNTIMES)}")
    return text


Word = Annotated[str, Parsed(parse_word)]


class SlurmSettings(Value, frozen=True):
    """`login` is the login node, as in static's `hosts`; the rest are options of each job.

    `runtime` runs the image of the lab, if it has one. `base` is the directory of all labs on the
    cluster, "" for ~/labctl. `options` are further options of sbatch by their long names.
    """

    login: str | HostEntry = ""
    partition: Word = ""
    account: Word = ""
    qos: Word = ""
    time: Annotated[int | None, Parsed(parse_duration)] = None
    runtime: Annotated[str, Parsed(parse_runtime)] = "auto"
    base: Annotated[str, Parsed(parse_base)] = ""
    modules: tuple[Word, ...] = ()
    options: dict[
        Annotated[str, Parsed(parse_option_name)], Annotated[str, Parsed(parse_option)]
    ] = msgspec.field(default_factory=dict)
