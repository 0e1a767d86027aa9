"""All methods side by side on the same documents: what ``distca plan`` and ``distca simulate``
show, and what a verdict rests on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import Phase
from distca.apps.simulator.baselines import (
    balanced_seconds,
    best_context_parallel,
    plain_packing,
    repacked,
)
from distca.apps.simulator.disaggregated import DisaggregatedStep, mean, mean_step
from distca.apps.simulator.profile import document_seconds
from distca.apps.simulator.repacking import bins_in_order
from distca.apps.simulator.setup import Setup

PLAIN = "plain packing"
REPACKED = "re-packing"
SHARED = "WLB-ideal-like"

Baseline = Callable[[Setup, Int64Array], float]

BASELINES: Mapping[str, Baseline] = {
    PLAIN: plain_packing,
    REPACKED: repacked,
    SHARED: best_context_parallel,
}
"""Step seconds of everything that disaggregation is compared with, by name."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A step in all ways, or means over several.

    Attributes:
        n_gpus: of the job.
        n_servers: attention servers.
        heaviest_document_share: attention seconds of the heaviest document / those of a mean rank;
            of several steps the most.
        balanced_seconds: perfectly spread attention, nothing moved (with stages: 1F1B).
        attention_share: of that step, 0 to 1.
        baseline_seconds: by the names of :data:`BASELINES`.
        disaggregated: the step under plans.
    """

    n_gpus: int
    n_servers: int
    heaviest_document_share: float
    balanced_seconds: float
    attention_share: float
    baseline_seconds: Mapping[str, float]
    disaggregated: DisaggregatedStep

    @property
    def whole_seconds(self) -> float:
        """Step seconds of whole documents, as they come or re-packed, whichever is faster."""
        return min(self.baseline_seconds[PLAIN], self.baseline_seconds[REPACKED])

    @property
    def exposed_share(self) -> float:
        """Share of the disaggregated step that waits for communication."""
        return self.disaggregated.exposed_seconds / self.disaggregated.seconds

    def speedup(self, baseline: str) -> float:
        """How many times faster the disaggregated step is than ``baseline``."""
        return self.baseline_seconds[baseline] / self.disaggregated.seconds


def compare(
    setup: Setup, lengths: Int64Array, step: DisaggregatedStep, n_servers: int
) -> Comparison:
    """Simulates every baseline on the documents of one step.

    Args:
        setup: what is simulated.
        lengths: documents as they were trained, ``setup.step_tokens`` tokens.
        step: the same documents with disaggregation.
        n_servers: attention servers of it.
    """
    n_bins = setup.n_pipelines * setup.n_microbatches
    bins = bins_in_order(lengths, n_bins, setup.tokens_per_rank, setup.rank_profile)
    of_bin = float((bins.forward_seconds + bins.backward_seconds).mean())
    of_rank = of_bin * setup.n_microbatches
    heaviest = np.sum(
        [document_seconds(setup.rank_profile, lengths, phase) for phase in Phase], axis=0
    ).max()
    balanced = balanced_seconds(setup, lengths)
    return Comparison(
        n_gpus=setup.cluster.n_gpus,
        n_servers=n_servers,
        heaviest_document_share=float(heaviest) / of_rank,
        balanced_seconds=balanced,
        attention_share=of_rank * setup.layers_per_stage / balanced,
        baseline_seconds={name: of(setup, lengths) for name, of in BASELINES.items()},
        disaggregated=step,
    )


def mean_comparison(steps: Sequence[Comparison]) -> Comparison:
    """The means over steps of one job."""
    if not steps:
        raise ValueError("no batches to simulate; give 1 or more")
    return Comparison(
        n_gpus=steps[0].n_gpus,
        n_servers=steps[0].n_servers,
        heaviest_document_share=max(step.heaviest_document_share for step in steps),
        balanced_seconds=mean(step.balanced_seconds for step in steps),
        attention_share=mean(step.attention_share for step in steps),
        baseline_seconds={
            name: mean(step.baseline_seconds[name] for step in steps) for name in BASELINES
        },
        disaggregated=mean_step([step.disaggregated for step in steps]),
    )
