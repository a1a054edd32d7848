"""The rules about other work on the server, which takes the CPU or the GPU from the run.

The thresholds (85% of the server's cores busy, a quarter of them with other work) are rules of
thumb.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from labctl.insight.explain.evidence import Answer, Evidence, Finding, RunData, from_telemetry
from labctl.insight.explain.samples import drop_start, median_of
from labctl.insight.explain.sources import LABCTL
from labctl.insight.explain.wording import number
from labctl.insight.telemetry import OtherProgram, Sample
from labctl.model import Value
from labctl.text import names_text

BUSY = 0.85
MUCH = 0.25
LEAST_CORES = 0.1
MOST_NAMED = 3
SHOW = "\nlabctl top   # shows what runs there"


class OtherLoad(Value, frozen=True):
    """Medians while the run lived: cores busy with other work, with everything, and all cores."""

    other_cores: float
    busy_cores: float
    host_cores: float
    other_runs: int


def find_other_load(samples: Sequence[Sample]) -> OtherLoad | None:
    """Return the load by other work, if it kept the server's CPU from this run; else None."""
    measured = [
        sample
        for sample in drop_start(samples)
        if sample.host_cores and sample.host_cpu_cores is not None and sample.cpu_cores is not None
    ]
    host = median_of(sample.host_cores for sample in measured)
    busy = median_of(sample.host_cpu_cores for sample in measured)
    other = median_of(
        max(0.0, (sample.host_cpu_cores or 0.0) - (sample.cpu_cores or 0.0)) for sample in measured
    )
    if host is None or busy is None or other is None:
        return None
    if busy < BUSY * host or other < MUCH * host:
        return None
    runs = median_of(sample.other_runs for sample in measured) or 0
    return OtherLoad(other_cores=other, busy_cores=busy, host_cores=host, other_runs=round(runs))


def check_other_load(material: RunData) -> Iterator[Answer]:
    """Find other work that kept the server's CPU busy while the run lived."""
    load = find_other_load(material.samples)
    if load is None:
        return
    cores = number(load.host_cores)
    evidence: list[Evidence] = [
        from_telemetry(f"the server: {load.busy_cores:.1f} of {cores} cores busy (median)"),
        from_telemetry(f"{load.other_cores:.1f} of these cores were busy with other work"),
    ]
    if load.other_runs:
        count = "1 other run" if load.other_runs == 1 else f"{load.other_runs} other runs"
        evidence.append(from_telemetry(f"{count} of this account at the same time (median)"))
    shown_cores = _measure_programs(drop_start(material.samples))
    programs = _name_busiest(shown_cores)
    if programs and sum(shown_cores.values()) >= load.other_cores / 2:
        evidence.append(from_telemetry(f"most of it by {programs} (mean)"))
    elif programs:
        evidence.append(from_telemetry(f"{programs} (mean)"))
        evidence.append(from_telemetry("most of it by programs outside the server"))
    elif not load.other_runs:
        evidence.append(from_telemetry("by programs outside the server"))
    show = SHOW if programs or load.other_runs else ""
    yield Finding(
        rule="host-busy",
        level="problem",
        what=f"other work took {load.other_cores:.1f} of the server's {cores} cores",
        why="the run shares the CPU with it, so loading data and computing take longer",
        evidence=tuple(evidence),
        next=f"run one job at a time, or use another server{show}",
        source=LABCTL,
    )


def check_shared_gpu(material: RunData) -> Iterator[Answer]:
    """Find other programs that computed on the run's GPU for at least half of its life."""
    samples = [sample for sample in drop_start(material.samples) if sample.gpus]
    times: dict[str, int] = {}
    for sample in samples:
        for name in {_name_program(program) for program in sample.others if program.gpus}:
            times[name] = times.get(name, 0) + 1
    names = sorted(name for name, count in times.items() if count >= len(samples) / 2)
    if not names:
        return
    yield Finding(
        rule="gpu-shared",
        level="problem",
        what=f"the run shared its GPU with {names_text(names, MOST_NAMED)}",
        why="programs on one GPU take turns and share its memory, so each of them is slower",
        evidence=(from_telemetry(f"in at least half of {len(samples)} samples"),),
        next="use a GPU that no other program uses\nlabctl top   # shows what is on the GPU",
        source=LABCTL,
    )


def _measure_programs(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the mean of busy cores of each program beside the run."""
    cores: dict[str, float] = {}
    for sample in samples:
        for program in sample.others:
            name = _name_program(program)
            cores[name] = cores.get(name, 0.0) + program.cpu_cores / len(samples)
    return cores


def _name_busiest(cores: Mapping[str, float]) -> str:
    """Name the programs with the most CPU time, each with its mean of busy cores."""
    busiest = sorted(cores.items(), key=lambda item: item[1], reverse=True)[:MOST_NAMED]
    return ", ".join(f"{name}: {mean:.1f} cores" for name, mean in busiest if mean >= LEAST_CORES)


def _name_program(program: OtherProgram) -> str:
    owner = f"run {program.run}" if program.run else program.person
    return f"{program.name} ({owner})" if owner else program.name


RULES = (check_other_load, check_shared_gpu)
