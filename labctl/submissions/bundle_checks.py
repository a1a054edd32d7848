"""What stops a bundle before it leaves: files that run code when they are loaded, bombs, secrets.

Each is named with its file and the reason.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import BinaryIO

from labctl.config import environment, secret_names, secret_values
from labctl.errors import LabError, PolicyError
from labctl.events import Note, Progress
from labctl.servers.context import Ground
from labctl.shell import Secret
from labctl.submissions.bundle import Source
from labctl.submissions.bundling import Contents, part_of
from labctl.submissions.leaks import Leak, Search, told
from labctl.wire.judge import judge_file

MOST_NAMED = 20


def check_hazards(ground: Ground, whole: Contents) -> None:
    """PolicyError, with each reason, where a file would run code when loaded, or is a bomb."""
    wrong: list[str] = []
    done, total = 0, sum(source.file.size for source in whole.sources)
    for source in whole.sources:
        with _opened(source) as file:
            verdict = judge_file(source.file.path, file, source.file.size)
        if verdict.hazard:
            wrong.append(f"{source.file.path}: {verdict.hazard}")
        done += source.file.size
        ground.reporter.emit(Progress(name="looking for pickles", done=done, total=total,
                                      unit="bytes"))  # fmt: skip
    if wrong:
        raise PolicyError(
            f"{len(wrong)} file{'s' if len(wrong) > 1 else ''} must not be handed in",
            why="\n".join(wrong[:MOST_NAMED]),
            hint="save weights as safetensors (safetensors.torch.save_file), then run again; "
            "or labctl submit --checkpoint NAME",
        )


def check_leaks(ground: Ground, whole: Contents, allowed: Iterable[str] = ()) -> None:
    """PolicyError, with file and line, where secrets would be handed in with the rest."""
    search, skip = Search(_secrets(ground)), set(allowed)
    found: list[Leak] = []
    for source in whole.sources:
        if part_of(source.file.path) != "model" and source.file.path not in skip:
            with _opened(source) as file:
                found += search.leaks(source.file.path, file)
    if found:
        path = found[0].path
        raise PolicyError(
            "secrets would be handed in",
            why=told(found[:MOST_NAMED]),
            hint="take them out (a revoked one is the safest), or name the file in .labignore; "
            f"no secret? labctl submit --allow {path}",
        )


def _secrets(ground: Ground) -> dict[str, Secret]:
    """The values that this lab knows as secrets, where they can be had."""
    if not ground.config.secrets and not secret_names(ground.paths, ground.lab_id):
        return {}
    try:
        return secret_values(ground.paths, ground.lab_id, ground.config, environment())
    except LabError as error:
        text = f"the values of this lab's secrets were not looked for: {error.what}"
        ground.reporter.emit(Note(text=text, level="warning"))
        return {}


def _opened(source: Source) -> BinaryIO:
    return source.path.open("rb") if source.path else io.BytesIO(source.content)
