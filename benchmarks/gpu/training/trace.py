"""Where the device's time of one step goes, from PyTorch's profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch

CATEGORIES = (
    ("nccl", ("nccl",)),
    ("attention", ("flash", "FlashAttention", "kernel_cutlass")),
    ("gradient sums", ("_add_task_gradients", "_row_dots")),
    ("matrix products", ("gemm", "nvjet", "cutlass", "cublas", "sm90_xmma")),
    ("gather and scatter", ("index", "gather", "scatter", "_pack", "_unpack")),
    ("copies", ("Memcpy", "memcpy", "copy_kernel", "CatArray")),
    ("fills", ("Memset", "memset", "FillFunctor")),
    ("optimiser", ("multi_tensor", "FusedAdam", "fused_adam")),
)
"""By the first name found in a kernel's; whatever has none is elementwise."""

Interval = tuple[float, float, str]
"""Begin and end in seconds, and a kernel's name."""


def traced(run: Callable[[], None]) -> dict[str, Any]:
    """Runs a step under the profiler; returns seconds by category, the device's idle time and its
    longest gaps."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        run()
        torch.cuda.synchronize()
    events = profiler.profiler.kineto_results.events()
    on_device = [
        (
            e.start_ns() / 1e9,
            (e.start_ns() + e.duration_ns()) / 1e9,
            str(e.name()),
            int(e.device_resource_id()),
        )
        for e in events
        if str(e.device_type()).endswith("CUDA") and e.duration_ns() > 0 and not _is_range(e)
    ]
    return {**summarise(event[:3] for event in on_device), **compact(on_device)}


def summarise(intervals: Iterable[Interval]) -> dict[str, Any]:
    """Seconds by category (overlapping kernels count twice), and of the device as a whole."""
    ordered = sorted(intervals)
    if not ordered:
        return {}
    by_category: defaultdict[str, float] = defaultdict(float)
    by_name: defaultdict[str, float] = defaultdict(float)
    for begin, end, name in ordered:
        by_category[category_of(name)] += end - begin
        by_name[name[:80]] += end - begin
    first, busy_until = ordered[0][0], ordered[0][0]
    busy, before = 0.0, "start"
    gaps: list[tuple[float, float, str, str]] = []
    for begin, end, name in ordered:
        if begin > busy_until:
            gaps.append((begin - busy_until, busy_until - first, before[:60], name[:60]))
        busy += max(0.0, end - max(begin, busy_until))
        if end > busy_until:
            busy_until, before = end, name
    return {
        "seconds": busy_until - first,
        "busy_seconds": busy,
        "idle_seconds": busy_until - first - busy,
        "n_gaps_over_100us": sum(gap[0] > 1e-4 for gap in gaps),
        "by_category": dict(sorted(by_category.items(), key=lambda item: -item[1])),
        "top_kernels": dict(sorted(by_name.items(), key=lambda item: -item[1])[:25]),
        "longest_gaps": sorted(gaps, reverse=True)[:12],
    }


def compact(events: Iterable[tuple[float, float, str, int]]) -> dict[str, Any]:
    """All kernels in few bytes: names, and (begin, length in microseconds, name, stream) each."""
    names: dict[str, int] = {}
    ordered = sorted(events)
    first = ordered[0][0] if ordered else 0.0
    rows = [
        (
            round((begin - first) * 1e6),
            round((end - begin) * 1e6),
            names.setdefault(name[:60], len(names)),
            stream,
        )
        for begin, end, name, stream in ordered
    ]
    return {"names": list(names), "kernels": rows}


def category_of(name: str) -> str:
    """The category of a kernel's name."""
    for category, parts in CATEGORIES:
        if any(part in name for part in parts):
            return category
    return "elementwise"


def _is_range(event: Any) -> bool:
    """Whether an event is an annotation that spans kernels, not a kernel."""
    name = str(event.name())
    return name.startswith(("FSDP::", "ProfilerStep", "Optimizer.", "nccl:", "## "))
