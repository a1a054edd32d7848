"""What a report says: sentences and figures, in the order in which they are shown."""

from __future__ import annotations

import shlex

from labctl.insight.report import pictures
from labctl.insight.report.charts import Chart
from labctl.insight.report.curves import logged, measured
from labctl.insight.report.facts import Facts
from labctl.insight.report.formatting import (
    NOT_MEASURED,
    SPACE,
    bare_percent,
    count,
    date,
    dollars,
    percent,
    span,
)
from labctl.insight.report.rows import Row, provenance_rows, server_rows, versus_rows
from labctl.insight.report.utilization import Use, use
from labctl.model import Value
from labctl.runs.evaluation import Evaluation, class_figures, interval

# Classes of which a matrix can still be read; of more, the most frequent confusions are named.
MOST_MATRIX = 20
MOST_PAIRS = 20
MOST_PICTURES = 24


class Tile(Value, frozen=True):
    """A headline figure."""

    name: str
    value: str
    said: str = ""


class Scale(Value, frozen=True):
    """Where accuracy, its interval and the baseline lie, in percent from 0 to 100."""

    accuracy: float
    low: float
    high: float
    baseline: float | None
    alt: str


class Cell(Value, frozen=True):
    """One field of the matrix. `weight` (0 to 100) is how dark it is drawn."""

    count: str
    share: str
    weight: int
    right: bool


class MatrixRow(Value, frozen=True):
    name: str
    items: str
    cells: tuple[Cell, ...]


class ClassRow(Value, frozen=True):
    """One class; figures in words, and F1 in percent for its bar (None: nothing to draw)."""

    name: str
    items: str
    precision: str
    recall: str
    f1: str
    bar: float | None


class Pair(Value, frozen=True):
    """One confusion: how often, and of how many of its class."""

    truth: str
    said: str
    count: str
    share: str


class Card(Value, frozen=True):
    """A mistake with its picture, or why there is none. `small` ones are drawn with hard pixels."""

    item: str
    truth: str
    said: str
    probability: str
    picture: str
    lacks: str


class Page(Value, frozen=True):
    """The whole report. Empty parts are not shown, or told as not measured."""

    lab: str
    run: str
    date: str
    figure: str
    headline: str
    lead: str
    tiles: tuple[Tile, ...]
    scale: Scale | None
    charts: tuple[Chart, ...]
    charts_note: str
    labelled: bool
    chosen: str
    split: str
    classes: tuple[ClassRow, ...]
    class_names: tuple[str, ...]
    matrix: tuple[MatrixRow, ...]
    pairs: tuple[Pair, ...]
    pairs_note: str
    mistakes: tuple[Card, ...]
    mistakes_note: str
    versus: tuple[Row, ...]
    versus_said: str
    server: tuple[Row, ...]
    measured: tuple[Chart, ...]
    provenance: tuple[Row, ...]
    commands: str
    warning: str
    notes: tuple[str, ...]
    made: str


def page(facts: Facts) -> Page:
    """Everything in words. Pure: the same facts, the same page."""
    found, used = facts.evaluation, use(facts.samples)
    charts, charts_note = logged(facts)
    said, rows = versus_rows(facts)
    return Page(
        lab=facts.lab,
        run=facts.run.id,
        date=date(facts.run.started_at or facts.run.created_at),
        figure=percent(found.accuracy) if found else "",
        headline=f"of the {found.split} set classified correctly" if found else "Not evaluated yet",
        lead=_lead(found),
        tiles=_tiles(facts, used),
        scale=_scale(found),
        charts=charts,
        charts_note=charts_note,
        labelled=any(line.label for one in charts for line in one.lines),
        chosen=_chosen(facts),
        split=found.split if found else "",
        classes=_classes(found),
        class_names=found.classes if found and len(found.classes) <= MOST_MATRIX else (),
        matrix=_matrix(found),
        pairs=_pairs(found),
        pairs_note=_pairs_note(found),
        mistakes=_mistakes(facts),
        mistakes_note=_mistakes_note(found),
        versus=rows,
        versus_said=said,
        server=server_rows(facts, used),
        measured=measured(facts.samples),
        provenance=provenance_rows(facts),
        commands=_commands(facts),
        warning=_warning(facts),
        notes=facts.notes,
        made=f"Made on {date(facts.made_at)} by labctl {facts.labctl}".strip(),
    )


