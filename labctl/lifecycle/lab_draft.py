"""Write a lab.yaml for a directory that already has code, with a comment on each guess."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from labctl.config import DEFAULT_PYTHON, LAB_FILE, clean_name, expand_user
from labctl.config.document import escape
from labctl.errors import NotFoundError, PolicyError
from labctl.lifecycle.comments import comment_out_example, wrap_comment
from labctl.lifecycle.project_lists import CONDA, comment_out
from labctl.lifecycle.project_scan import GPU_IMPORTS, ProjectFacts, scan_project

# a word that YAML reads as text without quotes
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9._/-]*")


def scan_candidate(root: Path) -> ProjectFacts:
    """Return what is known of a directory that may become a lab.

    PolicyError if it is a lab already, or a home directory, or nobody may write there.
    NotFoundError if there is no code.
    """
    if (root / LAB_FILE).exists():
        is_inside = Path.cwd().is_relative_to(root.resolve())
        enter = "" if is_inside else f"cd {shlex.quote(str(root))}\n"
        raise PolicyError(
            f"{root.resolve()} is already a lab",
            why=f"it has a {LAB_FILE}, which labctl init never changes",
            hint=f"{enter}labctl config   # shows its settings",
        )
    if root.resolve() == expand_user("~").resolve():
        raise PolicyError(
            f"{root.absolute()} is your home directory",
            why="labctl would send everything in it to servers",
            hint="labctl init digits && cd digits   # a sample\n"
            "labctl init   # in a directory with your own code",
        )
    facts = scan_project(root)
    if not facts.has_code:
        raise NotFoundError(
            f"there is no code in {root.absolute()}",
            why="labctl looked for Python files, notebooks, a Dockerfile and lists of packages",
            hint="labctl init digits   # a new directory with a sample project",
        )
    require_writable(root.absolute())
    return facts


def require_writable(directory: Path) -> None:
    """Raise PolicyError if this user cannot create files in `directory`, or create it first."""
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir():
        raise PolicyError(
            f"{existing} is a file",
            why="labctl cannot create a directory in it",
            hint="labctl init digits   # a new directory here",
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise PolicyError(
            f"you may not create files in {existing}",
            why="labctl init writes a lab.yaml",
            hint=f"ls -ld {shlex.quote(str(existing))}   # shows its owner and permissions",
        )


def adopt_project(
    root: Path,
    facts: ProjectFacts,
    provider: str,
    base_image: str = "",
    provider_example: str = "",
) -> list[Path]:
    """Write a lab.yaml for the code in `root`; return the files written. Changes no existing file.

    If no list of packages can be used, write one too. Without `provider`, the user's own
    configuration names one. `base_image` is the setting of this machine. `provider_example` is
    the section of the provider that the user must fill in.
    """
    written = []
    text = _draft_list(facts, base_image)
    if text and not facts.has_dockerfile:
        name = name_new_list(root)
        written.append(_create(root / name, text))
        comment_out(root, name)
    else:
        name = facts.packages.file
    lab = clean_name(root.absolute().name)
    server = _draft_server(facts, provider, provider_example)
    written.append(_create(root / LAB_FILE, _draft_lab_file(facts, lab, server, name, base_image)))
    return written


def _draft_list(facts: ProjectFacts, base_image: str) -> str:
    """Return the text of a new list of packages; "" if the lab needs none."""
    if facts.packages.text:
        source = facts.packages.source
        head = f"Written by labctl init from {source}. Check the names, add versions."
        return "\n".join([*wrap_comment(head), facts.packages.text])
    if base_image and facts.sources and not facts.packages.file:
        # Plain Python is an image from Docker Hub. With a list, labctl builds on the base image.
        return "# Written by labctl init: the code imports only Python's own modules.\n"
    return ""


def name_new_list(root: Path) -> str:
    """Return the name of a list of packages that labctl init writes."""
    return "requirements-labctl.txt" if (root / "requirements.txt").exists() else "requirements.txt"


def _create(file: Path, text: str) -> Path:
    with file.open("x", encoding="utf-8") as stream:
        stream.write(text)
    return file


def _draft_lab_file(
    facts: ProjectFacts, name: str, server: Sequence[str], packages: str, base_image: str
) -> str:
    """Return the text of a lab.yaml for these facts; `packages` is the list to install, or "".

    `server` are the lines of its server section. If this machine sets a `base_image`, its Python
    is used unless the project names another.
    """
    return "\n".join(
        [
            "# Written by labctl init from what it found in this directory. Check each guess.",
            "# `labctl config` shows every setting and where it comes from.",
            f'lab: "{name}"',
            "",
            *server,
            "",
            *_draft_image(facts, packages, base_image),
            "",
            *_draft_run(facts),
            *_draft_launch(facts),
            "",
            *_draft_data(facts),
            "",
            "# `labctl pull` downloads these. Write checkpoints to $LABCTL_CHECKPOINT_DIR",
            "# and logs to $LABCTL_LOG_DIR. `labctl pull --all` downloads other new files.",
            "outputs: [checkpoints, logs]",
            *_draft_secrets(facts),
            "",
        ]
    )


def _draft_server(facts: ProjectFacts, provider: str, provider_example: str) -> list[str]:
    lines = ["server:"]
    if provider:
        lines.append(f"  provider: {provider}")
    else:
        lines.append(
            "  # The provider comes from your own configuration; `labctl config` shows it."
        )
    lines += comment_out_example(provider_example)
    used = sorted(GPU_IMPORTS & facts.imports)
    if used:
        imports = f"The code imports {' and '.join(used)}. To require a GPU: any, T4, A100:2"
        lines += wrap_comment(imports, "  ")
    return [*lines, "  gpu: auto"]


def _draft_image(facts: ProjectFacts, file: str, base_image: str) -> list[str]:
    if facts.has_dockerfile:
        return [
            "# This directory has a Dockerfile. Runs keep its ENTRYPOINT. Their command is",
            "# `run:` below, not its CMD.",
            "image: {build: .}",
        ]
    notes = [
        line
        for name, reason in facts.packages.rejected
        for line in wrap_comment(f"Not {name}: {_one_line(reason)}.")
    ]
    if file.endswith(CONDA):
        notes += wrap_comment(f"The packages of {file}, installed once.")
        return [*notes, f"image: {{conda: {file}}}"]
    python = facts.python or DEFAULT_PYTHON
    source = f": {_one_line(facts.python_source)}" if facts.python_source else " is a guess"
    if not file:
        reason = "The code imports only Python's own modules." if facts.sources else ""
        note = f"{reason or 'Nothing here lists packages.'} Python {python}{source}."
        return [*notes, *wrap_comment(note), f"image: python:{python}-slim"]
    project = " and the project itself" if facts.packages.installs_project else ""
    notes += wrap_comment(f"The packages of {file}{project}, installed once.")
    has_base_python = bool(base_image) and not facts.is_python_exact
    if has_base_python:
        # Where the base image is set, another version can often not be downloaded.
        allowed = f"; {_one_line(facts.python_source)}" if facts.python_source else ""
        base = f"Python is that of your base image, {_one_line(base_image)}{allowed}."
        notes += wrap_comment(base)
    else:
        notes += wrap_comment(f"Python {python}{source}.")
    extras = facts.packages.extras
    if extras:
        notes += wrap_comment(f"The code imports packages of {_plural('the extra', extras)}.")
    if facts.packages.other_extras:
        others = _plural("the extra", facts.packages.other_extras)
        notes += wrap_comment(f"Not installed: {others}.")
    chosen = f", extras: [{', '.join(extras)}]" if extras else ""
    version = "" if has_base_python else f'python: "{python}", '
    return [*notes, f"image: {{{version}requirements: {file}{chosen}}}"]


def _plural(noun: str, names: Sequence[str]) -> str:
    return f"{noun}{'s' if len(names) > 1 else ''} {_one_line(', '.join(names))}"


def _one_line(text: str) -> str:
    """Return a text for a comment: a line break in it would start a setting."""
    return escape(" ".join(text.split()))


def _draft_run(facts: ProjectFacts) -> list[str]:
    program = facts.program
    if not program.command:
        lines = ["# No program was found. For example:", "# run: python train.py"]
        if facts.has_notebooks:
            lines.append("# For the notebooks: labctl up, then labctl forward jupyter")
        return lines
    others = f"; also found: {_one_line(', '.join(program.others))}" if program.others else ""
    first = program.command[0]
    words = [
        first if _PLAIN.fullmatch(first) else _quote(first),
        *map(_quote, program.command[1:]),
    ]
    lines = [*wrap_comment(f"{program.reason}{others}."), f"run: [{', '.join(words)}]"]
    if program.path:
        path = ":".join(f"/lab/code/{place}".removesuffix("/.") for place in program.path)
        lines += [
            "",
            "# The program imports modules from there.",
            f"env: {{PYTHONPATH: {_quote(path)}}}",
        ]
    return lines


def _draft_launch(facts: ProjectFacts) -> list[str]:
    """Return the setting for torchrun, as a comment where the code runs without it too."""
    if not facts.program.command or facts.program.command[0] != "python":
        return []
    setting = "launch: {with: torchrun}"
    if facts.needs_rank:
        return ["", "# The code reads its RANK: torchrun starts one process for each GPU.", setting]
    if facts.can_be_distributed:
        start = "The code can train in several processes. To start one for each GPU:"
        return ["", *wrap_comment(start), f"# {setting}"]
    return []


def _draft_data(facts: ProjectFacts) -> list[str]:
    if not facts.data:
        return ["# Directories or addresses that a run reads below $LABCTL_DATA_DIR:", "# data: {}"]
    name = facts.data[0]
    if facts.data_rule:
        what, pronoun = f"{name}/ is", "it"
        if facts.is_data_partial:
            what, pronoun = f"Files of {name}/ are", "them"
        where = [
            *wrap_comment(f"{what} not sent with the code ({_one_line(facts.data_rule)})."),
            *wrap_comment(
                f"If runs need {pronoun}, add the line {_one_line(facts.data_inclusion)}."
            ),
        ]
    else:
        where = wrap_comment(
            f"{name}/ is sent as a part of the code, without files that .gitignore or .labignore "
            "excludes."
        )
    return [
        *where,
        *wrap_comment(
            "Large data is better sent once, as below; the code then reads it from "
            f"$LABCTL_DATA_DIR/{name}:"
        ),
        f"# data: {{{name}: ./{name}}}",
    ]


def _draft_secrets(facts: ProjectFacts) -> list[str]:
    if "wandb" not in facts.imports:
        return []
    return [
        "",
        "# The code imports wandb. Store your key with",
        "# `labctl secret set WANDB_API_KEY`, then:",
        "# secrets: [WANDB_API_KEY]",
    ]


def _quote(text: str) -> str:
    """Return a text as a YAML string in double quotes."""
    return json.dumps(text, ensure_ascii=False)
