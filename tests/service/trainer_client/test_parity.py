"""Gradient parity: O, dQ, dK and dV of a served job, element by element, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from core_attention.manifest import RankManifest, Segment
from core_attention.shape import AttentionShape
from tests.support.cluster import Cluster, cluster
from tests.support.cut_manifests import in_halves
from tests.support.team import Team

PLACEMENTS = ("pool", "in-place", "mixed")


def make_shape(num_heads: int = 4, num_heads_kv: int = 2, dtype: str = "float32") -> AttentionShape:
    return AttentionShape(
        num_heads=num_heads, num_heads_kv=num_heads_kv, head_dim=16, head_dim_v=16, dtype=dtype
    )


def lengths(*by_rank: tuple[list[int], list[int]]) -> list[RankManifest]:
    """Whole documents: for each rank, the lengths of its two nano-batches."""
    return [RankManifest.from_lengths(0, rank, nano) for rank, nano in enumerate(by_rank)]


def spanning(n_ranks: int, length: int) -> list[RankManifest]:
    """One document cut evenly over all ranks, and another one the other way round."""
    cuts = [length * rank // n_ranks for rank in range(n_ranks + 1)]
    manifests = []
    for rank in range(n_ranks):
        forth, back = rank, n_ranks - 1 - rank
        nano_batches = tuple(
            (Segment(document, length, cuts[place], cuts[place + 1] - cuts[place]),)
            for document, place in ((1, forth), (2, back))
        )
        manifests.append(RankManifest(0, rank, nano_batches))
    return manifests


CASES = {
    "odd lengths": lengths(([1, 2, 127], [128]), ([129, 1], [2, 127, 128, 129])),
    "one token": lengths(([1], [1]), ([1], [1])),
    "an empty nano-batch": lengths(([5], []), ([], [3])),
    "many tiny documents": lengths(([1, 2, 3] * 12, [7] * 6), ([2] * 20, [1] * 10)),
    "one document over all ranks": spanning(2, 307),
}


@pytest.fixture(scope="module", params=PLACEMENTS)
def team(request: pytest.FixtureRequest, pool_of_four: Cluster) -> Iterator[Team]:
    with Team(pool_of_four, 2, make_shape(), n_layers=2, placement=request.param) as running:
        yield running


@pytest.mark.parametrize("case", CASES)
def test_every_placement_matches_the_reference(team: Team, case: str) -> None:
    team.check(CASES[case])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_products_own_planner_matches_the_reference(
    pool_of_four: Cluster, placement: str
) -> None:
    manifests = lengths(([1500, 300], [700]), ([80, 40], [60, 2, 1]))
    with Team(pool_of_four, 2, make_shape(), placement=placement, planner="balanced") as team:
        team.check(manifests)
        team.check(spanning(2, 601))
        team.check(in_halves(2, 300, 700, 20))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("num_heads", "num_heads_kv", "head_groups"),
    [(2, 2, 1), (8, 1, 1), (8, 2, 2), (4, 4, 4)],
)
def test_shared_keys_head_groups_and_dtypes_match_the_reference(
    pool_of_four: Cluster, num_heads: int, num_heads_kv: int, head_groups: int, dtype: str
) -> None:
    shape = make_shape(num_heads, num_heads_kv, dtype)
    with Team(
        pool_of_four, 2, shape, n_layers=2, placement="mixed", head_groups=head_groups
    ) as team:
        team.check(lengths(([130, 1], [64]), ([33], [129, 2])))
        team.check(spanning(2, 301))
        team.check(in_halves(2, 301))


@pytest.mark.parametrize("interleave", [True, False])
@pytest.mark.parametrize("n_nano_batches", [1, 2, 3])
def test_ping_pong_on_and_off_matches_the_reference(
    pool_of_four: Cluster, n_nano_batches: int, interleave: bool
) -> None:
    nano_batches = ([130, 1], [64], [5, 200])[:n_nano_batches]
    manifests = [RankManifest.from_lengths(0, rank, nano_batches) for rank in range(2)]
    with Team(
        pool_of_four,
        2,
        make_shape(),
        n_layers=3,
        n_nano_batches=n_nano_batches,
        interleave=interleave,
        placement="mixed",
    ) as team:
        team.check(manifests)


@pytest.mark.parametrize("n_ranks", [1, 4])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_one_and_four_ranks_match_the_reference(
    pool_of_four: Cluster, n_ranks: int, placement: str
) -> None:
    with Team(pool_of_four, n_ranks, make_shape(), placement=placement) as team:
        team.check(spanning(n_ranks, 311))
        team.check(in_halves(n_ranks, 100, 301, 33, 7))


@pytest.mark.parametrize("n_nodes", [1, 2])
def test_fewer_servers_match_the_reference(
    tmp_path_factory: pytest.TempPathFactory, n_nodes: int
) -> None:
    folder = tmp_path_factory.mktemp(f"pool-of-{n_nodes}")
    with cluster(folder, n_nodes) as pool, Team(pool, 2, make_shape(), placement="pool") as team:
        team.check(CASES["odd lengths"])
        team.check(spanning(2, 401))


def test_two_jobs_share_a_pool(pool_of_four: Cluster) -> None:
    first_shape, second_shape = make_shape(), make_shape(8, 1, "bfloat16")
    manifests = lengths(([400, 30], [250]), ([90], [333, 1]))
    with (
        Team(pool_of_four, 2, first_shape, n_layers=2, placement="pool") as first,
        Team(pool_of_four, 2, second_shape, n_layers=2, placement="pool") as second,
        ThreadPoolExecutor(2) as both,
    ):
        for seed in range(3):
            checks = [both.submit(team.check, manifests, seed=seed) for team in (first, second)]
            for check in checks:
                check.result(90)


@pytest.mark.parametrize("manifests", [spanning(2, 700), in_halves(2, 701)])
def test_equal_steps_give_equal_bits(pool_of_four: Cluster, manifests: list[RankManifest]) -> None:
    """Sums are in a fixed order, whatever order messages arrive in."""
    with Team(pool_of_four, 2, make_shape(), placement="mixed", planner="steady") as team:
        runs = [team.run(manifests) for _ in range(4)]
    for key, rows in runs[0].rows.items():
        for other in runs[1:]:
            for name, tensor in rows.items():
                assert tensor.equal(other.rows[key][name]), f"{name} of {key} differs"
