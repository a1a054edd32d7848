"""The rule about a command whose program does not exist in the image: exit code 127."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator
from pathlib import PurePosixPath

from labctl.insight.explain.evidence import (
    Answer,
    Evidence,
    Finding,
    RunData,
    from_log,
    from_record,
)
from labctl.insight.explain.sources import SHELL_CODES
from labctl.runs.missing_script import INTERPRETERS

NOT_FOUND_CODE = 127
# What a shell prints about a program that it does not find: "sh: 1: pyton: not found".
NOT_FOUND = re.compile(r"^.*?([^\s:'\"]+): (?:command )?not found\s*$", re.MULTILINE)
GPU_PROGRAM = "nvidia-smi"
SHELLS = frozenset(("sh", "bash", "dash", "zsh"))
# Programs that commands of training runs begin with.
USUAL_PROGRAMS = (
    "accelerate", "bash", "conda", "deepspeed", "env", "jupyter", "make", "nvidia-smi", "pip",
    "pip3", "poetry", "pytest", "python", "python3", "sh", "torchrun", "uv",
)  # fmt: skip


def check_program(material: RunData) -> Iterator[Answer]:
    """Name the program that does not exist, and a usual one with a similar name."""
    program = find_missing_program(material)
    if not program:
        return
    matches = [match for match in NOT_FOUND.finditer(material.log) if match[1] == program]
    line: tuple[Evidence, ...] = (from_log(matches[-1][0].strip()[:240]),) if matches else ()
    if program in material.scripts:
        yield _describe_script(material, program, line)
        return
    similar = _find_similar(program)
    yield Finding(
        rule="program-missing",
        level="problem",
        what=f"the program {program} was not found"
        + (f"; a usual one is called {similar[0]}" if similar else ""),
        why=_explain_absence(material, program),
        evidence=(from_record(f"exit code {NOT_FOUND_CODE}"), *line),
        next=_suggest_command(material, program, similar[0])
        if similar
        else _suggest_addition(material, program),
        source=SHELL_CODES,
    )


def _describe_script(material: RunData, script: str, line: tuple[Evidence, ...]) -> Finding:
    interpreter = INTERPRETERS[PurePosixPath(script).suffix]
    return Finding(
        rule="program-missing",
        level="problem",
        what=f"{script} is a file of this lab and no program",
        why=f"a program is looked up in the image; {interpreter} runs the file",
        evidence=(from_record(f"exit code {NOT_FOUND_CODE}"), *line),
        next=_suggest_command(material, script, interpreter, script),
        source=SHELL_CODES,
    )


def _explain_absence(material: RunData, program: str) -> str:
    if program == GPU_PROGRAM:
        return f"{program} comes with the driver of an NVIDIA GPU: a run without a GPU has none"
    absence = f"{material.image_name} does not contain this program"
    return absence if program in USUAL_PROGRAMS else f"the name is misspelled, or {absence}"


def _suggest_addition(material: RunData, program: str) -> str:
    if program == GPU_PROGRAM:
        return "labctl offers --gpu any   # servers with a GPU"
    return f"{_describe_addition(material, program)}, or correct its name, then:\nlabctl run"


def _describe_addition(material: RunData, program: str) -> str:
    if material.run.is_container:
        return f"choose an image that has {program}"
    return f"add the package that has {program} to {material.package_list}"


def _find_similar(program: str) -> list[str]:
    """Find the usual program that was probably meant; none for one that is spelled correctly.

    Debian's images call Python only python3.
    """
    if program in USUAL_PROGRAMS:
        return ["python3"] if program == "python" else []
    return difflib.get_close_matches(program, USUAL_PROGRAMS, n=1)


def find_missing_program(material: RunData) -> str:
    """Return the program that the run's command, or its shell, did not find; "" without one."""
    run = material.run
    if run.state != "exited" or run.exit_code != NOT_FOUND_CODE or not run.command:
        return ""
    program = run.command[0]
    if program.rpartition("/")[2] not in SHELLS:
        return program
    names = NOT_FOUND.findall(material.log)
    return str(names[-1]) if names else ""


def _suggest_command(material: RunData, program: str, *words: str) -> str:
    """Return the run's command with these words instead of the program."""
    command = material.run.command
    if command[0] == program:
        return f"labctl run -- {shlex.join([*words, *command[1:]])}"
    pattern = rf"(?<!\S){re.escape(program)}(?!\S)"
    corrected = [re.sub(pattern, shlex.join(words), word) for word in command]
    return f"labctl run -- {shlex.join(corrected)}"


RULES = (check_program,)
