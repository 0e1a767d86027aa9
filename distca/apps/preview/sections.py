"""Headings, texts and tables of previews; the terminal and the page show the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from distca.apps.simulator.comparison import BASELINES, Comparison
from distca.apps.simulator.disaggregated import DisaggregatedStep
from distca.apps.simulator.offline import OfflineBatch, what_bounds
from distca.apps.simulator.overlap import Hiding, head_groups_that_pay
from distca.apps.simulator.schedules import EVEN, IDLE_AWARE, ScheduleComparison, ScheduleTimes
from distca.apps.simulator.traffic import server_endpoints

_MILLI, _GIGA = 1e3, 1e9
_SHOWN_SERVERS = 16


@dataclass(frozen=True)
class PageSection:
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


Column = Callable[[Comparison], str]

_METHODS = (
    "Step times: 1.000 is a step whose attention is perfectly spread. plain packing: documents as "
    "they come. re-packing: whole documents arranged so that ranks take equal time. "
    "WLB-ideal-like: the best of re-packing and sharing each document among ranks (context "
    "parallelism), which waits for its gather. CAD: this project."
)

_WAYS = (
    "Share of the step that messages add. One lane: a rank computes one nano-batch at a time, as "
    "attached models do. Remote first: servers compute other ranks' tasks before their own, as "
    "they do; own tasks first is for comparison. head_groups: an option of the job."
)

CAD = "CAD"


def relative_steps(comparison: Comparison) -> dict[str, float]:
    """Step seconds of each way / those of perfect balance, by its name."""
    seconds = {**comparison.baseline_seconds, CAD: comparison.disaggregated.seconds}
    return {name: value / comparison.balanced_seconds for name, value in seconds.items()}


def comparison_section(
    title: str,
    columns: Sequence[str],
    comparisons: Sequence[Comparison],
    notes: Sequence[str] = (),
    more: Sequence[Sequence[str]] = (),
) -> PageSection:
    """Step times in all ways, in columns.

    Args:
        title: heading.
        columns: a name for each comparison.
        comparisons: what is shown.
        notes: what to know of all.
        more: rows that come first, each with its name.
    """
    values: dict[str, Column] = {
        "heaviest document / mean rank": lambda c: f"{c.heaviest_document_share:.2f}",
        "balanced step": lambda c: f"{c.balanced_seconds:.3f} s",
        **{f"step: {name}": _relative(name) for name in (*BASELINES, CAD)},
        "CAD waits for links": lambda c: f"{c.exposed_share:.1%}",
        "imbalance of the worst tick, planned": lambda c: f"{c.disaggregated.imbalance:.3f}",
        "GB moved a layer": lambda c: f"{c.disaggregated.moved_bytes / _GIGA:.2f}",
    }
    rows = [(name, *(value(c) for c in comparisons)) for name, value in values.items()]
    return PageSection(title, (*notes, _METHODS), ("", *columns), [*more, *rows])


def overlap_section(
    columns: Sequence[str], shares: Sequence[Mapping[Hiding | str, float]]
) -> PageSection:
    """Shows the share that each way of hiding messages leaves exposed, and which groups pay."""
    rows = [(str(way), *(f"{each[way]:.1%}" for each in shares)) for way in shares[0]]
    pay = ("head_groups that pay in one lane", *(str(head_groups_that_pay(s)) for s in shares))
    return PageSection("Ways to hide messages", (_WAYS,), ("", *columns), [*rows, pay])


def _relative(name: str) -> Column:
    return lambda comparison: f"{relative_steps(comparison)[name]:.3f}"


def plan_sections(batches: Sequence[OfflineBatch], notes: Sequence[str]) -> list[PageSection]:
    """The batches; of the first one, what bounds it, why the planner stopped, and its servers.
    ``notes``: what to know of all batches."""
    first = batches[0]
    plan = first.plan
    own = [
        ("documents", *(str(batch.plan.manifest.n_texts) for batch in batches)),
        (
            "imbalance of the step, plain packing",
            *(f"{batch.home_imbalance:.2f}" for batch in batches),
        ),
        ("tolerance", *(str(batch.plan.verdict or "unknown") for batch in batches)),
    ]
    columns = [f"batch {index}" for index in range(len(batches))]
    return [
        comparison_section("Batches", columns, [b.comparison for b in batches], notes, own),
        PageSection("What bounds batch 0", (what_bounds(first),)),
        PageSection(
            f"Why the planner ({plan.planner}) stopped, batch 0",
            (f"{plan.reason}. (Imbalances are of one layer, of the worst nano-batch.)",),
        ),
        PageSection(_servers_title(first), (), *_server_table(first)),
    ]


def _servers_title(batch: OfflineBatch) -> str:
    n_servers = len(batch.plan.servers)
    which = f"the {_SHOWN_SERVERS} busiest of {n_servers}" if n_servers > _SHOWN_SERVERS else "all"
    return f"Servers of batch 0, {which} (one layer, forward + backward)"


def _server_table(batch: OfflineBatch) -> tuple[Sequence[str], list[Sequence[str]]]:
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


def _server_bytes(batch: OfflineBatch) -> tuple[Int64Array, Int64Array]:
    """``[n_servers]`` bytes into and out of each server's process in a layer."""
    at = server_endpoints(batch.plan)
    return batch.moved_bytes.sum(axis=0)[at], batch.moved_bytes.sum(axis=1)[at]


ScheduleValue = tuple[str, Callable[[ScheduleTimes], str]]
"""A row's name and what it shows of a schedule."""


def schedule_section(comparison: ScheduleComparison) -> PageSection:
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
    return PageSection(
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
