"""Rows of the report's tables: the server, its use, the costs, and the origin of the result."""

from __future__ import annotations

from labctl.insight.report.facts import LostServer, ReportFacts
from labctl.insight.report.formatting import (
    NOT_MEASURED,
    SPACE,
    count,
    date,
    dollars,
    percent,
    size,
    span,
)
from labctl.insight.report.utilization import Utilization
from labctl.model import Value
from labctl.runs.evaluation import Evaluation
from labctl.runs.provenance import ServerHardware
from labctl.text import optional_text, price_or_free_text

SAME = 1e-9
HELD_BY = {"thermal": "heat", "power": "its power limit", "hardware": "the board's protection"}


class TableRow(Value, frozen=True):
    """One row. `exact` is shown as code: a hash, a command."""

    name: str
    value: str
    exact: bool = False


def server_rows(facts: ReportFacts, used: Utilization) -> tuple[TableRow, ...]:
    """List hardware, driver, utilization, energy, costs, and lost servers."""
    bill, machine = facts.bill, facts.machine or ServerHardware()
    kind = " ".join(filter(None, [bill.provider, bill.type, "(spot)" if bill.spot else ""]))
    drivers = sorted({gpu.driver for gpu in machine.gpus if gpu.driver})
    return (
        TableRow(name="Server", value=kind or NOT_MEASURED),
        TableRow(name="GPU", value=_gpus(facts, used)),
        TableRow(name="GPU driver", value=", ".join(drivers) or _absent(facts)),
        TableRow(name="CPU", value=_cores(machine)),
        TableRow(name="Memory", value=size(machine.memory_bytes or None)),
        TableRow(name="System", value=_system(machine)),
        TableRow(name="GPU use", value=_gpu_use(facts, used)),
        TableRow(name="CPU use", value=_cpu_use(used)),
        TableRow(name="Peak memory", value=_of_limit(used.memory_bytes, used.memory_limit_bytes)),
        TableRow(name="GPU energy", value=_energy(facts, used)),
        TableRow(name="Price", value=_price(facts)),
        TableRow(name="Cost of this run", value=dollars(bill.run_usd)),
        TableRow(name="Cost of the lab so far", value=_lab_cost(facts)),
        TableRow(name="Server idle", value=percent(bill.idle_share)),
        TableRow(name="Servers lost during the run", value=_reclaims(facts)),
    )


def _gpus(facts: ReportFacts, used: Utilization) -> str:
    if facts.machine is None:
        return " + ".join(used.gpus) or NOT_MEASURED
    known = [
        gpu.name + (f" ({size(gpu.memory_bytes)})" if gpu.memory_bytes else "")
        for gpu in facts.machine.gpus
    ]
    return ", ".join(known) or "none"


def _absent(facts: ReportFacts) -> str:
    return "none" if facts.machine and not facts.machine.gpus else NOT_MEASURED


def _cores(machine: ServerHardware) -> str:
    arch = f" ({machine.arch})" if machine.arch else ""
    return count(machine.cpus, "core") + arch if machine.cpus else NOT_MEASURED


def _system(machine: ServerHardware) -> str:
    kernel = f"Linux {machine.kernel}" if machine.kernel else ""
    docker = f"Docker {machine.docker}" if machine.docker else ""
    return ", ".join(filter(None, [machine.os, kernel, docker])) or NOT_MEASURED


def _gpu_use(facts: ReportFacts, used: Utilization) -> str:
    if used.gpu_use_percent is None:
        return _absent(facts)
    parts = [f"{used.gpu_use_percent:.0f}% busy"]
    if used.gpu_power_w is not None:
        parts.append(f"{used.gpu_power_w:.0f}{SPACE}W")
    if used.gpu_memory_bytes is not None:
        parts.append(
            f"memory up to {_of_limit(used.gpu_memory_bytes, used.gpu_memory_total_bytes)}"
        )
    if used.throttled:
        causes = " and ".join(HELD_BY.get(reason, reason) for reason in used.throttled)
        parts.append(f"at times slowed by {causes}")
    return ", ".join(parts) + f" ({_over(used)})"


def _cpu_use(used: Utilization) -> str:
    if used.cpu_cores is None:
        return NOT_MEASURED
    of = f" of {used.cores:g}" if used.cores else ""
    return f"{used.cpu_cores:.1f}{of} cores busy ({_over(used)})"


def _over(used: Utilization) -> str:
    if used.measured_s <= 0:
        return count(used.samples, "sample")
    return f"mean over {span(used.measured_s)}, {count(used.samples, 'sample')}"


def _of_limit(value: float | None, limit: float | None) -> str:
    return size(value) + (f" of {size(limit)}" if value is not None and limit else "")


