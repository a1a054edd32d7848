"""Checks of a bundle before it is submitted: for unsafe files, decompression bombs and secrets.

Each finding names its file and the reason.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Iterable, Sequence
from typing import BinaryIO

from labctl.config import copy_environment, list_secret_names, read_secret_values
from labctl.errors import LabError, PolicyError
from labctl.events import Note, Progress
from labctl.servers.context import LabContext
from labctl.shell import Secret, command
from labctl.submissions.bundle import BundleSource
from labctl.submissions.bundling import BundleContents, get_bundle_part
from labctl.submissions.leaks import LeakSearch, SecretFinding, describe_leaks
from labctl.wire.judge import judge_file

MOST_NAMED = 20


def require_no_hazards(context: LabContext, contents: BundleContents) -> None:
    """Raise PolicyError, with each reason, if a file runs code when loaded, or is a bomb."""
    hazards: dict[str, str] = {}
    done, total = 0, sum(source.file.size for source in contents.sources)
    for source in contents.sources:
        with _open_source(source) as file:
            verdict = judge_file(source.file.path, file, source.file.size)
        if verdict.hazard:
            hazards[source.file.path] = verdict.hazard
        done += source.file.size
        context.reporter.emit(Progress(name="checking files", done=done, total=total,
                                      unit="bytes"))  # fmt: skip
    if hazards:
        raise PolicyError(
            f"{len(hazards)} file{'s' if len(hazards) > 1 else ''} cannot be submitted",
            why="\n".join(f"{path}: {why}" for path, why in list(hazards.items())[:MOST_NAMED]),
            hint=_suggest_safe_files({get_bundle_part(path) for path in hazards}),
        )


def _suggest_safe_files(parts: Collection[str]) -> str:
    """Suggest what to do about unsafe files in these parts of a bundle."""
    lines: list[str] = []
    if "code" in parts:
        lines.append("list files that you need not submit in .labignore, then:\nlabctl submit")
    if "model" in parts:
        lines.append(
            "save weights as safetensors (safetensors.torch.save_file), then run again, or:\n"
            "labctl submit --checkpoint NAME   # another checkpoint of the run"
        )
    if not lines:
        lines.append("labctl submit --code-only   # without the run, if the assignment allows it")
    return "\n".join(lines)


def require_no_secrets(
    context: LabContext,
    contents: BundleContents,
    allowed: Iterable[str] = (),
    choice_words: Sequence[str] = (),
) -> None:
    """Raise PolicyError, with file and line, if the bundle contains secrets.

    `choice_words` are those of the command line that choose the submission.
    """
    search, allowed_paths = LeakSearch(_read_secrets(context)), set(allowed)
    leaks: list[SecretFinding] = []
    for source in contents.sources:
        if get_bundle_part(source.file.path) != "model" and source.file.path not in allowed_paths:
            with _open_source(source) as file:
                leaks += search.find_leaks(source.file.path, file)
    if leaks:
        call = command("labctl", "submit", *choice_words, "--allow", leaks[0].path).render()
        raise PolicyError(
            "the submission contains secrets",
            why=describe_leaks(leaks[:MOST_NAMED]),
            hint=f"{_suggest_removal({get_bundle_part(leak.path) for leak in leaks})}\n"
            f"{call}   # if it is not a secret",
        )


def _suggest_removal(parts: Collection[str]) -> str:
    """Suggest what to do about secrets in these parts of a bundle."""
    if "code" in parts:
        return "remove and revoke them, or list the file in .labignore"
    return "revoke them, and run again without printing them"


def _read_secrets(context: LabContext) -> dict[str, Secret]:
    """Return the values of this lab's secrets; empty, with a warning, if they cannot be read."""
    if not context.config.secrets and not list_secret_names(context.paths, context.lab_id):
        return {}
    try:
        return read_secret_values(context.paths, context.lab_id, context.config, copy_environment())
    except LabError as error:
        text = f"could not check for the values of this lab's secrets: {error.what}"
        context.reporter.emit(Note(text=text, level="warning"))
        return {}


def _open_source(source: BundleSource) -> BinaryIO:
    return source.path.open("rb") if source.path else io.BytesIO(source.content)