def _lead(found: Evaluation | None) -> str:
    if found is None:
        return "labctl eval measures how well the model does; this page then says so."
    said = f"{found.correct:,} of {count(found.items, 'item')}."
    if bounds := interval(found.correct, found.items):
        low, high = bounds
        said += f" The 95{SPACE}% confidence interval is {bare_percent(low)} to {percent(high)}"
        said += " (Wilson)."
    if found.baseline_accuracy is None:
        return f"{said} Baseline: {NOT_MEASURED}."
    share = percent(found.baseline_accuracy)
    return f"{said} Always answering with the most frequent class would get {share}."


def _scale(found: Evaluation | None) -> Scale | None:
    if found is None or (bounds := interval(found.correct, found.items)) is None:
        return None
    low, high = bounds
    base = found.baseline_accuracy
    alt = f"Accuracy {percent(found.accuracy)}, 95% interval {percent(low)} to {percent(high)}"
    alt += "" if base is None else f", baseline {percent(base)}"
    return Scale(
        accuracy=found.accuracy * 100,
        low=low * 100,
        high=high * 100,
        baseline=None if base is None else base * 100,
        alt=alt + ", on a scale from 0 to 100 %.",
    )


def _tiles(facts: Facts, used: Use) -> tuple[Tile, ...]:
    run, bill = facts.run, facts.bill
    took_s = run.ended_at - run.started_at if run.ended_at and run.started_at else None
    price = bill.price_usd_per_hour
    rate = (
        "" if price is None else f"at {dollars(price)} an hour" if price else "nothing is charged"
    )
    return (
        Tile(name="Run time", value=span(took_s), said=run.told if run.ended else "it still runs"),
        Tile(name="Cost of the run", value=dollars(bill.run_usd), said=rate),
        _machine_tile(facts, used),
        _busy_tile(used),
    )


def _machine_tile(facts: Facts, used: Use) -> Tile:
    machine = facts.machine
    names = (
        used.gpus or tuple(gpu.name for gpu in machine.gpus if gpu.name) if machine else used.gpus
    )
    cores = count(machine.cpus, "core") if machine and machine.cpus else ""
    if names:
        return Tile(name="Ran on", value=" + ".join(names), said=cores)
    if machine is None:
        return Tile(name="Ran on", value=NOT_MEASURED)
    return Tile(name="Ran on", value=cores or NOT_MEASURED, said="no GPU")


def _busy_tile(used: Use) -> Tile:
    if used.gpu_use_percent is not None:
        said = f"mean over {span(used.measured_s)}"
        return Tile(name="GPU busy", value=f"{used.gpu_use_percent:.0f}{SPACE}%", said=said)
    if used.cpu_cores is not None:
        of = f"of {used.cores:g}" if used.cores else ""
        return Tile(name="Processor cores busy", value=f"{used.cpu_cores:.1f}", said=of)
    return Tile(name="Utilisation", value=NOT_MEASURED, said="the run left no telemetry")


def _chosen(facts: Facts) -> str:
    """What the evaluated checkpoint is, and why it and no other."""
    found = facts.evaluation
    name = found.checkpoint if found else ""
    if not name:
        return ""
    known = next((one for one in facts.checkpoints if one.name == name), None)
    said = f"Evaluated was the checkpoint {name}"
    if known is None:
        return f"{said}; its own record is not here."
    accuracy = known.metrics.get("val_accuracy")
    where = f"{said}, after {count(known.epoch, 'epoch')}" if known.epoch else said
    if accuracy is None or not 0 <= accuracy <= 1:
        return f"{where}."
    others = [one.metrics.get("val_accuracy", -1.0) for one in facts.checkpoints]
    best = accuracy >= max(others)
    why = "the best of those kept" if best else "not the best of those kept"
    return f"{where}: {percent(accuracy)} on validation, {why}."


