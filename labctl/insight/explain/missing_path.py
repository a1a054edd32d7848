"""Files and directories that exist in the lab, but were not pushed with its code."""

from __future__ import annotations

import re
from collections.abc import Iterator

from labctl.insight.explain.evidence import Answer, Finding, RunData, from_log
from labctl.insight.explain.sources import LAB_FILE
from labctl.insight.explain.wording import repeat_command

MESSAGE = re.compile(r"FileNotFoundError: (.*)")
QUOTED = re.compile(r"'([^']+)'")


def find_missing_path(log: str) -> str:
    """Return the path in the log's last FileNotFoundError, "" without one.

    Python's own message quotes it. In others, it is the word with a slash.
    """
    lines = MESSAGE.findall(log)
    if not lines:
        return ""
    quoted = QUOTED.search(lines[-1])
    if quoted:
        return quoted.group(1)
    words = (word.strip("`\"'.,:;()[]<>") for word in lines[-1].split())
    return next((word for word in words if "/" in word and "://" not in word), "")


def check_left_out_path(material: RunData) -> Iterator[Answer]:
    """Say why the path that the run did not find was not pushed with the code."""
    left_out = material.left_out
    if left_out is None:
        return
    if left_out.in_data:
        why = "lab.yaml lists it under data:, so it is not pushed with the code"
        next_ = f"read it from {left_out.in_data}"
    else:
        why = f"it exists on this machine, but an ignore rule leaves it out: {left_out.rule}"
        folder = left_out.directory or left_out.path.rpartition("/")[0] or left_out.path
        next_ = (
            f"add the line {left_out.inclusion}, then:\n{repeat_command(material)}\n"
            f"(or, for large data, list {folder} under data: in lab.yaml and read it from "
            "$LABCTL_DATA_DIR)"
        )
    message = MESSAGE.findall(material.log)[-1].strip()
    yield Finding(
        rule="file-ignored",
        level="problem",
        what=f"{left_out.path} was not pushed with the code",
        why=why,
        evidence=(from_log(f"FileNotFoundError: {message[:240]}"),),
        next=next_,
        source=LAB_FILE,
    )


RULES = (check_left_out_path,)
