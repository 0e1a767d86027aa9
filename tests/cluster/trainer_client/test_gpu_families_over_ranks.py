"""Every family of the table that is served, trained on GPUs by two ranks with real servers, each a
process: documents cut between ranks and nano-batches, inside windows too. With several GPUs the
ranks have one each, and pytest's workers spread over them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.cluster.trainer_client.family_runs import (
    N_RANKS,
    STEPS,
    distance,
    gradients_alone,
    keep_weights,
    run_on,
    train_ranks,
    without_dropout,
)
from tests.cluster.trainer_client.model_sweep import make_model, served_families
from tests.cluster.trainer_client.test_gpu_families import (
    config_for_kernels,
    on_device,
    skip_elsewhere,
)
from tests.cluster.trainer_client.test_gpu_parity import SHAPE
from tests.support.cluster import Cluster, cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(400),
]

LONGER = (*STEPS, (100, 1, 5, 90, 127))
"""Documents of more than the 64 or 128 rows that a kernel takes at once, too."""


@pytest.fixture(scope="module")
def devices(worker_id: str) -> tuple[str, ...]:
    """Of both ranks; nodes share the first."""
    worker = int(worker_id.removeprefix("gw")) if worker_id.startswith("gw") else 0
    n_devices = torch.cuda.device_count()
    return tuple(f"cuda:{(N_RANKS * worker + rank) % n_devices}" for rank in range(N_RANKS))


@pytest.fixture(scope="module")
def servers(
    tmp_path_factory: pytest.TempPathFactory, devices: tuple[str, ...]
) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("family-cluster")
    with cluster(folder, 2, device=devices[0], node_shape=SHAPE) as running:
        yield running


@pytest.fixture(scope="module")
def ranks() -> Iterator[list[Executor]]:
    with ExitStack() as stack:
        yield [
            stack.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
            for _ in range(N_RANKS)
        ]


@pytest.mark.parametrize(
    ("placement", "checkpointed"), [("pool", True), ("in-place", False)], ids=["pool", "in-place"]
)
@pytest.mark.parametrize("family", served_families())
def test_ranks_are_as_near_to_float32_as_the_family_s_own_attention(
    servers: Cluster,
    ranks: list[Executor],
    devices: tuple[str, ...],
    tmp_path: Path,
    family: str,
    placement: str,
    checkpointed: bool,
) -> None:
    """Bounds as in test_gpu_families. Gradients of pieces and nano-batches are rounded to bfloat16
    before they are added, as are those of documents alone."""
    skip_elsewhere(family)
    config = without_dropout(config_for_kernels(family))
    local = make_model(config, "eager").bfloat16()
    weights = keep_weights(local, tmp_path)
    run = run_on(
        servers,
        config,
        weights,
        family,
        placement,
        checkpointed=checkpointed,
        dtype=torch.bfloat16,
        devices=devices,
        steps=LONGER,
    )
    found = train_ranks(ranks, run)
    own, exact = (
        on_device(make_model(config, "eager"), dtype) for dtype in (torch.bfloat16, torch.float32)
    )
    for model in (own, exact):
        model.load_state_dict(local.state_dict())
    for step, lengths in enumerate(LONGER):
        right = gradients_alone(exact, lengths)
        assert {name for of_rank in found for name in of_rank[step]} >= set(right)
        mine = {
            name: np.sum(
                [of_rank[step][name] for of_rank in found if name in of_rank[step]], axis=0
            )
            for name in right
        }
        ours, theirs = distance(mine, right), distance(gradients_alone(own, lengths), right)
        assert ours <= 5.0 * theirs + 1e-3, (
            f"{lengths[:8]}: {ours:.2e}, with its own attention {theirs:.2e}"
        )
