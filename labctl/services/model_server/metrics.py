"""The metrics of the server, in the format of Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from .drift import DriftMonitor

CONTENT_TYPE = CONTENT_TYPE_LATEST
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# Beyond this number of classes there is no series per class: many series overload Prometheus.
MOST_CLASSES = 1000


class Metrics:
    """Counters of one server; `waiting` returns the number of waiting images."""

    def __init__(
        self, classes: tuple[str, ...], watch: DriftMonitor, waiting: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(_LiveMetrics(watch, waiting))
        self._classes = classes if len(classes) <= MOST_CLASSES else ()
        self._watch = watch
        self._requests = self._counter("labctl_requests", "Requests to /predict.", "status")
        self._errors = self._counter("labctl_errors", "Refused or failed requests.", "reason")
        self._predictions = self._counter("labctl_predictions", "Predictions, by class.", "class")
        self._seconds = Histogram(
            "labctl_request_seconds",
            "Seconds from a request to /predict to its answer.",
            buckets=SECONDS,
            registry=self.registry,
        )
        self._batch = Histogram(
            "labctl_batch_images",
            "Images per batch of the model.",
            buckets=SIZES,
            registry=self.registry,
        )
        self._batch_seconds = Histogram(
            "labctl_batch_seconds",
            "Seconds that the model took for a batch.",
            buckets=SECONDS,
            registry=self.registry,
        )

    def _counter(self, name: str, help_text: str, label: str) -> Counter:
        return Counter(name, help_text, [label], registry=self.registry)

    def request(self, status: int, seconds: float, reason: str = "") -> None:
        """Count an answered request; `reason` is set if it was refused or failed."""
        self._requests.labels(str(status)).inc()
        self._seconds.observe(seconds)
        if reason:
            self._errors.labels(reason).inc()

    def batch(self, images: int, seconds: float) -> None:
        self._batch.observe(images)
        self._batch_seconds.observe(seconds)

    def prediction(self, number: int) -> None:
        """Count a prediction, by the number of its class."""
        self._watch.count(number)
        if self._classes:
            self._predictions.labels(self._classes[number]).inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _LiveMetrics(Collector):
    """Metrics that are computed at each request; unknown ones are left out."""

    def __init__(self, watch: DriftMonitor, waiting: Callable[[], int]) -> None:
        self._watch = watch
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "labctl_waiting_images", "Images waiting for the model.", self._waiting()
        )
        drift = self._watch.measure()
        if drift is None:
            return
        help_text = (
            "Population stability index of the predicted classes against the validation set."
        )
        yield GaugeMetricFamily("labctl_prediction_drift", help_text, drift.index)
        help_text = "Value of labctl_prediction_drift to expect by chance alone."
        yield GaugeMetricFamily("labctl_prediction_drift_by_chance", help_text, drift.by_chance)
        help_text = "Number of predictions in labctl_prediction_drift."
        yield GaugeMetricFamily("labctl_prediction_drift_predictions", help_text, drift.predictions)
