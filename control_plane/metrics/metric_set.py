"""Metrics that share a first label, whose series go together when what the label names is gone."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics import MetricWrapperBase

PREFIX = "distca_control_plane"


class MetricSet:
    """Makes gauges and counters of one first label.

    Args:
        registry: where they appear.
        label: the first label of all of them, for example ``"job_name"``.
    """

    def __init__(self, registry: CollectorRegistry, label: str) -> None:
        self._registry = registry
        self._label = label
        self._metrics: list[MetricWrapperBase] = []

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        """A gauge with ``labels`` behind the first one."""
        gauge = Gauge(f"{PREFIX}_{name}", text, (self._label, *labels), registry=self._registry)
        self._metrics.append(gauge)
        return gauge

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        """A counter with ``labels`` behind the first one."""
        counter = Counter(f"{PREFIX}_{name}", text, (self._label, *labels), registry=self._registry)
        self._metrics.append(counter)
        return counter

    def forget(self, value: str) -> None:
        """Removes every series whose first label is ``value``."""
        for metric in self._metrics:
            metric.remove_by_labels({self._label: value})
