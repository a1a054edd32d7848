"""List what is probably a mistake in a run's command, before the run starts."""

from __future__ import annotations

import re

from labctl.config.schema import LabConfig
from labctl.runs.missing_script import describe_missing_script, describe_script_as_program
from labctl.runs.shell_variables import describe_literal_variable, describe_replaced_variable

# The instruction that makes a program of an image take the run's command as its arguments.
_ENTRYPOINT = re.compile(r"^\s*ENTRYPOINT\s", re.IGNORECASE | re.MULTILINE)


def list_mistakes(config: LabConfig, command: tuple[str, ...], *, push: bool) -> list[str]:
    """Return a warning for each mistake; without a `command`, that of lab.yaml is run."""
    words = command or config.run
    texts = [
        describe_literal_variable(words),
        describe_replaced_variable(command, config.data),
    ]
    if push:  # otherwise the code on the server counts
        texts.append(describe_missing_script(config.root, words))
    if not _has_entrypoint(config):
        texts.append(describe_script_as_program(config.root, words))
    return [text for text in texts if text]


def _has_entrypoint(config: LabConfig) -> bool:
    """Whether the lab's Dockerfile has an ENTRYPOINT, which may run a script."""
    dockerfile = config.root / config.image.build / "Dockerfile"
    if not config.image.build or not dockerfile.is_file():
        return False
    return bool(_ENTRYPOINT.search(dockerfile.read_text(errors="replace")))
