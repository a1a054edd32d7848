"""The input of a report. A value that is None, "" or empty is shown as not measured."""

from __future__ import annotations

import msgspec

from labctl.insight.quantization.measurements import QuantizedModel
from labctl.insight.scalars import Scalars
from labctl.insight.speedup import Speedup
from labctl.insight.telemetry import Sample
from labctl.model import Run, Value
from labctl.runs.evaluation import Evaluation
from labctl.runs.provenance import RunOrigin, ServerHardware


class Checkpoint(Value, frozen=True):
    """A pulled checkpoint, as its manifest describes it."""

    name: str
    step: int
    epoch: int = 0
    metrics: dict[str, float] = msgspec.field(default_factory=dict)


class Bill(Value, frozen=True):
    """Costs of the run and of the lab, in US dollars.

    `lab_complete` is whether all servers of the lab have a price. `idle_share` (0 to 1) is what the
    server's watchdog last reported.
    """

    provider: str = ""
    type: str = ""
    spot: bool = False
    price_usd_per_hour: float | None = None
    run_hours: float | None = None
    run_usd: float | None = None
    lab_usd: float | None = None
    lab_complete: bool = False
    idle_share: float | None = None


class LostServer(Value, frozen=True):
    """A server that was lost during the run. Steps and seconds are None if not measured."""

    at: float
    reason: str = ""
    last_step: float | None = None
    from_step: float | None = None
    took_s: float | None = None


class TextSection(Value, frozen=True):
    """A part of the student's text: its title, "" before the first one, and its HTML.

    The HTML comes from `notes.render_notes` alone, which escapes everything else.
    """

    title: str
    html: str


class ReportFacts(Value, frozen=True):
    """Everything known about one run.

    `reclaims` is None without a ledger of the run, since their number is unknown then. `here` and
    `server` are evaluations by machine; `server_accuracy` is set if only that is known. `pictures`
    are data URIs by the path that the evaluation names. `text` is the student's own.
    `notes` say what could not be read.
    """

    lab: str
    run: Run
    evaluation: Evaluation | None = None
    here: Evaluation | None = None
    server: Evaluation | None = None
    server_accuracy: float | None = None
    scalars: Scalars = Scalars()
    samples: tuple[Sample, ...] = ()
    speedup: Speedup | None = None
    quantization: QuantizedModel | None = None
    checkpoints: tuple[Checkpoint, ...] = ()
    chosen_step: int | None = None
    code: RunOrigin | None = None
    machine: ServerHardware | None = None
    bill: Bill = Bill()
    reclaims: tuple[LostServer, ...] | None = None
    pictures: dict[str, str] = msgspec.field(default_factory=dict)
    text: tuple[TextSection, ...] = ()
    notes: tuple[str, ...] = ()
    made_at: float = 0.0
    labctl: str = ""
