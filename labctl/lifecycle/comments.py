"""Comments in the files that labctl writes into a project, such as a new lab.yaml."""

from __future__ import annotations

import textwrap

# the columns of a terminal as it opens
COLUMNS = 80


def wrap_comment(text: str, indent: str = "") -> list[str]:
    """Split a sentence into comment lines, which fit a terminal."""
    start = f"{indent}# "
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent=start,
        subsequent_indent=start,
        break_long_words=False,
        break_on_hyphens=False,
    )


def comment_out_example(example: str) -> list[str]:
    """Return the lines that show a provider's section, an example, in the server section."""
    if not example:
        return []
    head = "labctl needs these settings. Write yours and uncomment the lines:"
    return [*wrap_comment(head, "  "), *(f"  # {line}" for line in example.splitlines())]