def _classes(found: Evaluation | None) -> tuple[ClassRow, ...]:
    return tuple(
        ClassRow(
            name=one.name,
            items=f"{one.items:,}",
            precision=percent(one.precision),
            recall=percent(one.recall),
            f1=percent(one.f1),
            bar=None if one.f1 is None else round(one.f1 * 100, 1),
        )
        for one in (class_figures(found) if found else ())
    )


def _matrix(found: Evaluation | None) -> tuple[MatrixRow, ...]:
    if found is None or len(found.classes) > MOST_MATRIX:
        return ()
    rows = []
    for number, (name, counts) in enumerate(zip(found.classes, found.confusion, strict=True)):
        total = sum(counts)
        cells = tuple(
            Cell(
                count=f"{each:,}" if each else "",
                share=percent(each / total, 0) if each else "",
                weight=round(each / total * 100) if total else 0,
                right=column == number,
            )
            for column, each in enumerate(counts)
        )
        rows.append(MatrixRow(name=name, items=f"{total:,}", cells=cells))
    return tuple(rows)


def _wrong(found: Evaluation) -> list[tuple[int, int, int]]:
    """(count, truth, said) of every confusion, the most frequent first."""
    every = [
        (each, row, column)
        for row, counts in enumerate(found.confusion)
        for column, each in enumerate(counts)
        if each and row != column
    ]
    return sorted(every, key=lambda one: (-one[0], one[1], one[2]))


def _pairs(found: Evaluation | None) -> tuple[Pair, ...]:
    if found is None:
        return ()
    return tuple(
        Pair(
            truth=found.classes[row],
            said=found.classes[column],
            count=f"{each:,}",
            share=percent(each / sum(found.confusion[row])),
        )
        for each, row, column in _wrong(found)[:MOST_PAIRS]
    )


def _pairs_note(found: Evaluation | None) -> str:
    if found is None:
        return ""
    more = len(_wrong(found)) - MOST_PAIRS
    note = f"{count(more, 'rarer confusion')} not shown." if more > 0 else ""
    if len(found.classes) > MOST_MATRIX:
        note = (
            f"A matrix of {len(found.classes):,} classes cannot be read, so it is left out. {note}"
        )
    return note.strip()


def _mistakes(facts: Facts) -> tuple[Card, ...]:
    found = facts.evaluation
    cards = []
    for one in found.worst[:MOST_PICTURES] if found else ():
        source = one.picture if one.picture.startswith("data:") else facts.pictures.get(one.picture)
        picture, lacks = pictures.shown(source) if source else ("", "there is none")
        cards.append(
            Card(
                item=one.item,
                truth=one.truth,
                said=one.said,
                probability=percent(one.probability),
                picture=picture,
                lacks=lacks,
            )
        )
    return tuple(cards)


def _mistakes_note(found: Evaluation | None) -> str:
    if found is None:
        return ""
    wrong = found.items - found.correct
    if not wrong:
        return "There were none."
    shown = min(len(found.worst), MOST_PICTURES)
    if not shown:
        return f"{count(wrong, 'item')} wrong; none of them was kept."
    if wrong == 1:
        return "The only one."
    if shown == wrong:
        return f"All {count(wrong, 'mistake')}; the model was surest of the first."
    return f"{shown} of {count(wrong, 'mistake')}: those that the model was surest of."


def _commands(facts: Facts) -> str:
    """What makes this again, word for word."""
    code, run = facts.code, facts.run
    words = shlex.join(code.command if code and code.command else run.command)
    lines = [f"git checkout {code.commit}"] if code and code.commit else []
    lines += ["labctl up", f"labctl run -- {words}", "labctl pull", "labctl eval", "labctl report"]
    return "\n".join(lines)


def _warning(facts: Facts) -> str:
    """What stands in the way of making it again."""
    code = facts.code
    if code is None or not code.dirty:
        return ""
    names = ", ".join(code.changed[:8]) + (", …" if len(code.changed) > 8 else "")
    return f"The code had changes that are not in this commit: {names}"
