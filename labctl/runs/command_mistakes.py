"""List what is probably a mistake in a run's command, before the run starts."""

from __future__ import annotations

from labctl.config.schema import LabConfig
from labctl.runs.missing_script import describe_missing_script
from labctl.runs.shell_variables import describe_literal_variable, describe_replaced_variable


def list_mistakes(config: LabConfig, command: tuple[str, ...], *, push: bool) -> list[str]:
    """Return a warning for each mistake; without a `command`, that of lab.yaml is run."""
    words = command or config.run
    texts = [
        describe_literal_variable(words),
        describe_replaced_variable(command, config.data),
    ]
    if push:  # otherwise the code on the server counts
        texts.append(describe_missing_script(config.root, words))
    return [text for text in texts if text]
