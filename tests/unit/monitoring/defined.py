"""Every metric that the code defines, by the section of ``docs/metrics.md`` that lists it."""

from __future__ import annotations

import time
from typing import Any

import torch
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from attention_node.executor import Executor
from attention_node.metrics import NodeMetrics
from control_plane.metrics.metrics import Metrics
from control_plane.service.refusals import Refusals
from core_attention.kernels.cpu import CpuKernel
from data_plane.buffer_pool import BufferPool
from data_plane.metrics import DataPlaneMetrics
from distca.metric_table import ReadTable
from distca.process.certificates import watch_certificates
from distca.process.monitoring import process_registry
from tests.unit.monitoring.table import Row
from trainer_client.metrics import TrainerMetrics


def defined_metrics() -> dict[str, dict[str, Row]]:
    """Metrics by section and name."""
    executor = Executor(CpuKernel(), torch.device("cpu"))
    try:
        server, data = CollectorRegistry(), CollectorRegistry()
        trainer, control_plane = CollectorRegistry(), CollectorRegistry()
        NodeMetrics(server, "node-0").watch(executor, lambda: 0)
        DataPlaneMetrics(data).watch_pool("messages", BufferPool())
        TrainerMetrics(trainer, "job", 0)
        Metrics(control_plane)
        Refusals(control_plane, time.monotonic)
        certificates = CollectorRegistry()
        watch_certificates(certificates)
        return {
            "Control plane": rows_of(control_plane),
            "Attention servers": rows_of(server),
            "Trainers": rows_of(trainer),
            "Data plane": rows_of(data),
            "Certificates": rows_of(certificates),
            "Every process": rows_of(process_registry("trainer")),
        }
    finally:
        executor.close()


def rows_of(registry: CollectorRegistry) -> dict[str, Row]:
    """What a registry would export, labels without samples included."""
    rows = {}
    collectors: Any = registry._collector_to_names
    for collector in collectors:
        if isinstance(collector, ReadTable):
            # Of some there is nothing to read here.
            for read in collector.table.rows():
                kind = read.kind.__name__.lower()
                rows[read.name] = Row(read.name, kind, read.label_names, read.text)
            continue
        for family in collector.collect():
            labels = getattr(collector, "_labelnames", None)
            if labels is None or family.type == "info":
                # A collector of the library, or an info, whose labels are its text: with samples.
                labels = tuple(sorted(family.samples[0].labels))
            row = Row(_exported_name(family), _exported_type(family), labels, family.documentation)
            rows[row.name] = row
    return rows


def _exported_name(family: Metric) -> str:
    suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
    return family.name + suffix


def _exported_type(family: Metric) -> str:
    return "gauge" if family.type == "info" else family.type
