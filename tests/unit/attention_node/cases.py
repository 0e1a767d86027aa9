"""Plans and tensors for tests of the node, without any network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from attention_node.machine.tick import TickMachine
from attention_node.open_tick import OpenTick, Source
from attention_node.tick_route import TickRoute
from core_attention.ca_task import MaskKind, Phase, TaskTable
from core_attention.manifest import Manifest, RankManifest
from core_attention.plan import Plan, PlanServer
from core_attention.shape import AttentionShape
from core_attention.tick import Tick
from tests.support.reference import ReferenceResult, reference_attention

SHAPE = AttentionShape(num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12, dtype="float32")
SCALE = 0.3
WAIT_SECONDS = 10.0


def make_plan(
    manifests: Sequence[RankManifest],
    tasks: TaskTable,
    *,
    n_servers: int = 1,
    local_rank: int | None = None,
) -> Plan:
    """A plan of these tasks, the same in both phases; server 0 is in-place if asked for."""
    servers = tuple(
        PlanServer(f"server-{index}", local_rank if index == 0 else None, f"host:{index + 1}")
        for index in range(n_servers)
    )
    return Plan(
        manifest=Manifest.merge(manifests, len(manifests)),
        epoch=0,
        servers=servers,
        forward=tasks,
        backward=tasks,
        mask=MaskKind.CAUSAL,
        planner="test",
        reason="",
    )


@dataclass
class Rank:
    """One rank's packed rows of a nano-batch, what it sends, and what it gets."""

    inputs: dict[str, torch.Tensor]
    replies: list[dict[str, torch.Tensor]] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    released: int = 0


def make_documents(manifest: Manifest, nano_batch: int = 0) -> tuple[list[Rank], ReferenceResult]:
    """Random rows on every rank of a manifest, and the reference in the order of documents."""
    generator = torch.Generator().manual_seed(1)
    chosen = manifest.document_nano_batch == nano_batch
    lengths = manifest.document_length[chosen].tolist()
    total = sum(lengths)

    def random(heads: int, dim: int) -> torch.Tensor:
        return torch.randn(total, heads, dim, generator=generator)

    q, k = random(SHAPE.num_heads, SHAPE.head_dim), random(SHAPE.num_heads_kv, SHAPE.head_dim)
    v = random(SHAPE.num_heads_kv, SHAPE.head_dim_v)
    do = random(SHAPE.num_heads, SHAPE.head_dim_v)
    result = reference_attention(q, k, v, lengths, SCALE, do)
    everything = {
        "q": q,
        "k": k,
        "v": v,
        "do": do,
        "lse": result.lse.float(),
        "delta": (do.double() * result.o).sum(-1).float(),
    }
    ranks = [
        Rank(
            {name: rows[home_rows(manifest, rank, nano_batch)] for name, rows in everything.items()}
        )
        for rank in range(manifest.n_ranks)
    ]
    return ranks, result


def home_rows(manifest: Manifest, rank: int, nano_batch: int = 0) -> torch.Tensor:
    """For each packed row of a rank, its place in the order of documents."""
    chosen = manifest.document_nano_batch == nano_batch
    starts = (manifest.document_length * chosen).cumsum() - manifest.document_length * chosen
    pieces = sorted(
        (int(manifest.segment_row[s]), int(starts[d] + manifest.segment_offset[s]), int(length))
        for s, (d, length) in enumerate(
            zip(manifest.segment_document, manifest.segment_length, strict=True)
        )
        if manifest.segment_rank[s] == rank and chosen[d]
    )
    rows = [torch.arange(begin, begin + length) for _, begin, length in pieces]
    return torch.cat(rows) if rows else torch.empty(0, dtype=torch.int64)


def open_tick(route: TickRoute, phase: Phase, closed: Callable[[OpenTick], None]) -> OpenTick:
    """An open tick of layer 0."""
    return OpenTick(
        machine=TickMachine(
            Tick(0, 0, 0, phase), route.outline(phase, owed=frozenset(), message_bytes={})
        ),
        route=route,
        shape=SHAPE,
        rule=SHAPE.rule,
        scale=SCALE,
        device=torch.device("cpu"),
        on_closed=closed,
    )


def make_source(route: TickRoute, rank: int, data: Rank, phase: Phase, *, local: bool) -> Source:
    """What ``rank`` hands in: gathered rows as from a message, or its own tensors."""
    pair = route.pairs[rank]
    q_rows, kv_rows = torch.from_numpy(pair.q_rows), torch.from_numpy(pair.kv_rows)
    inputs = {
        name: rows if local else rows[kv_rows if name in ("k", "v") else q_rows]
        for name, rows in data.inputs.items()
    }
    n_q = len(data.inputs["q"]) if local else pair.n_q_rows

    def empty(rows: int, heads: int, *dim: int) -> torch.Tensor:
        return torch.full((rows, heads, *dim), torch.nan)

    if phase is Phase.FORWARD:
        outputs = {
            "o": empty(n_q, SHAPE.num_heads, SHAPE.head_dim_v),
            "lse": empty(n_q, SHAPE.num_heads),
        }
    else:
        outputs = {
            "dq": empty(n_q, SHAPE.num_heads, SHAPE.head_dim),
            "dk": empty(pair.n_kv_rows, SHAPE.num_heads_kv, SHAPE.head_dim),
            "dv": empty(pair.n_kv_rows, SHAPE.num_heads_kv, SHAPE.head_dim_v),
        }

    def release() -> None:
        data.released += 1
        if not local:
            # The next message may be received into this memory.
            for rows in inputs.values():
                rows.fill_(torch.nan)

    return Source(
        inputs=inputs,
        outputs=outputs,
        reply=lambda: data.replies.append(
            {
                name: rows[q_rows] if local and name in ("o", "lse", "dq") else rows
                for name, rows in outputs.items()
            }
        ),
        release=release,
        fail=data.failures.append,
    )
