"""The text and figures of a report, in the order in which they are shown."""

from __future__ import annotations

import math
import shlex

from labctl.insight.report import pictures
from labctl.insight.report.charts import Chart
from labctl.insight.report.curves import draw_logged, draw_telemetry
from labctl.insight.report.facts import ReportFacts, TextSection
from labctl.insight.report.formatting import (
    NOT_MEASURED,
    bare_percent,
    count,
    date,
    dollars,
    percent,
    span,
)
from labctl.insight.report.quantization_table import QuantizationPart, describe_quantization
from labctl.insight.report.rows import TableRow, provenance_rows, server_rows, versus_rows
from labctl.insight.report.speedup_chart import SpeedupPart, describe_speedup
from labctl.insight.report.utilization import Utilization, summarize_utilization
from labctl.model import Value
from labctl.runs.evaluation import Evaluation, compute_class_metrics, confidence_interval
from labctl.text import price_text

# With more classes a matrix is unreadable, so that only the most frequent confusions are listed.
MOST_MATRIX = 20
MOST_PAIRS = 20
MOST_PICTURES = 24
# nats; a model that guesses among all tokens of a language has about 12
MOST_LOSS = 100.0


class Tile(Value, frozen=True):
    """A headline figure."""

    name: str
    value: str
    note: str = ""


class Scale(Value, frozen=True):
    """Positions of the accuracy, its interval and the baseline, in percent from 0 to 100."""

    accuracy: float
    low: float
    high: float
    baseline: float | None
    alt: str


class Cell(Value, frozen=True):
    """One cell of the matrix. `weight` (0 to 100) is how dark it is drawn."""

    count: str
    share: str
    weight: int
    right: bool


class MatrixRow(Value, frozen=True):
    name: str
    items: str
    cells: tuple[Cell, ...]


class ClassRow(Value, frozen=True):
    """One class: its metrics as text, and F1 in percent for its bar (None: no bar)."""

    name: str
    items: str
    precision: str
    recall: str
    f1: str
    bar: float | None


class Pair(Value, frozen=True):
    """One confusion: how often it occurred, and the share of its class."""

    truth: str
    predicted: str
    count: str
    share: str


class MistakeCard(Value, frozen=True):
    """A mistake with its picture, or the reason why it has none (`lacks`)."""

    item: str
    truth: str
    predicted: str
    probability: str
    picture: str
    lacks: str


class Page(Value, frozen=True):
    """The whole report. Empty parts are left out, or shown as not measured."""

    lab: str
    run: str
    date: str
    figure: str
    headline: str
    lead: str
    tiles: tuple[Tile, ...]
    text: tuple[TextSection, ...]
    scale: Scale | None
    charts: tuple[Chart, ...]
    charts_note: str
    labeled: bool
    speedup: SpeedupPart | None
    quantization: QuantizationPart | None
    chosen: str
    split: str
    classes: tuple[ClassRow, ...]
    class_names: tuple[str, ...]
    matrix: tuple[MatrixRow, ...]
    pairs: tuple[Pair, ...]
    pairs_note: str
    mistakes: tuple[MistakeCard, ...]
    mistakes_note: str
    versus: tuple[TableRow, ...]
    agreement: str
    server: tuple[TableRow, ...]
    measured: tuple[Chart, ...]
    provenance: tuple[TableRow, ...]
    commands: str
    warning: str
    notes: tuple[str, ...]
    made: str


def build_page(facts: ReportFacts) -> Page:
    """Write the report's text from the facts. Pure: the same facts give the same page."""
    evaluation, used = facts.evaluation, summarize_utilization(facts.samples)
    charts, charts_note = draw_logged(facts)
    agreement, rows = versus_rows(facts)
    return Page(
        lab=facts.lab,
        run=facts.run.id,
        date=date(facts.run.started_at or facts.run.created_at),
        figure=percent(evaluation.accuracy) if evaluation else "",
        headline=_headline(evaluation),
        lead=_lead(evaluation),
        tiles=_tiles(facts, used),
        text=facts.text,
        scale=_scale(evaluation),
        charts=charts,
        charts_note=charts_note,
        labeled=any(line.label for one in charts for line in one.lines),
        speedup=describe_speedup(facts.speedup) if facts.speedup else None,
        quantization=describe_quantization(facts.quantization) if facts.quantization else None,
        chosen=_describe_checkpoint(facts),
        split=evaluation.split if evaluation else "",
        classes=_classes(evaluation),
        class_names=evaluation.classes
        if evaluation and len(evaluation.classes) <= MOST_MATRIX
        else (),
        matrix=_matrix(evaluation),
        pairs=_pairs(evaluation),
        pairs_note=_pairs_note(evaluation),
        mistakes=_mistakes(facts),
        mistakes_note=_mistakes_note(evaluation),
        versus=rows,
        agreement=agreement,
        server=server_rows(facts, used),
        measured=draw_telemetry(facts.samples),
        provenance=provenance_rows(facts),
        commands=_commands(facts),
        warning=_warning(facts),
        notes=facts.notes,
        made=f"Created on {date(facts.made_at)} by labctl {facts.labctl}".strip(),
    )


