"""Replies of a server, as a rank sees them, computed by the CPU kernel: for tests of what judges
them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core_attention.ca_task import Phase, TaskTable
from core_attention.manifest import RankManifest, Segment
from core_attention.plan import Plan
from core_attention.routing import derive_routes
from core_attention.shape import AttentionShape
from core_attention.tick import Tick
from tests.support.reference import ReferenceResult, reference_attention
from tests.unit.attention_node.cases import make_plan
from trainer_client.integrity.answer import Answer

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=6, dtype="float32")


def plan_of(manifests: Sequence[RankManifest], tasks: Sequence[tuple[int, int, int, int]]) -> Plan:
    """Tasks on two servers are (document index, q_begin, q_end, server), in both phases."""
    return make_plan(manifests, TaskTable(*np.array(tasks, dtype=np.int64).T), n_servers=2)


def two_documents_at_home() -> Plan:
    """Documents 7 (10 tokens) and 9 (6 tokens) on rank 0; server 1 has the end of the first."""
    segments = (Segment(7, 10, 0, 10), Segment(9, 6, 0, 6))
    return plan_of([RankManifest(5, 0, (segments,))], [(0, 0, 4, 0), (0, 4, 10, 1), (1, 0, 6, 0)])


def one_document_over_two_ranks() -> Plan:
    """Document 7: tokens [0, 6) on rank 0, [6, 10) on rank 1; server 0 runs all."""
    manifests = [
        RankManifest(5, 0, ((Segment(7, 10, 0, 6),),)),
        RankManifest(5, 1, ((Segment(7, 10, 6, 4),),)),
    ]
    return plan_of(manifests, [(0, 0, 6, 0), (0, 6, 10, 0)])


def answer_of(
    plan: Plan,
    phase: Phase,
    *,
    rank: int = 0,
    server: int = 0,
    layer: int = 1,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    poison: tuple[str, int] | None = None,
) -> Answer:
    """What ``rank`` gets from ``server`` in one tick, correct to the float64 reference.

    Args:
        poison: name and packed row of an input of rank 0 that becomes NaN before anything is
            computed.
    """
    route = derive_routes(plan.manifest, plan.tasks(phase), 0)[rank, server]
    at_home = _random_rows(plan, seed, dtype)
    if poison is not None:
        at_home[0][poison[0]][poison[1]] = torch.nan
    documents = [_document_rows(plan, at_home, d) for d in range(plan.manifest.n_documents)]
    q_runs, kv_runs = [], []
    tasks = plan.tasks(phase)
    scale = SHAPE.default_softmax_scale
    full = {
        d: reference_attention(rows["q"], rows["k"], rows["v"], [len(rows["q"])], scale, rows["do"])
        for d, rows in enumerate(documents)
    }
    for task in route.task.tolist():
        d, begin, end = (int(c[task]) for c in (tasks.document, tasks.q_begin, tasks.q_end))
        result = full[d]
        assert result.dq is not None
        q_runs.append(
            {
                "o": result.o[begin:end],
                "lse": result.lse[begin:end],
                "dq": result.dq[begin:end],
            }
        )
    for d, offset, length in zip(
        route.kv_document.tolist(), route.kv_offset.tolist(), route.kv_length.tolist(), strict=True
    ):
        mine = (tasks.document == d) & (tasks.server == server)
        kv_runs.append(
            {
                name: gradient[offset : offset + length]
                for name, gradient in _key_gradients(
                    documents[d], tasks.q_begin[mine], tasks.q_end[mine], scale
                ).items()
            }
        )
    wanted = ("o", "lse") if phase is Phase.FORWARD else ("dq", "dk", "dv")
    inputs = dict(at_home[rank])
    outputs = _outputs_at_home(plan, full, rank)
    lse, o = outputs["lse"], outputs["o"]
    if phase is Phase.BACKWARD:
        inputs["lse"] = lse.float()
        inputs["delta"] = (inputs["do"].double() * o).sum(-1).float()
    else:
        del inputs["do"]
    return Answer(
        tick=Tick(plan.step, layer, 0, phase),
        server_id=plan.servers[server].server_id,
        plan=plan,
        route=route,
        inputs=inputs,
        results={
            name: torch.cat(
                [run[name] for run in (kv_runs if name in ("dk", "dv") else q_runs)]
            ).to(torch.float32 if name == "lse" else dtype)
            for name in wanted
        },
    )


def _random_rows(plan: Plan, seed: int, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    sizes = {
        "q": (SHAPE.num_heads, SHAPE.head_dim),
        "k": (SHAPE.num_heads_kv, SHAPE.head_dim),
        "v": (SHAPE.num_heads_kv, SHAPE.head_dim_v),
        "do": (SHAPE.num_heads, SHAPE.head_dim_v),
    }
    return [
        {
            name: torch.randn(tokens, *size, generator=generator).to(dtype)
            for name, size in sizes.items()
        }
        for tokens in plan.manifest.tokens_per_rank(0).tolist()
    ]


def _segments(plan: Plan, document: int) -> list[tuple[int, slice]]:
    manifest = plan.manifest
    return [
        (
            int(manifest.segment_rank[s]),
            slice(
                int(manifest.segment_row[s]),
                int(manifest.segment_row[s] + manifest.segment_length[s]),
            ),
        )
        for s in range(manifest.first_segment[document], manifest.first_segment[document + 1])
    ]


def _document_rows(
    plan: Plan, rows: list[dict[str, torch.Tensor]], document: int
) -> dict[str, torch.Tensor]:
    return {
        name: torch.cat([rows[rank][name][where] for rank, where in _segments(plan, document)])
        for name in rows[0]
    }


def _outputs_at_home(
    plan: Plan, full: dict[int, ReferenceResult], rank: int
) -> dict[str, torch.Tensor]:
    tokens = int(plan.manifest.tokens_per_rank(0)[rank])
    lse = torch.zeros(tokens, SHAPE.num_heads, dtype=torch.float64)
    o = torch.zeros(tokens, SHAPE.num_heads, SHAPE.head_dim_v, dtype=torch.float64)
    for document, result in full.items():
        begin = 0
        for home, where in _segments(plan, document):
            length = where.stop - where.start
            if home == rank:
                lse[where] = result.lse[begin : begin + length]
                o[where] = result.o[begin : begin + length]
            begin += length
    return {"lse": lse, "o": o}


def _key_gradients(
    document: dict[str, torch.Tensor],
    q_begin: np.ndarray[tuple[int], np.dtype[np.int64]],
    q_end: np.ndarray[tuple[int], np.dtype[np.int64]],
    scale: float,
) -> dict[str, torch.Tensor]:
    """dk and dv of the chosen queries alone: those of the others are taken out of do."""
    do = torch.zeros_like(document["do"])
    for begin, end in zip(q_begin.tolist(), q_end.tolist(), strict=True):
        do[begin:end] = document["do"][begin:end]
    result = reference_attention(document["q"], document["k"], document["v"], [len(do)], scale, do)
    assert result.dk is not None
    assert result.dv is not None
    return {"dk": result.dk, "dv": result.dv}
