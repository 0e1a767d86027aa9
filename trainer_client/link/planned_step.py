"""A step as a rank hands it in, and as it comes back planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from core_attention.arrays import Int64Array
from core_attention.ca_task import MaskKind, TaskTable
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import Plan
from core_attention.step_lane import placed
from distca.contract.codec import rank_manifest_from_proto, rank_manifest_to_proto
from distca.v1 import jobs_pb2

HandedInStep = jobs_pb2.HandIn
"""A manifest that the control plane may have to get again."""


def numbered(handed_in: HandedInStep, step: int) -> HandedInStep:
    """The same, now that its step has a number."""
    manifest, turns = rank_manifest_from_proto(handed_in.manifest), handed_in.joining.turns
    result = HandedInStep(
        manifest=rank_manifest_to_proto(placed(manifest, step, turns)),
        forward_only=handed_in.forward_only,
    )
    result.joining.sequence, result.joining.numbered = handed_in.joining.sequence, True
    return result


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step's plan as this rank needs it.

    Attributes:
        plan: the rank's slice.
        forward_only: the step has no backward pass.
        first_tick: ``[n_documents]`` of the slice: the first tick of the document's lane that runs
            under this plan; earlier ones are complete on every rank with rows of the document.
        sequence: which of the rank's hand-ins it is, if it was one without a number; else 0.
        at_home: no plan has come: the slice has the rank's documents, and no servers.
    """

    plan: Plan
    forward_only: bool
    first_tick: Int64Array
    sequence: int = 0
    at_home: bool = False

    @classmethod
    def of_own(cls, handed_in: HandedInStep, n_ranks: int, mask: MaskKind) -> PlannedStep | None:
        """The step as this rank has handed it in; None unless each document is one segment."""
        own, nothing = rank_manifest_from_proto(handed_in.manifest), np.empty(0, dtype=np.int64)
        n_nano_batches = own.n_nano_batches
        if not np.array_equal(own.columns.length, own.columns.document_length):
            return None
        if len(own.columns.length):
            ranks = [RankManifest(own.step, rank, [[]] * n_nano_batches) for rank in range(n_ranks)]
            ranks[own.rank] = own
            manifest = Manifest.merge(ranks, n_ranks)
        else:
            columns: Any = [nothing] * 8
            manifest = Manifest(own.step, n_ranks, n_nano_batches, *columns)
        tasks = TaskTable(*[nothing] * 4, mask=mask)
        plan = Plan(
            manifest=manifest,
            epoch=0,
            servers=(),
            forward=tasks,
            backward=tasks,
            mask=mask,
            planner="",
            reason="computed at home",
            tasks_are_valid=True,
        )
        first_tick = np.zeros(manifest.n_documents, np.int64)
        sequence = handed_in.joining.sequence
        return cls(plan, handed_in.forward_only, first_tick, sequence, at_home=True)

    def first_ticks(self, rank: int, n_nano_batches: int) -> tuple[int, ...]:
        """The first tick, by nano-batch, of its lane in which rows of ``rank`` are exchanged;
        beyond all ticks if it has none there."""
        manifest = self.plan.manifest
        first = np.full(n_nano_batches, np.iinfo(np.int64).max)
        held = manifest.held
        mine = np.unique(held.document[held.rank == rank])
        np.minimum.at(first, manifest.document_nano_batch[mine], self.first_tick[mine])
        return tuple(first.tolist())