def _headline(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "Not evaluated yet"
    verb = "classified" if evaluation.classes else "predicted"
    return f"of the {evaluation.split} set {verb} correctly"


def _lead(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return "Run labctl eval to measure the model's accuracy, then labctl report again."
    if not evaluation.items:
        return "evaluate.py printed no number of items (total), so there is no confidence interval."
    text = f"{evaluation.correct:,} of {count(evaluation.items, 'item')}."
    if bounds := confidence_interval(evaluation.correct, evaluation.items):
        low, high = bounds
        text += f" The 95% confidence interval is {bare_percent(low)} to {percent(high)}"
        text += " (Wilson)."
    text += _describe_loss(evaluation)
    if evaluation.baseline_accuracy is None:
        return f"{text} Baseline: {NOT_MEASURED}."
    share = percent(evaluation.baseline_accuracy)
    return f"{text} Baseline: always predicting the majority class would get {share}."


def _describe_loss(evaluation: Evaluation) -> str:
    """Return loss and perplexity of predictions that have no classes, such as those of text."""
    loss = evaluation.loss
    if evaluation.classes or loss is None or not 0 <= loss <= MOST_LOSS:
        return ""
    return f" Loss {loss:.4f}, perplexity {math.exp(loss):,.2f}."


def _scale(evaluation: Evaluation | None) -> Scale | None:
    if (
        evaluation is None
        or (bounds := confidence_interval(evaluation.correct, evaluation.items)) is None
    ):
        return None
    low, high = bounds
    base = evaluation.baseline_accuracy
    alt = f"Accuracy {percent(evaluation.accuracy)}, 95% interval {percent(low)} to {percent(high)}"
    alt += "" if base is None else f", baseline {percent(base)}"
    return Scale(
        accuracy=evaluation.accuracy * 100,
        low=low * 100,
        high=high * 100,
        baseline=None if base is None else base * 100,
        alt=alt + ", on a scale from 0 to 100%.",
    )


def _tiles(facts: ReportFacts, used: Utilization) -> tuple[Tile, ...]:
    run, bill = facts.run, facts.bill
    took_s = run.ended_at - run.started_at if run.ended_at and run.started_at else None
    price = bill.price_usd_per_hour
    cost = dollars(bill.run_usd)
    rate = "" if price is None else f"at {price_text(price)}" if price else "free"
    return (
        Tile(
            name="Run time",
            value=span(took_s),
            note=run.summary if run.has_ended else "still running",
        ),
        Tile(name="Cost of the run", value=cost, note="" if rate == cost else rate),
        _machine_tile(facts, used),
        _busy_tile(used),
    )


def _machine_tile(facts: ReportFacts, used: Utilization) -> Tile:
    machine = facts.machine
    names = (
        used.gpus or tuple(gpu.name for gpu in machine.gpus if gpu.name) if machine else used.gpus
    )
    cores = count(machine.cpus, "core") if machine and machine.cpus else ""
    if names:
        return Tile(name="Ran on", value=" + ".join(names), note=cores)
    if machine is None:
        return Tile(name="Ran on", value=NOT_MEASURED)
    return Tile(name="Ran on", value=cores or NOT_MEASURED, note="no GPU")


def _busy_tile(used: Utilization) -> Tile:
    if used.gpu_use_percent is not None:
        period = f"mean over {span(used.measured_s)}"
        return Tile(name="GPU busy", value=f"{used.gpu_use_percent:.0f}%", note=period)
    if used.cpu_cores is not None:
        of = f"of {used.cores:g}" if used.cores else ""
        return Tile(name="CPU cores busy", value=f"{used.cpu_cores:.1f}", note=of)
    return Tile(name="Utilization", value=NOT_MEASURED, note="the run has no telemetry")


def _describe_checkpoint(facts: ReportFacts) -> str:
    """Name the evaluated checkpoint, and say whether it is the best one."""
    evaluation = facts.evaluation
    name = evaluation.checkpoint if evaluation else ""
    if not name:
        return ""
    checkpoint = next(
        (candidate for candidate in facts.checkpoints if candidate.name == name), None
    )
    text = f"Evaluated checkpoint: {name}"
    if checkpoint is None:
        return f"{text}; its manifest was not pulled."
    accuracy = checkpoint.metrics.get("val_accuracy")
    text = f"{text}, after {count(checkpoint.epoch, 'epoch')}" if checkpoint.epoch else text
    if accuracy is None or not 0 <= accuracy <= 1:
        return f"{text}."
    others = [other.metrics.get("val_accuracy", -1.0) for other in facts.checkpoints]
    best = accuracy >= max(others)
    rank = "the best of the saved checkpoints" if best else "not the best of the saved checkpoints"
    return f"{text}: {percent(accuracy)} on validation, {rank}."


def _classes(evaluation: Evaluation | None) -> tuple[ClassRow, ...]:
    return tuple(
        ClassRow(
            name=figures.name,
            items=f"{figures.items:,}",
            precision=percent(figures.precision),
            recall=percent(figures.recall),
            f1=percent(figures.f1),
            bar=None if figures.f1 is None else round(figures.f1 * 100, 1),
        )
        for figures in (compute_class_metrics(evaluation) if evaluation else ())
    )


def _matrix(evaluation: Evaluation | None) -> tuple[MatrixRow, ...]:
    if evaluation is None or len(evaluation.classes) > MOST_MATRIX:
        return ()
    rows = []
    for number, (name, counts) in enumerate(
        zip(evaluation.classes, evaluation.confusion, strict=True)
    ):
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


def _list_confusions(evaluation: Evaluation) -> list[tuple[int, int, int]]:
    """List (count, true class, predicted class) of every confusion, the most frequent first."""
    confusions = [
        (each, row, column)
        for row, counts in enumerate(evaluation.confusion)
        for column, each in enumerate(counts)
        if each and row != column
    ]
    return sorted(confusions, key=lambda confusion: (-confusion[0], *confusion[1:]))


def _pairs(evaluation: Evaluation | None) -> tuple[Pair, ...]:
    if evaluation is None:
        return ()
    return tuple(
        Pair(
            truth=evaluation.classes[row],
            predicted=evaluation.classes[column],
            count=f"{each:,}",
            share=percent(each / sum(evaluation.confusion[row])),
        )
        for each, row, column in _list_confusions(evaluation)[:MOST_PAIRS]
    )


def _pairs_note(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    more = len(_list_confusions(evaluation)) - MOST_PAIRS
    note = f"{count(more, 'rarer confusion')} not shown." if more > 0 else ""
    if len(evaluation.classes) > MOST_MATRIX:
        note = (
            f"A matrix of {len(evaluation.classes):,} classes would be unreadable, "
            f"so it is left out. {note}"
        )
    return note.strip()


def _mistakes(facts: ReportFacts) -> tuple[MistakeCard, ...]:
    evaluation = facts.evaluation
    cards = []
    for mistake in evaluation.worst[:MOST_PICTURES] if evaluation else ():
        source = (
            mistake.picture
            if mistake.picture.startswith("data:")
            else facts.pictures.get(mistake.picture)
        )
        picture, lacks = pictures.check_picture(source) if source else ("", "it was not saved")
        cards.append(
            MistakeCard(
                item=mistake.item,
                truth=mistake.truth,
                predicted=mistake.predicted,
                probability=percent(mistake.probability),
                picture=picture,
                lacks=lacks,
            )
        )
    return tuple(cards)


def _mistakes_note(evaluation: Evaluation | None) -> str:
    if evaluation is None:
        return ""
    wrong = evaluation.items - evaluation.correct
    if not wrong:
        return "No mistakes."
    shown = min(len(evaluation.worst), MOST_PICTURES)
    if not shown:
        return f"{count(wrong, 'item')} wrong; no examples were saved."
    if wrong == 1:
        return "The only mistake."
    if shown == wrong:
        return f"All {count(wrong, 'mistake')}, the most confident first."
    return f"The {shown} most confident of {count(wrong, 'mistake')}."


def _commands(facts: ReportFacts) -> str:
    """Return the commands that reproduce the result."""
    code, run = facts.code, facts.run
    words = shlex.join(code.command if code and code.command else run.command)
    lines = [f"git checkout {code.commit}"] if code and code.commit else []
    lines += ["labctl up", f"labctl run -- {words}", "labctl pull", "labctl eval", "labctl report"]
    return "\n".join(lines)


def _warning(facts: ReportFacts) -> str:
    """Warn about uncommitted changes, which prevent an exact reproduction."""
    code = facts.code
    if code is None or not code.dirty:
        return ""
    names = ", ".join(code.changed[:8]) + (", …" if len(code.changed) > 8 else "")
    return f"The code had changes that are not in this commit: {names}"
