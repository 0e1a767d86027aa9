"""What previews say, as headings, texts and tables; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from distca.simulator.comparison import Comparison
from distca.simulator.disaggregated import DisaggregatedStep
from distca.simulator.offline import PlannedBatch, what_bounds
from distca.simulator.schedules import EVEN, IDLE_AWARE, ScheduleComparison, ScheduleTimes
from distca.simulator.traffic import server_endpoints

_MILLI, _GIGA = 1e3, 1e9
_SHOWN_SERVERS = 16


@dataclass(frozen=True)
class Section:
    """A heading, paragraphs and a table.

    Attributes:
        title: heading.
        paragraphs: plain texts.
        head: column names; empty without a table.
        rows: cells as texts.
    """

    title: str
    paragraphs: Sequence[str] = ()
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()


def plan_sections(batches: Sequence[PlannedBatch], *notes: str) -> list[Section]:
    """The batches; of the first one, what bounds it, why the planner stopped, and its servers.
    ``notes``: what to know of all batches."""
    first = batches[0]
    plan = first.plan
    return [
        Section(
            "Batches (step times: 1.000 is a step whose attention is perfectly spread)",
            notes,
            *_batch_table(batches),
        ),
        Section("What bounds batch 0", (what_bounds(first),)),
        Section(
            f"Why the planner ({plan.planner}) stopped, batch 0",
            (f"{plan.reason}. (Imbalances are of one layer, of the worst nano-batch.)",),
        ),
        Section(_servers_title(first), (), *_server_table(first)),
    ]


def _batch_table(batches: Sequence[PlannedBatch]) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Batches in columns: there are few of them, and their names are short."""
    values: dict[str, Callable[[PlannedBatch], str]] = {
        "documents": lambda b: str(b.plan.manifest.n_texts),
        "heaviest document / mean rank": lambda b: f"{b.heaviest_document_share:.2f}",
        "imbalance of the step, plain packing": lambda b: f"{b.home_imbalance:.2f}",
        "imbalance of the worst tick, planned": lambda b: f"{b.planned_imbalance:.3f}",
        "tolerance": lambda b: str(b.plan.verdict or "unknown"),
        "GB moved a layer": lambda b: f"{b.moved_bytes.sum() / _GIGA:.2f}",
        "balanced step": lambda b: f"{b.balanced_seconds:.3f} s",
        "step: plain packing": lambda b: _relative(b, b.plain_seconds),
        "step: re-packing documents": lambda b: _relative(b, b.repacked_seconds),
        "step: + context parallel": lambda b: _relative(b, b.context_parallel_seconds),
        "step: + gather hidden, 1.2x tokens": lambda b: _relative(b, b.hidden_gather_seconds),
        "step: CAD": lambda b: _relative(b, b.disaggregated_seconds),
        "CAD waits for links": lambda b: f"{b.exposed_seconds / b.disaggregated_seconds:.1%}",
    }
    head = ("", *(f"batch {index}" for index in range(len(batches))))
    return head, [(name, *(value(batch) for batch in batches)) for name, value in values.items()]


def _relative(batch: PlannedBatch, seconds: float) -> str:
    return f"{seconds / batch.balanced_seconds:.3f}"


def _servers_title(batch: PlannedBatch) -> str:
    n_servers = len(batch.plan.servers)
    which = f"the {_SHOWN_SERVERS} busiest of {n_servers}" if n_servers > _SHOWN_SERVERS else "all"
    return f"Servers of batch 0, {which} (one layer, forward + backward)"


def _server_table(batch: PlannedBatch) -> tuple[Sequence[str], list[Sequence[str]]]:
    head = (
        "server",
        "ms before",
        "ms planned",
        "/ mean",
        "forward tasks",
        "backward tasks",
        "GB in",
        "GB out",
    )
    plan = batch.plan
    tasks = [np.bincount(plan.tasks(phase).server, minlength=len(plan.servers)) for phase in Phase]
    received, sent = _server_bytes(batch)
    mean = batch.after_seconds.mean()
    rows: list[Sequence[str]] = []
    for at in np.argsort(-batch.after_seconds, kind="stable")[:_SHOWN_SERVERS].tolist():
        rank = plan.servers[at].in_place_rank
        rows.append(
            (
                plan.servers[at].server_id,
                "-" if rank is None else f"{batch.before_seconds[rank] * _MILLI:.2f}",
                f"{batch.after_seconds[at] * _MILLI:.2f}",
                f"{batch.after_seconds[at] / mean:.3f}",
                str(tasks[0][at]),
                str(tasks[1][at]),
                f"{received[at] / _GIGA:.3f}",
                f"{sent[at] / _GIGA:.3f}",
            )
        )
    return head, rows