def _energy(facts: ReportFacts, used: Utilization) -> str:
    if used.energy_wh is not None:
        return f"{used.energy_wh:.1f}{SPACE}Wh, by the GPU's own counter"
    if used.energy_estimate_wh is not None:
        return f"about {used.energy_estimate_wh:.1f}{SPACE}Wh, from its power (no energy counter)"
    return _absent(facts)


def _price(facts: ReportFacts) -> str:
    price = facts.bill.price_usd_per_hour
    return optional_text(price, price_or_free_text, NOT_MEASURED)


def _lab_cost(facts: ReportFacts) -> str:
    bill = facts.bill
    if bill.lab_usd is None:
        return NOT_MEASURED
    return dollars(bill.lab_usd) + ("" if bill.lab_complete else ", plus servers of unknown price")


def _reclaims(facts: ReportFacts) -> str:
    if facts.reclaims is None:
        return NOT_MEASURED
    if not facts.reclaims:
        return "none"
    return "; ".join(_describe_reclaim(reclaim) for reclaim in facts.reclaims)


def _describe_reclaim(reclaim: LostServer) -> str:
    text = date(reclaim.at)
    text += f": {reclaim.reason}" if reclaim.reason else ""
    if reclaim.from_step is not None:
        text += f"; resumed from step {reclaim.from_step:,.0f}"
        if reclaim.last_step is not None and reclaim.last_step > reclaim.from_step:
            text += f" ({reclaim.last_step - reclaim.from_step:,.0f} steps were repeated)"
    return text + (f", {span(reclaim.took_s)} later" if reclaim.took_s is not None else "")


def versus_rows(facts: ReportFacts) -> tuple[str, tuple[TableRow, ...]]:
    """Compare server and this machine; return (whether they agree, the accuracy of each)."""
    here, server = facts.here, facts.server
    there = server.accuracy if server else facts.server_accuracy
    rows = (
        TableRow(name="On the server", value=_figure(server, there)),
        TableRow(name="On this machine", value=_figure(here, here.accuracy if here else None)),
    )
    if here is None or there is None:
        return "Only one of the two was measured.", rows
    if server and here.data_sha256 and server.data_sha256 not in ("", here.data_sha256):
        return "The two used different data, so they cannot be compared.", rows
    if abs(here.accuracy - there) < SAME:
        return "Both accuracies are equal, so the model was downloaded intact.", rows
    return "The two differ: model, code, data or libraries are not the same.", rows


def _figure(evaluation: Evaluation | None, accuracy: float | None) -> str:
    if accuracy is None:
        return NOT_MEASURED
    text = percent(accuracy, 2)
    if evaluation is None:
        return text
    device = f" on {evaluation.device}" if evaluation.device else ""
    at = f", {date(evaluation.at)}" if evaluation.at else ""
    if evaluation.items:
        text += f" ({evaluation.correct:,} of {evaluation.items:,})"
    return f"{text}{device}{at}"


def provenance_rows(facts: ReportFacts) -> tuple[TableRow, ...]:
    """List the run, its image and code, and the hashes of weights and data."""
    run, code, found = facts.run, facts.code, facts.evaluation
    rows = [
        TableRow(name="Run", value=run.id, exact=True),
        TableRow(name="Started", value=date(run.started_at) if run.started_at else NOT_MEASURED),
        TableRow(name="Image", value=run.image or NOT_MEASURED, exact=bool(run.image)),
        TableRow(name="Image digest", value=_digest(facts), exact=bool(run.image_digest)),
        TableRow(name="Image id", value=run.image_id or NOT_MEASURED, exact=bool(run.image_id)),
        TableRow(name="Git commit", value=_commit(facts), exact=bool(code and code.commit)),
        TableRow(name="Uncommitted changes", value=_dirty(facts)),
        TableRow(name="Checkpoint", value=(found and found.checkpoint) or NOT_MEASURED, exact=True),
        _hash("Weights, SHA-256", found.checkpoint_sha256 if found else ""),
        _hash(
            f"Data ({found.split if found else 'test'}), SHA-256",
            found.data_sha256 if found else "",
        ),
    ]
    for name, value in sorted((code.env if code else {}).items()):
        rows.append(TableRow(name=f"Variable {name}", value=value, exact=value != "hidden"))
    return tuple(rows)


def _hash(name: str, value: str) -> TableRow:
    return TableRow(name=name, value=value or NOT_MEASURED, exact=bool(value))


def _digest(facts: ReportFacts) -> str:
    run = facts.run
    if run.image_digest:
        return run.image_digest
    return "none: it was built on the server" if run.image_id else NOT_MEASURED


def _commit(facts: ReportFacts) -> str:
    code = facts.code
    if code is None:
        return NOT_MEASURED
    return code.commit or (f"none: {code.why}" if code.why else NOT_MEASURED)


def _dirty(facts: ReportFacts) -> str:
    code = facts.code
    if code is None or code.dirty is None:
        return NOT_MEASURED
    return "yes: " + ", ".join(code.changed) if code.dirty else "none"
