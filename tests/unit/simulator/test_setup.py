"""Models, clusters and setups: sizes, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest

from core_attention.ca_task import Phase
from distca.apps.simulator.fleet import build_servers
from distca.apps.simulator.model import PRESETS
from distca.apps.simulator.profile import document_seconds
from distca.contract.settings import Placement
from tests.support.errors import refused
from tests.support.planning_cases import PROFILE
from tests.unit.simulator.cases import flat_profile, setup


def test_llama_3_8b_needs_436_megaflop_per_token_and_layer() -> None:
    assert PRESETS["llama-3-8b"].linear_flops_per_token == pytest.approx(436e6, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "active_weights", "with_head"),
    [
        ("llama-34b", 34e9, False),
        ("deepseek-v2-lite", 2.4e9, True),
        ("deepseek-v2", 21e9, True),
        ("deepseek-v3", 37e9, True),
    ],
)
def test_presets_have_their_activated_weights(
    name: str, active_weights: float, *, with_head: bool
) -> None:
    model = PRESETS[name]
    weights = model.n_layers * model.linear_flops_per_token / 2
    weights += with_head * 2 * model.head_flops_per_token / 2
    assert weights == pytest.approx(active_weights, rel=0.12 if with_head else 0.01)


def test_the_rows_of_latent_attention_have_their_true_bytes() -> None:
    shape = PRESETS["deepseek-v3"].attention_shape
    assert (shape.head_dim, shape.head_dim_v) == (192, 128)
    assert (shape.q_row_bytes, shape.o_row_bytes, shape.kv_row_bytes) == (49152, 32768, 81920)


def test_a_rank_is_as_fast_as_its_gpus_together() -> None:
    one = setup(8, cluster={"gpus_per_host": 8})
    four = setup(8, cluster={"gpus_per_host": 8, "tensor_parallel": 4})
    length = np.array([4096])
    for phase in Phase:
        ratio = one.linear_seconds_per_token(phase) / four.linear_seconds_per_token(phase)
        assert ratio == pytest.approx(4)
        seconds = [document_seconds(s.rank_profile, length, phase)[0] for s in (one, four)]
        assert seconds[0] / seconds[1] == pytest.approx(4)


def test_recomputation_makes_the_backward_pass_half_as_long_again() -> None:
    plain, again = setup(), setup(recompute_linear=True)
    ratio = again.linear_seconds_per_token(Phase.BACKWARD) / plain.linear_seconds_per_token(
        Phase.BACKWARD
    )
    assert ratio == pytest.approx(1.5)


def test_the_profile_is_scaled_to_the_heads_of_the_model() -> None:
    of_8b = PROFILE
    seconds = [
        document_seconds(
            setup(model=PRESETS[name], profile=of_8b).rank_profile, np.array([8192]), Phase.FORWARD
        )[0]
        for name in ("llama-3-8b", "llama-34b")
    ]
    assert seconds[1] / seconds[0] == pytest.approx(2)


def test_servers_follow_the_placement() -> None:
    cluster = setup(2).cluster
    profile = flat_profile()

    def names(placement: Placement, n_pool_servers: int) -> list[str]:
        servers = build_servers(cluster, profile, placement, n_pool_servers)
        return [server.server.server_id for server in servers]

    assert names(Placement.IN_PLACE, 0) == ["rank-0", "rank-1"]
    assert names(Placement.POOL, 1) == ["pool-0"]
    assert names(Placement.MIXED, 1) == ["rank-0", "rank-1", "pool-0"]
    for placement, n_pool_servers in ((Placement.IN_PLACE, 1), (Placement.POOL, 0)):
        with refused():
            names(placement, n_pool_servers)
