"""Compare several runs by what this machine knows about them, and write that as one page.

As for a report, only pulled files, evaluations and the ledger are used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from labctl.errors import UsageError
from labctl.events import Note, Step
from labctl.insight.compare.comparison import MOST_RUNS, ComparisonResult, compare_runs
from labctl.insight.compare.page import build_comparison_page
from labctl.insight.report.document import DocumentForm, Report, write_document
from labctl.insight.report.facts import ReportFacts
from labctl.insight.report.page import build_page
from labctl.insight.report.render import render
from labctl.insight.run_report import collect_facts
from labctl.runs import runs
from labctl.servers.context import LabContext
from labctl.shell import command
from labctl.text import count_text

NAME = "comparison"
TEMPLATE = "comparison.html.j2"


def compare(context: LabContext, run_ids: Sequence[str]) -> ComparisonResult:
    """Compare two to MOST_RUNS pulled runs.

    UsageError for another number or a run named twice; NotFoundError if one was not pulled.
    """
    return compare_runs(_collect(context, run_ids))[0]


def write_comparison(
    context: LabContext,
    run_ids: Sequence[str],
    out: Path | None = None,
    *,
    form: DocumentForm | None = None,
    version: str = "",
) -> Report:
    """Write the comparison of runs to `out`, else into the directory of the first one.

    Slides also present the first run, as its own slides do.
    """
    form = form or DocumentForm()
    context.reporter.emit(Step(name=form.step))
    facts = _collect(context, run_ids, with_text=form.slides)
    comparison, charts = compare_runs(facts)
    page = build_comparison_page(
        context.config.name, comparison, charts, made_at=time.time(), labctl=version
    )
    templates = context.paths.data_dir / "templates" / "report"
    if form.slides:
        text = render(build_page(facts[0]), templates, form.template, page)
    else:
        text = render(page, templates, TEMPLATE)
    first = facts[0].run.id
    file = out or context.config.root / "runs" / first / form.name_file(NAME)
    size = write_document(f"{text}\n", file, form)
    context.reporter.emit(Step(name=form.step, done=True))
    for note in comparison.notes:
        context.reporter.emit(Note(text=note, level="warning"))
    lacks = [
        f"{pair.first} and {pair.second} are not compared: {pair.reason}"
        + (f": {pair.hint}" if pair.hint else "")
        for pair in comparison.pairs
        if pair.reason
    ]
    return Report(run=first, file=str(file), bytes=size, lacks=tuple(lacks))


def _collect(
    context: LabContext, run_ids: Sequence[str], *, with_text: bool = False
) -> list[ReportFacts]:
    """Gather the facts of each run; with the student's text for the first one, if `with_text`."""
    require_comparable(context, run_ids)
    return [
        collect_facts(context, run_id, with_text=with_text and not place, besides=run_ids)
        for place, run_id in enumerate(run_ids)
    ]


def require_comparable(context: LabContext, run_ids: Sequence[str]) -> None:
    """UsageError unless there are two to MOST_RUNS different runs."""
    if len(run_ids) < 2:
        for run_id in run_ids:
            runs.find_run(context, run_id)
        recorded = context.state.list_runs(context.lab_id)
        others = [run.id for run in recorded if not run.is_auxiliary and run.id not in run_ids]
        example = [*run_ids, *others][:2]
        if len(example) < 2:
            raise UsageError(
                "labctl compare needs at least two runs",
                why=f"this lab has {count_text(len(example), 'run')}",
                hint="labctl run",
            )
        raise UsageError(
            "labctl compare needs at least two runs",
            why="it shows how they differ",
            hint=f"{command('labctl', 'compare', *example).render()}\nlabctl status --all",
        )
    if len(run_ids) > MOST_RUNS:
        raise UsageError(
            f"{len(run_ids)} runs are too many for one comparison",
            why=f"the curves of more than {MOST_RUNS} in one plot cannot be told apart",
            hint=command("labctl", "compare", *run_ids[:MOST_RUNS]).render(),
        )
    if repeated := next((run for run in run_ids if list(run_ids).count(run) > 1), ""):
        different = list(dict.fromkeys(run_ids))
        enough = command("labctl", "compare", *different).render()
        raise UsageError(
            f"run {repeated} is named twice",
            why="a run does not differ from itself",
            hint=enough if len(different) > 1 else "labctl status --all",
        )
