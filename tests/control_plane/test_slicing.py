"""All slices at once are the slices one by one."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from control_plane.jobs.slicing import PlanSlicer
from core_attention.ca_task import MaskKind, TaskTable
from core_attention.manifest import Manifest, RankManifest, Segment
from core_attention.plan import Plan, PlanServer
from distca.contract.codec import plan_to_proto


def random_plan(seed: int, n_ranks: int, n_servers: int) -> Plan:
    """Documents over one or two ranks, random tasks on random servers, some of them in-place."""
    rng = np.random.default_rng(seed)
    packed: list[list[list[Segment]]] = [[[], []] for _ in range(n_ranks)]
    for document_id in range(int(rng.integers(1, 12))):
        nano, length = int(rng.integers(2)), int(rng.integers(2, 50))
        cut = int(rng.integers(1, length))
        for offset, end in ((0, cut), (cut, length)):
            rank = int(rng.integers(n_ranks))
            packed[rank][nano].append(Segment(document_id, length, offset, end - offset))
    manifest = Manifest.merge(
        [RankManifest(5, r, tuple(map(tuple, nano))) for r, nano in enumerate(packed)], n_ranks
    )

    def tasks() -> TaskTable:
        rows = []
        for document, offset, length in zip(
            manifest.segment_document,
            manifest.segment_offset,
            manifest.segment_length,
            strict=True,
        ):
            middle = int(rng.integers(length + 1))
            for begin, end in ((0, middle), (middle, length)):
                if end > begin:
                    server = int(rng.integers(n_servers))
                    rows.append((document, offset + begin, offset + end, server))
        return TaskTable(*np.array(rows, dtype=np.int64).T)

    return Plan(
        manifest=manifest,
        epoch=2,
        servers=tuple(
            PlanServer(f"s{i}", None if rng.random() < 0.5 else i % n_ranks, f"h:{i + 1}")
            for i in range(n_servers)
        ),
        forward=tasks(),
        backward=tasks(),
        mask=MaskKind.CAUSAL,
        planner="random",
        reason="dice",
    )


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), n_ranks=st.integers(1, 5), n_servers=st.integers(1, 6))
def test_slices_have_the_bytes_of_for_rank_and_for_server(
    seed: int, n_ranks: int, n_servers: int
) -> None:
    plan = random_plan(seed, n_ranks, n_servers)
    slicer = PlanSlicer(plan, "job")
    ranks = list(slicer.rank_slices())
    assert len(ranks) == n_ranks
    for rank, piece in enumerate(ranks):
        expected = plan_to_proto(plan.for_rank(rank), "job")
        assert piece.SerializeToString() == expected.SerializeToString()
    servers = list(slicer.server_slices())
    assert len(servers) == n_servers
    for server, found in zip(plan.servers, servers, strict=True):
        one = plan.for_server(server.server_id)
        if server.in_place_rank is not None or not one.manifest.n_documents:
            assert found is None
        else:
            assert found is not None
            assert found.SerializeToString() == plan_to_proto(one, "job").SerializeToString()
