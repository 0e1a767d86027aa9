"""What plans of pipelines are worth: steps run event by event, every rank's GPU on its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from control_plane.planner import balanced
from control_plane.planner.planning import PlanningOptions, equal_servers
from core_attention.ca_task import Phase, home_segment
from core_attention.cost_model import CostProfile
from core_attention.manifest import Manifest, RankManifest
from core_attention.pipelining import Pipelining
from core_attention.plan import Plan
from core_attention.schedule import Action
from core_attention.schedule_orders import SCHEDULES
from tests.unit.simulator.cases import h200
from tests.unit.simulator.event_engine import Job, run

LAYERS, ROWS, TOKENS = 4, 2, 64 * 1024


class _Step:
    """The jobs of a step of one pipeline, a rank a stage; messages take no time."""

    def __init__(self, plan: Plan, pipes: Pipelining, profile: CostProfile) -> None:
        self._pipes = pipes
        self._busy = _busy_of(plan, profile)
        self._n_servers = len(plan.servers)
        self.jobs: list[Job] = []
        ends: dict[Action, list[int]] = {}
        last: dict[int, list[int]] = {}
        begun = {a: at for at, slot in reversed(list(enumerate(pipes.slots))) for a in slot if a}
        for action, slot in sorted(begun.items(), key=lambda item: (item[1], item[0].stage)):
            needed = [job for other in pipes.schedule.needs(action) for job in ends[other]]
            rank = pipes.schedule.rank_of_stage[action.stage]
            ends[action] = last[rank] = self._add(
                slot, rank, action, [*last.get(rank, []), *needed]
            )

    def _add(self, slot: int, rank: int, action: Action, before: list[int]) -> list[int]:
        """Layer by layer: each row's linear part, then its attention on the servers."""
        seconds = TOKENS / ROWS * self._pipes.seconds(action.stage, action.kind) / LAYERS
        phase, n_slots = action.kind.attention_phase, self._pipes.kind_slots[action.kind]
        ready = [before] * ROWS
        for layer in range(LAYERS):
            # What is due earlier goes first.
            order = 2 * (slot * LAYERS + layer * n_slots)
            for row in range(ROWS):
                linear = self._compute(rank, seconds, ready[row], order)
                ready[row] = [linear]
                if phase is not None:
                    busy = self._busy[phase][action.microbatch * ROWS + row, rank]
                    ready[row] += [
                        self._compute(server, float(busy[server]), [linear], order + 1)
                        for server in np.flatnonzero(busy).tolist()
                    ]
        return [job for jobs in ready for job in jobs]

    def _compute(self, rank: int, seconds: float, after: list[int], order: int) -> int:
        self.jobs.append(Job(seconds, (f"gpu {rank}",), tuple(after), (float(order),)))
        return len(self.jobs) - 1


def _busy_of(plan: Plan, profile: CostProfile) -> dict[Phase, np.ndarray]:
    """``[n_nano_batches, n_ranks, n_servers]`` seconds of one layer."""
    manifest, found = plan.manifest, {}
    for phase in Phase:
        tasks = plan.tasks(phase)
        busy = np.zeros((manifest.n_nano_batches, manifest.n_ranks, len(plan.servers)))
        home = manifest.segment_rank[home_segment(manifest, tasks)]
        nano = manifest.document_nano_batch[tasks.document]
        took = profile.seconds(tasks.q_end - tasks.q_begin, tasks.q_end, phase)
        np.add.at(busy, (nano, home, tasks.server), took)
        found[phase] = busy
    return found


def _drawn(n_rows: int, seed: int) -> list[list[int]]:
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n_rows):
        lengths, left = [], TOKENS // ROWS
        while left:
            lengths.append(int(min(left, max(64, rng.lognormal(9, 1.6)))))
            left -= lengths[-1]
        rows.append(lengths)
    return rows


def gains(name: str, p: int, m: int, seed: int) -> tuple[float, float]:
    """Steps by an even plan and by an idle-aware one: how many times faster they are than 1F1B with
    perfectly equal microbatches, whose linear part takes as long as their attention."""
    profile = h200()
    rows = _drawn(m * ROWS, seed)
    manifest = Manifest.merge([RankManifest.from_lengths(0, rank, rows) for rank in range(p)], p)
    attention = {
        phase: sum(float(profile.seconds(np.array(r), np.array(r), phase).sum()) for r in rows) / m
        for phase in Phase
    }
    linear = sum(attention.values())
    pipes = Pipelining(
        schedule=SCHEDULES[name](p, m),
        pipeline_ranks=tuple(range(p)),
        layers=(LAYERS,) * p,
        forward_seconds=(LAYERS * linear / 3 / TOKENS,) * p,
        backward_seconds=(LAYERS * linear * 2 / 3 / TOKENS,) * p,
    )
    balanced_1f1b = (m + p - 1) * 2 * linear * LAYERS
    options, servers = PlanningOptions(), equal_servers(p, profile)
    found = []
    for chosen in (options, replace(options, pipelining=pipes)):
        plan = balanced.plan(manifest, servers, profile.shape, chosen)
        found.append(balanced_1f1b / max(run(_Step(plan, pipes, profile).jobs)))
    return found[0], found[1]


@pytest.mark.parametrize(
    ("name", "p", "m", "least"),
    [
        ("1f1b", 4, 4, 1.30),
        ("1f1b-split", 4, 4, 1.43),
        ("same-phase", 4, 4, 1.34),
        ("zero-bubble", 4, 4, 1.50),
        ("1f1b", 4, 8, 1.09),
        ("1f1b-split", 4, 8, 1.16),
        ("zero-bubble", 4, 8, 1.22),
        ("1f1b", 2, 4, 1.08),
        ("1f1b-split", 2, 4, 1.11),
        ("zero-bubble", 2, 4, 1.14),
    ],
)
def test_idle_aware_plans_are_worth_it_where_even_ones_are_not(
    name: str, p: int, m: int, least: float
) -> None:
    """The bounds are what was found, less 0.04 for other versions of numpy's random numbers."""
    even, idle_aware = np.mean([gains(name, p, m, seed) for seed in range(2)], axis=0)
    assert idle_aware > least
    assert even < 1.1
