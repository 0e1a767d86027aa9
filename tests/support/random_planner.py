"""A planner for tests: any valid plan, drawn from the manifest's own content."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from control_plane.planner import full
from control_plane.planner.forecast import forecast
from control_plane.planner.planning import Planner, PlanningOptions, PlanningServer
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.manifest import Manifest
from core_attention.plan import Plan
from core_attention.shape import AttentionShape


def _planner(seed_of: Callable[[Manifest], int]) -> Planner:
    """Cuts every segment at random places, and gives every piece to a random server."""

    def plan(
        manifest: Manifest,
        servers: Sequence[PlanningServer],
        shape: AttentionShape,
        options: PlanningOptions,
        *,
        epoch: int = 0,
    ) -> Plan:
        rng = np.random.default_rng([seed_of(manifest), int(manifest.document_length.sum())])
        tables = {
            phase: replace(random_tasks(manifest, len(servers), rng), mask=shape.mask)
            for phase in Phase
        }
        foresee = forecast if shape.mask is MaskKind.CAUSAL else full.forecast
        forecasts = {
            phase: foresee(manifest, tables[phase], servers, shape, phase) for phase in Phase
        }
        return Plan(
            manifest=manifest,
            epoch=epoch,
            servers=tuple(server.server for server in servers),
            forward=tables[Phase.FORWARD],
            backward=tables[Phase.BACKWARD],
            mask=shape.mask,
            planner="random",
            reason="random pieces on random servers",
            forward_forecast=forecasts[Phase.FORWARD],
            backward_forecast=forecasts[Phase.BACKWARD],
        )

    return plan


plan = _planner(lambda manifest: manifest.step)
"""Draws anew in every step."""

steady_plan = _planner(lambda manifest: 0)
"""Plans the same documents alike in every step."""


def random_tasks(manifest: Manifest, n_servers: int, rng: np.random.Generator) -> TaskTable:
    """The documents, cut at random places, on random servers."""
    rows = []
    for document, offset, length in zip(
        manifest.segment_document.tolist(),
        manifest.segment_offset.tolist(),
        manifest.segment_length.tolist(),
        strict=True,
    ):
        n_cuts = int(rng.integers(0, min(length, 4)))
        inner: Sequence[int] = (
            rng.choice(np.arange(1, length), n_cuts, replace=False).tolist() if n_cuts else []
        )
        cuts = [0, *sorted(int(cut) for cut in inner), length]
        for begin, end in itertools.pairwise(cuts):
            rows.append((document, offset + begin, offset + end, int(rng.integers(n_servers))))
    document, q_begin, q_end, server = np.array(rows, dtype=np.int64).T
    return TaskTable(document, q_begin, q_end, server)
