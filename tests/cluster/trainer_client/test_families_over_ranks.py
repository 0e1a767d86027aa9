"""Every family of the table that is served, trained by two ranks with real servers: documents cut
between ranks and nano-batches, lengths around the window, many tiny ones; gradients beside those of
each document alone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.cluster.trainer_client.family_runs import (
    N_RANKS,
    STEPS,
    gradients_alone,
    keep_weights,
    run_on,
    train_ranks,
    without_dropout,
)
from tests.cluster.trainer_client.model_sweep import (
    make_model,
    served_families,
)
from tests.cluster.trainer_client.test_model_families import SLOW
from tests.support.cluster import Cluster
from tests.support.tiny_models import tiny_config

pytestmark = pytest.mark.timeout(400)

SETTINGS = (("pool", True), ("in-place", False))
"""By turns of families: placement, and whether with checkpoints and ping-pong."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Executor]]:
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        yield [first, second]


@pytest.mark.parametrize(
    ("family", "placement", "checkpointed"),
    [
        (family, *SETTINGS[number % len(SETTINGS)])
        for number, family in enumerate(sorted(set(served_families()) - SLOW))
    ],
)
def test_gradients_of_both_ranks_are_those_of_the_documents(
    pool_of_four: Cluster,
    ranks: list[Executor],
    tmp_path: Path,
    family: str,
    placement: str,
    checkpointed: bool,
) -> None:
    config = without_dropout(tiny_config(family))
    local = make_model(config, "eager")
    weights = keep_weights(local, tmp_path)
    run = run_on(pool_of_four, config, weights, family, placement, checkpointed=checkpointed)
    found = train_ranks(ranks, run)
    exact = make_model(config, "eager").double()
    # PyTorch's grouped products of experts know no float64.
    exact.set_experts_implementation("eager")
    exact.load_state_dict(local.state_dict())
    for step, lengths in enumerate(STEPS):
        right, own = gradients_alone(exact, lengths), gradients_alone(local, lengths)
        largest = max(float(np.abs(each).max()) for each in right.values())
        for name, _ in local.named_parameters():
            mine = [found[rank][step][name] for rank in range(N_RANKS) if name in found[rank][step]]
            if name not in right:
                assert not any(each.any() for each in mine), (lengths, name)
                continue
            # Sums that cancel are compared with a thousandth of the largest gradient.
            scale = max(float(np.abs(right[name]).max()), 1e-3 * largest)
            error, theirs = (
                float(np.abs(each - right[name]).max()) / scale for each in (sum(mine), own[name])
            )
            # float32 through two layers; where a family makes more of its roundings, it does so
            # with its own attention as well, in another order.
            assert error < min(1e-3, max(1e-4, 5.0 * theirs)), (
                f"{lengths[:8]}: {name} differs by {error:.1e}, with its own attention {theirs:.1e}"
            )
