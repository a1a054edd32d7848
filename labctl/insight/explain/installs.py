"""The rule about packages that a run installs itself, which every run does again."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from labctl.insight.explain.evidence import (
    Answer,
    Finding,
    PackageInstall,
    RunData,
    from_log,
    from_telemetry,
)
from labctl.insight.explain.sources import LABCTL_IMAGES
from labctl.insight.telemetry import Sample
from labctl.text import duration_text

# Shorter than this, an image would hardly be faster, and telemetry has a line every 10 s.
WORTH_TELLING_S = 10.0
MOST_LINE_BYTES = 240
# The first line of pip, uv or conda about packages, and the last one if it installed any.
BEGIN = re.compile(
    rb"^[ \t]*(?:Looking in (?:indexes|links): |Collecting |Requirement already satisfied: |"
    rb"Resolved \d+ packages? in |Collecting package metadata|Solving environment)",
    re.MULTILINE,
)
END = re.compile(
    rb"^[ \t]*(?:Successfully installed (?P<pip>[^\r\n]*)|Installed (?P<uv>\d+) packages? in |"
    rb"Executing transaction: .*done)",
    re.MULTILINE,
)
ADVICE = (
    "list them in requirements.txt, and write in lab.yaml: "
    'image: {python: "3.12", requirements: requirements.txt}'
)


def find_installs(log: bytes) -> tuple[PackageInstall, ...]:
    """Find where in a log packages were installed, by a script or notebook too."""
    installs = []
    position = 0
    while (begin := BEGIN.search(log, position)) and (end := END.search(log, begin.start())):
        line = log[end.start() : end.end() + MOST_LINE_BYTES].splitlines()[0]
        installs.append(
            PackageInstall(
                first_byte=begin.start(),
                last_byte=end.end(),
                packages=int(end["uv"] or 0) or len((end["pip"] or b"").split()),
                line=line.decode(errors="replace").strip()[:MOST_LINE_BYTES],
            )
        )
        position = end.end()
    return tuple(installs)


def measure_install(install: PackageInstall, material: RunData) -> float | None:
    """Return the seconds of an installation, to about 10 s; None without telemetry of the log."""
    samples = [sample for sample in material.samples if sample.log_bytes is not None]
    began = _find_time(samples, install.first_byte + 1)
    ended = _find_time(samples, install.last_byte) or material.run.ended_at
    if began is None or not ended:
        return None
    if began == samples[0].at:  # it was under way before the first sample
        began = material.run.started_at or began
    return max(0.0, ended - began)


def _find_time(samples: Sequence[Sample], log_bytes: int) -> float | None:
    """Return the first time at which the log had so many bytes; None if none is recorded."""
    return next((sample.at for sample in samples if (sample.log_bytes or 0) >= log_bytes), None)


def check_installs(material: RunData) -> Iterator[Answer]:
    """Name the time that the run spent on installing packages."""
    if not material.installs:
        return
    times = [measure_install(install, material) for install in material.installs]
    known = [seconds for seconds in times if seconds is not None]
    if known and sum(known) < WORTH_TELLING_S:
        return
    count = sum(install.packages for install in material.installs)
    packages = {0: "packages", 1: "1 package"}.get(count, f"{count} packages")
    took = f", which took about {duration_text(sum(known))}" if known else ""
    yield Finding(
        rule="packages-installed",
        level="advice",
        what=f"the run itself installed {packages}{took}",
        why="every run does this again, on a server that may cost money; an image has them already",
        evidence=(
            *(from_log(install.line) for install in material.installs[:3]),
            *(from_telemetry("the log grew from its first to its last line") for _ in known[:1]),
        ),
        next=ADVICE,
        source=LABCTL_IMAGES,
    )


RULES = (check_installs,)