def _server_bytes(batch: PlannedBatch) -> tuple[Int64Array, Int64Array]:
    """``[n_servers]`` bytes into and out of each server's process in a layer."""
    at = server_endpoints(batch.plan)
    return batch.moved_bytes.sum(axis=0)[at], batch.moved_bytes.sum(axis=1)[at]


_METHODS = (
    "plain packing: documents as they come. re-packing: whole documents arranged so that ranks "
    "take equal time. WLB-ideal-like: the best of re-packing and sharing each document among ranks "
    "(context parallelism), which waits for its gather. hidden gather: the same if the gather ran "
    "entirely behind compute. 1.2x tokens: a rank may hold 20% more tokens, with the memory for "
    "them. CAD: this project."
)


def simulation_sections(comparisons: Sequence[Comparison], *notes: str) -> list[Section]:
    """Step times of all methods, and what disaggregation gains over each baseline. ``notes``: what
    to know of all."""
    columns = [f"{comparison.n_gpus} GPUs" for comparison in comparisons]
    baselines = list(comparisons[0].baseline_seconds)
    methods = list(comparisons[0].disaggregated)
    steps = [
        (name, *(f"{relative_step(c, name):.3f}" for c in comparisons))
        for name in (*baselines, *methods)
    ]
    steps.append(("balanced step", *(f"{c.balanced_seconds:.3f} s" for c in comparisons)))
    details = []
    for name in methods:
        own = [comparison.disaggregated[name] for comparison in comparisons]
        details += [
            (f"{name}: {baseline}", *(f"{c.speedup(name, baseline):.2f}x" for c in comparisons))
            for baseline in baselines
        ]
        details += [
            (f"{name}: waits for links", *(f"{s.exposed_seconds / s.seconds:.1%}" for s in own)),
            (f"{name}: worst imbalance", *(f"{s.imbalance:.3f}" for s in own)),
            (f"{name}: GB a layer", *(f"{s.moved_bytes / _GIGA:.1f}" for s in own)),
        ]
    return [
        Section("Step time / perfect balance", (*notes, _METHODS), ("method", *columns), steps),
        Section("Speed-up over, and details", (), ("method: over", *columns), details),
    ]


ScheduleValue = tuple[str, Callable[[ScheduleTimes], str]]
"""A row's name and what it shows of a schedule."""


def schedule_section(comparison: ScheduleComparison) -> Section:
    """Step times of every schedule, without disaggregation and with it; schedules in columns."""
    unit = comparison.balanced_1f1b_seconds
    values: list[ScheduleValue] = [
        ("plain packing", lambda t: f"{t.plain_seconds / unit:.3f}"),
        ("re-packed", lambda t: f"{t.repacked_seconds / unit:.3f}"),
        ("equal", lambda t: f"{t.balanced_seconds / unit:.3f}"),
        *_pooled_values(EVEN, unit),
        *_pooled_values(IDLE_AWARE, unit),
        ("microbatches in flight", lambda t: f"{t.in_flight:g}"),
    ]
    return Section(
        f"Pipeline schedules on {comparison.n_gpus} GPUs",
        (
            f"Step time / 1F1B with perfectly equal microbatches ({unit:.3f} s). plain packing: "
            "documents as they come; re-packed: whole documents arranged so that microbatches take "
            "equal time; equal: what a perfect packer would reach; CAD, even: attention of all "
            "stages spread evenly over all ranks, as in the paper; CAD, idle-aware: ranks whose "
            "stage idles, or has less to do, take more of it. Microbatches in flight: the most "
            f"whose activations a rank keeps; {comparison.in_flight_limit:g} are allowed.",
            *(f"Left out: {why}." for why in comparison.left_out),
        ),
        ("", *(times.name for times in comparison.times)),
        [(name, *(value(times) for times in comparison.times)) for name, value in values],
    )


def _pooled_values(spread: str, unit: float) -> list[ScheduleValue]:
    """Rows of a schedule's steps with attention spread in one way."""

    def step(times: ScheduleTimes) -> DisaggregatedStep:
        return times.pooled[spread]

    return [
        (f"CAD, {spread}", lambda t: f"{step(t).seconds / unit:.3f}"),
        ("  waits for links", lambda t: f"{step(t).exposed_seconds / step(t).seconds:.1%}"),
        ("  GPUs idle", lambda t: f"{step(t).idle_share:.0%}"),
    ]


def relative_step(comparison: Comparison, name: str) -> float:
    """Step seconds of baseline or method ``name`` / those of perfect balance."""
    if name in comparison.disaggregated:
        return comparison.disaggregated[name].seconds / comparison.balanced_seconds
    return comparison.baseline_seconds[name] / comparison.balanced_seconds
