"""All methods side by side on the same documents: what ``distca simulate`` and the paper's table
show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from core_attention.arrays import Int64Array
from distca.simulator.baselines import (
    balanced_seconds,
    best_context_parallel,
    plain_packing,
    repacked,
)
from distca.simulator.disaggregated import (
    DisaggregatedStep,
    Method,
    disaggregated_step,
    mean,
    mean_step,
)
from distca.simulator.errors import InputError
from distca.simulator.packing import as_trained
from distca.simulator.setup import Setup
from distca.simulator.verdict import (
    EXPOSED_TOO_MUCH,
    SLOWER_THAN,
    WORTH_MENTIONING,
    Kind,
    Remedy,
    Verdict,
    shorter_wait,
)

MEMORY_SLACK = 1.2
"""Tokens that a baseline may put on a rank when memory is not held equal, of its even share."""

PLAIN = "plain packing"
REPACKED = "re-packing"
REPACKED_SLACK = "re-packing, 1.2x tokens"
EXPOSED = "WLB-ideal-like"
EXPOSED_SLACK = "WLB-ideal-like, 1.2x tokens"
HIDDEN = "hidden gather"
HIDDEN_SLACK = "hidden gather, 1.2x tokens"

Baseline = Callable[[Setup, Int64Array], float]

BASELINES: Mapping[str, Baseline] = {
    PLAIN: lambda setup, lengths: plain_packing(setup, lengths).seconds,
    REPACKED: lambda setup, lengths: repacked(setup, lengths, 1.0).seconds,
    REPACKED_SLACK: lambda setup, lengths: repacked(setup, lengths, MEMORY_SLACK).seconds,
    EXPOSED: lambda setup, lengths: (
        best_context_parallel(setup, lengths, 1.0, hidden_gather=False).seconds
    ),
    EXPOSED_SLACK: lambda setup, lengths: (
        best_context_parallel(setup, lengths, MEMORY_SLACK, hidden_gather=False).seconds
    ),
    HIDDEN: lambda setup, lengths: (
        best_context_parallel(setup, lengths, 1.0, hidden_gather=True).seconds
    ),
    HIDDEN_SLACK: lambda setup, lengths: (
        best_context_parallel(setup, lengths, MEMORY_SLACK, hidden_gather=True).seconds
    ),
}
"""Step seconds of everything that disaggregation is compared with, by name. Those with context
parallelism take the best split of the ranks into data and context parallelism."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Mean step seconds over batches.

    Attributes:
        n_gpus: of the job.
        balanced_seconds: perfectly spread attention, nothing moved (with stages: 1F1B).
        baseline_seconds: by name of the baseline.
        disaggregated: by name of the method.
    """

    n_gpus: int
    balanced_seconds: float
    baseline_seconds: Mapping[str, float]
    disaggregated: Mapping[str, DisaggregatedStep]

    def speedup(self, method: str, baseline: str) -> float:
        """How many times faster ``method`` is than ``baseline``."""
        return self.baseline_seconds[baseline] / self.disaggregated[method].seconds


def judge_comparisons(
    comparisons: Sequence[Comparison], method: str, remedies: Sequence[Remedy] = tuple(Remedy)
) -> Verdict:
    """The verdict on one method over one or more numbers of GPUs; of what kind it is the largest
    one decides."""
    kinds = [_kind(comparison, method) for comparison in comparisons]
    of_kind = {
        Kind.SLOWER: "CAD is slower than plain packing",
        Kind.LINKS_TOO_SLOW: "The links hold CAD back",
        Kind.LITTLE_TO_GAIN: "There is little to gain from CAD",
        Kind.GAIN: "CAD is worth it",
    }
    sentences = []
    for kind, words in of_kind.items():
        own = [c for c, its in zip(comparisons, kinds, strict=True) if its is kind]
        if own:
            sizes = ", ".join(str(comparison.n_gpus) for comparison in own)
            sentences.append(f"{words} on {sizes} GPUs: {_speedups(own, method)}.")
    if Kind.LINKS_TOO_SLOW in kinds or Kind.SLOWER in kinds:
        sentences.append(shorter_wait(remedies))
    at = max(range(len(comparisons)), key=lambda i: comparisons[i].n_gpus)
    return Verdict(kinds[at], " ".join(sentences))


def _kind(comparison: Comparison, method: str) -> Kind:
    step = comparison.disaggregated[method]
    if comparison.speedup(method, PLAIN) < SLOWER_THAN:
        return Kind.SLOWER
    if step.exposed_seconds / step.seconds > EXPOSED_TOO_MUCH:
        return Kind.LINKS_TOO_SLOW
    if min(comparison.speedup(method, name) for name in (PLAIN, REPACKED)) < WORTH_MENTIONING:
        return Kind.LITTLE_TO_GAIN
    return Kind.GAIN


def _speedups(comparisons: Sequence[Comparison], method: str) -> str:
    def times(baseline: str) -> str:
        return ", ".join(f"{c.speedup(method, baseline):.2f}x" for c in comparisons)

    waits = (c.disaggregated[method] for c in comparisons)
    shares = ", ".join(f"{step.exposed_seconds / step.seconds:.0%}" for step in waits)
    return (
        f"{times(PLAIN)} the speed of plain packing and {times(EXPOSED)} that of the best "
        f"re-packing with context parallelism at equal memory ({EXPOSED}); {shares} of the step "
        "waits for communication"
    )


def compare(
    setup: Setup,
    batches: Sequence[Int64Array],
    methods: Mapping[str, Method],
    baselines: Iterable[str] = tuple(BASELINES),
) -> Comparison:
    """Simulates every baseline and method on every batch, on the same documents: those that the
    method with the most nano-batches trains.

    Args:
        setup: what is simulated.
        batches: documents of each step, ``setup.step_tokens`` tokens each; 1 or more steps.
        methods: ways to disaggregate, by name.
        baselines: names in :data:`BASELINES`.

    Raises:
        InputError: no batches, an unknown baseline, or tokens that do not match.
    """
    if not batches:
        raise InputError("no batches to simulate; give 1 or more")
    unknown = sorted(set(baselines) - set(BASELINES))
    if unknown:
        raise InputError(f"unknown baselines {unknown}; valid are {sorted(BASELINES)}")
    n_parts = max((method.n_parts for method in methods.values()), default=1)
    batches = [
        as_trained(batch, setup.n_pipelines, setup.tokens_per_rank, n_parts) for batch in batches
    ]
    return Comparison(
        n_gpus=setup.cluster.n_gpus,
        balanced_seconds=mean(balanced_seconds(setup, batch) for batch in batches),
        baseline_seconds={
            name: mean(BASELINES[name](setup, batch) for batch in batches) for name in baselines
        },
        disaggregated={
            name: mean_step([disaggregated_step(setup, batch, method) for batch in batches])
            for name, method in methods.items()
        },
    )
