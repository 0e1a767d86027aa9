"""Plans of pipelines are those of the plain way: one set of documents after another, each as a step
of its own, on servers that compute beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest

from control_plane.planner.bounds import links_of, n_variants, rules_of
from control_plane.planner.costs import PHASE_INDEX
from control_plane.planner.fleet import Fleet, build_fleet
from control_plane.planner.phase import plan_phase
from control_plane.planner.planning import PlanningOptions, PlanningServer
from control_plane.planner.survey import nano_batches, survey
from control_plane.planner.tasks import write_tasks
from core_attention.arrays import Float64Array
from core_attention.ca_task import Phase
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.pipelining import Pipelining
from tests.service.control_plane.test_slot_plans import TOLERANCE, K, drawn, pipelining, planned
from tests.support.planning_cases import PROFILE, SHAPE, in_place, pool

Task = tuple[int, int, int, int]
"""Document, q_begin, q_end, server."""
Unit = tuple[tuple[int, ...], bool, int]
"""Its slots, whether it is forward, and its half."""


def rank_of(manifest: Manifest, document: int) -> int:
    return int(manifest.segment_rank[manifest.first_segment[document]])


def computed_beside(
    manifest: Manifest, pipes: Pipelining, n_halves: int, n_servers: int
) -> Float64Array:
    """``[n_halves, n_slots, n_servers]`` seconds, halves being equal parts of their microbatch."""
    seconds = np.zeros((n_halves, len(pipes.slots), n_servers))
    for (at, slot), (rank, place) in product(
        enumerate(pipes.slots), enumerate(pipes.pipeline_ranks)
    ):
        action = slot[place]
        if action is None:
            continue
        first = action.microbatch * n_halves
        tokens = sum(
            int(manifest.tokens_per_rank(nano_batch)[rank])
            for nano_batch in range(first, first + n_halves)
        )
        per_token = pipes.seconds(action.stage, action.kind) / pipes.kind_slots[action.kind]
        seconds[:, at, rank] = tokens / n_halves * per_token
    return seconds


def units(manifest: Manifest, pipes: Pipelining, n_halves: int) -> dict[Unit, list[int]]:
    """The documents that run in the same slots, in the order in which they are planned."""
    slots_of: dict[tuple[Phase, int, int], list[int]] = {}
    for at, slot in enumerate(pipes.slots):
        for place, action in enumerate(slot):
            if action is not None and action.kind.attention_phase is not None:
                key = action.kind.attention_phase, place, action.microbatch
                slots_of.setdefault(key, []).append(at)
    together: dict[Unit, list[int]] = {}
    for document, phase in product(range(manifest.n_documents), Phase):
        microbatch, half = divmod(int(manifest.document_nano_batch[document]), n_halves)
        place = pipes.pipeline_ranks[rank_of(manifest, document)]
        slots = tuple(slots_of[phase, place, microbatch])
        together.setdefault((slots, phase is Phase.FORWARD, half), []).append(document)
    return dict(sorted(together.items(), key=lambda item: (item[0][0][0], item[0][0][-1], item[0])))


def alone(manifest: Manifest, documents: Sequence[int]) -> Manifest:
    """A step of one nano-batch of ``documents``, which are numbered anew."""
    held: list[list[Segment]] = [[] for _ in range(manifest.n_ranks)]
    for document in documents:
        length = int(manifest.document_length[document])
        held[rank_of(manifest, document)].append(Segment(document, length, 0, length))
    manifests = [RankManifest(0, rank, [segments]) for rank, segments in enumerate(held)]
    return Manifest.merge(manifests, manifest.n_ranks)


def plan_alone(
    step: Manifest, servers: Sequence[PlanningServer], fleet: Fleet, phase: Phase, ratio: float
) -> tuple[list[Task], float]:
    """Its tasks, and the ratio of their work to that of whole documents."""
    options = PlanningOptions(tolerance=TOLERANCE)
    (batch,) = nano_batches(step, survey(step, fleet))
    cuts, outcome = plan_phase(
        batch.segments,
        batch.home[PHASE_INDEX[phase]],
        fleet,
        rules_of(SHAPE, phase, options),
        links_of(servers, fleet, options),
        TOLERANCE,
        n_variants(len(servers)),
        ratio,
    )
    columns = [np.empty(cuts.n_tasks, dtype=np.int64) for _ in range(4)]
    write_tasks(cuts, batch.segments, fleet, *columns)
    return list(zip(*(column.tolist() for column in columns), strict=True)), outcome.work_ratio


def one_by_one(
    manifest: Manifest, servers: Sequence[PlanningServer], pipes: Pipelining, n_halves: int
) -> tuple[dict[Phase, list[Task]], Float64Array]:
    """The tasks of each phase, and ``[n_halves, n_slots, n_servers]`` seconds."""
    fleet = build_fleet(servers, manifest.n_ranks)
    busy = computed_beside(manifest, pipes, n_halves, len(servers))
    made: dict[Phase, list[Task]] = {phase: [] for phase in Phase}
    ratio: dict[tuple[Phase, int], float] = {}
    for (slots, is_forward, half), documents in units(manifest, pipes, n_halves).items():
        phase = Phase.FORWARD if is_forward else Phase.BACKWARD
        base = np.zeros((2, len(servers)))
        base[PHASE_INDEX[phase]] = busy[half, slots].sum(axis=0) / pipes.layers[0]
        based = fleet._replace(base=base, is_based=True)
        expected = ratio.get((phase, half), 0.0)
        step = alone(manifest, documents)
        tasks, ratio[phase, half] = plan_alone(step, servers, based, phase, expected)
        for document, begin, end, server in tasks:
            seconds = float(PROFILE.seconds(end - begin, end, phase))
            busy[half, slots, server] += seconds * pipes.layers[0] / len(slots)
            made[phase].append((documents[document], begin, end, server))
    return made, busy


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble", "same-phase"])
@pytest.mark.parametrize(
    ("n_halves", "evenly", "n_pipelines", "n_pool"),
    [(1, True, 1, 1), (2, True, 2, 0), (2, True, 1, 2), (2, False, 2, 0)],
)
def test_plans_are_those_of_one_unit_after_another(
    name: str, n_halves: int, evenly: bool, n_pipelines: int, n_pool: int
) -> None:
    pipes = pipelining(name, 3, 4, n_pipelines)
    # Seconds are added up in another order here. In this draw no choice depends on the last bit.
    manifest = drawn(pipes, 32 * K, 6, n_halves, evenly=evenly)
    servers = [*in_place(manifest.n_ranks), *pool(n_pool)]
    plan, slots = planned(manifest, servers, pipes)
    made, busy = one_by_one(manifest, servers, pipes, n_halves)
    for phase in Phase:
        tasks = plan.tasks(phase)
        columns = (tasks.document, tasks.q_begin, tasks.q_end, tasks.server)
        got = list(zip(*(column.tolist() for column in columns), strict=True))
        assert got == sorted(made[phase])
        assert len(got) > manifest.n_documents, "nothing was cut"
    np.testing.assert_allclose(slots.seconds, busy, atol=1e-9)
