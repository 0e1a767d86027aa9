"""Hypothesis strategies: random manifests, and random valid plans for them.

They cover what hand-written cases leave out: documents that span ranks or visit a rank twice, or
that are cut between the two nano-batches of a pair at any place,
ranks with nothing in a nano-batch, documents of one token, tasks cut anywhere, servers without
tasks, forward and backward cut differently.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from core_attention.ca_task import MaskKind, TaskTable
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan, PlanServer, PlanVerdict

_lengths = st.one_of(st.just(1), st.integers(1, 8), st.integers(1, 60))


@st.composite
def rank_manifests(
    draw: st.DrawFn, max_ranks: int = 4, max_documents: int = 6, *, cuts: bool = True
) -> list[RankManifest]:
    """What every rank of one step sends; merging them is valid. ``cuts``: documents may begin in
    the first nano-batch of a pair and go on in the second."""
    n_ranks = draw(st.integers(1, max_ranks))
    n_nano_batches = draw(st.integers(1, 4))
    packed: list[list[list[Segment]]] = [
        [[] for _ in range(n_nano_batches)] for _ in range(n_ranks)
    ]
    lengths = draw(st.lists(_lengths, min_size=1, max_size=max_documents))
    ids = draw(
        st.lists(st.integers(0, 2**40), min_size=len(lengths), max_size=len(lengths), unique=True)
    )
    for document_id, length in zip(ids, lengths, strict=True):
        nano_batch = draw(st.integers(0, n_nano_batches - 1))
        pieces = _pieces(draw, 0, length)
        is_second = nano_batch % 2 == 1 and n_nano_batches % 2 == 0
        n_first = draw(st.integers(0, len(pieces) - 1)) if is_second and cuts else 0
        for place, (begin, end) in enumerate(pieces):
            rank = draw(st.integers(0, n_ranks - 1))
            segment = Segment(document_id, length, begin, end - begin)
            packed[rank][nano_batch - (place < n_first)].append(segment)
    if n_nano_batches % 2 == 0:
        for second in range(1, n_nano_batches, 2):
            _fill_second_nano_batches(packed, second)
    return [
        RankManifest(
            step=3,
            rank=rank,
            nano_batches=tuple(tuple(draw(st.permutations(nano))) for nano in nano_batches),
        )
        for rank, nano_batches in enumerate(packed)
    ]


def _fill_second_nano_batches(packed: list[list[list[Segment]]], second: int) -> None:
    """Gives a document of one token to ranks that carry keys into a nano-batch without rows."""
    cut = {s.document_id for nano_batches in packed for s in nano_batches[second]}
    for rank, nano_batches in enumerate(packed):
        carries = any(s.document_id in cut for s in nano_batches[second - 1])
        if carries and not nano_batches[second]:
            only = Segment(2**50 + 2**20 * second + rank, 1, 0, 1)
            nano_batches[second].append(only)


@st.composite
def manifests(
    draw: st.DrawFn, max_ranks: int = 4, max_documents: int = 6, *, cuts: bool = True
) -> Manifest:
    """A whole step with up to ``max_ranks`` ranks and ``max_documents`` documents."""
    ranks = draw(rank_manifests(max_ranks, max_documents, cuts=cuts))
    return Manifest.merge(ranks, len(ranks))


@st.composite
def plans(draw: st.DrawFn, max_servers: int = 4, *, cuts: bool = True) -> Plan:
    """A valid plan with up to ``max_servers`` pool and in-place servers."""
    manifest = draw(manifests(cuts=cuts))
    n_servers = draw(st.integers(1, max_servers))
    in_place = draw(st.lists(st.booleans(), min_size=n_servers, max_size=n_servers))
    servers = tuple(
        PlanServer(f"server-{i}", i if shared and i < manifest.n_ranks else None, f"host:{i}")
        for i, shared in enumerate(in_place)
    )
    return Plan(
        manifest=manifest,
        epoch=0,
        servers=servers,
        forward=_tasks(draw, manifest, n_servers),
        backward=_tasks(draw, manifest, n_servers),
        mask=MaskKind.CAUSAL,
        planner="random",
        reason="drawn at random",
        verdict=draw(st.sampled_from([None, *PlanVerdict])),
    )


def _tasks(draw: st.DrawFn, manifest: Manifest, n_servers: int) -> TaskTable:
    rows = []
    for segment in range(manifest.n_segments):
        begin = int(manifest.segment_offset[segment])
        end = begin + int(manifest.segment_length[segment])
        for q_begin, q_end in _pieces(draw, begin, end):
            server = draw(st.integers(0, n_servers - 1))
            rows.append((int(manifest.segment_document[segment]), q_begin, q_end, server))
    return TaskTable(*np.array(rows, dtype=np.int64).T)


def _pieces(draw: st.DrawFn, begin: int, end: int) -> list[tuple[int, int]]:
    """Cuts ``[begin, end)`` into one to four ranges."""
    cuts = draw(st.sets(st.integers(begin, end), max_size=3))
    bounds = sorted(cuts | {begin, end})
    return list(pairwise(bounds))
