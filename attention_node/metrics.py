"""Prometheus metrics of an attention node."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from attention_node.executor import KernelCall

_CALL_SECONDS_BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
_CALL_TASKS_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


class NodeMetrics:
    """What one node has run.

    Args:
        registry: of the process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._kernel_seconds = Histogram(
            "distca_attention_node_kernel_call_seconds",
            "Seconds of one fused kernel call.",
            ["phase"],
            buckets=_CALL_SECONDS_BUCKETS,
            registry=registry,
        )
        self._call_tasks = Histogram(
            "distca_attention_node_kernel_call_tasks",
            "CA-tasks fused into one kernel call.",
            ["phase"],
            buckets=_CALL_TASKS_BUCKETS,
            registry=registry,
        )
        self._qk_pairs = Counter(
            "distca_attention_node_qk_pairs",
            "Query-key pairs computed.",
            ["phase"],
            registry=registry,
        )
        self._steps = Counter(
            "distca_attention_node_steps",
            "Steps of which every tick on this server is over.",
            registry=registry,
        )
        self._registry = registry

    def kernel_called(self, call: KernelCall) -> None:
        """Counts one kernel call."""
        self._kernel_seconds.labels(call.phase).observe(call.seconds)
        self._call_tasks.labels(call.phase).observe(call.tasks)
        self._qk_pairs.labels(call.phase).inc(call.qk_pairs)

    def step_finished(self) -> None:
        """Counts one finished step."""
        self._steps.inc()

    def watch(self, *, queued_parts: Callable[[], int], open_ticks: Callable[[], int]) -> None:
        """Exports the node's queues, read at each scrape."""
        for name, text, read in (
            ("ready_parts", "Groups of tasks that are ready and not yet run.", queued_parts),
            ("open_ticks", "Ticks of which some messages have arrived.", open_ticks),
        ):
            gauge = Gauge(f"distca_attention_node_{name}", text, registry=self._registry)
            gauge.set_function(read)
