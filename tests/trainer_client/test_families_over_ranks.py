"""Every family of the table that is served, trained by two ranks with real servers: documents cut
between ranks and nano-batches, lengths around the window, many tiny ones; gradients beside those of
each document alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from core_attention.ca_task import MaskKind
from core_attention.manifest import RankManifest, Segment
from tests.cluster import Cluster, keep_profile
from tests.cut_manifests import in_halves, within_nano_batches
from tests.trainer_client.model_sweep import WINDOWS, documented, make_model, served_families
from tests.trainer_client.test_model_families import SLOW
from tests.trainer_client.tiny_models import VOCABULARY, tiny_config
from trainer_client import PingPong, Session, SessionOptions

pytestmark = [pytest.mark.training, pytest.mark.timeout(400)]

N_RANKS = 2
STEPS: tuple[tuple[int, ...], ...] = (
    # Windows of tiny models have six keys: lengths 1, W - 1, W and W + 1, and others.
    (9, 1, 5, 21, 6, 7, 15),
    # One document over all ranks and nano-batches.
    (53,),
    # Hundreds of tiny ones.
    (1, 2, 3) * 70,
)

SETTINGS = (("pool", True), ("in-place", False))
"""By turns of families: placement, and whether with checkpoints and ping-pong."""


def drawn(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(8, VOCABULARY, (n,), generator=generator) for n in lengths]


def batch_of(segments: Sequence[Segment], documents: list[torch.Tensor]) -> dict[str, Any]:
    """Arguments of the model; without rows if there are no ``segments``."""
    ids, positions = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for segment in segments:
        begin, end = segment.offset, segment.offset + segment.length
        ids.append(documents[segment.document_id][begin:end])
        positions.append(torch.arange(begin, end))
    return {
        "input_ids": torch.cat(ids)[None],
        "position_ids": torch.cat(positions)[None],
        "use_cache": False,
    }


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """One to which every row and every logit adds."""
    weights = torch.linspace(0.5, 1.5, logits.shape[-1])
    return (logits.double() * weights).sin().sum()


def expected_gradients(local: nn.Module, lengths: tuple[int, ...]) -> list[torch.Tensor | None]:
    """With transformers' own attention, each document in a row of its own."""
    local.zero_grad()
    documents = drawn(lengths)
    for length in sorted(set(lengths)):
        ids = torch.stack([each for each in documents if len(each) == length])
        positions = torch.arange(length).expand(ids.shape)
        loss_of(local(input_ids=ids, position_ids=positions, use_cache=False).logits).backward()
    return [parameter.grad for parameter in local.parameters()]


def train(
    model: Any, rank: int, cluster: Cluster, job: str, placement: str, *, in_turns: bool
) -> Iterator[list[torch.Tensor | None]]:
    """The gradients of each of STEPS."""
    options = SessionOptions.for_model(
        model,
        control_plane=cluster.address,
        job=job,
        rank=rank,
        n_ranks=N_RANKS,
        placement=placement,
        data_host="127.0.0.1",
        one_host=True,
        profile_dir=cluster.folder,
        probe_bytes=0,
        tolerance=0.02,
    )
    keep_profile(cluster.folder, options.shape)
    ping_pong = PingPong(model, interleave=in_turns)
    # Queries of bidirectional documents need keys of later nano-batches.
    lay = within_nano_batches if options.shape.mask is MaskKind.FULL else in_halves
    with Session.open(options) as session:
        for step, lengths in enumerate(STEPS):
            nano_batches = lay(N_RANKS, *lengths)[rank].nano_batches
            batches = [batch_of(segments, drawn(lengths)) for segments in nano_batches]
            session.submit(RankManifest(step, rank, nano_batches))
            model.zero_grad()
            with session.step(step):
                losses = [loss_of(output.logits) for output in ping_pong(batches)]
                torch.stack(losses).sum().backward()
            yield [
                None if parameter.grad is None else parameter.grad.clone()
                for parameter in model.parameters()
            ]


def with_checkpoints(model: Any) -> None:
    """Of each layer; what is in it does not train, which adds noise to some experts."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def config_of(family: str) -> PretrainedConfig:
    """Without dropout, which layers under checkpoints would draw."""
    config = tiny_config(family, wide_windows=documented()[family].kind == WINDOWS)
    for name, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


@pytest.mark.parametrize(
    ("family", "placement", "checkpointed"),
    [
        (family, *SETTINGS[number % len(SETTINGS)])
        for number, family in enumerate(sorted(set(served_families()) - SLOW))
    ],
)
def test_gradients_of_both_ranks_are_those_of_the_documents(
    pool_of_four: Cluster, family: str, placement: str, checkpointed: bool
) -> None:
    config = config_of(family)
    local = make_model(config, "eager")
    models: list[Any] = [make_model(config, "distca") for _ in range(N_RANKS)]
    for model in models:
        model.load_state_dict(local.state_dict())
        if checkpointed and model.supports_gradient_checkpointing:
            with_checkpoints(model)
    job = f"{family}-{placement}".replace("_", "-").replace(".", "-")

    def run(rank: int) -> list[list[torch.Tensor | None]]:
        steps = train(models[rank], rank, pool_of_four, job, placement, in_turns=checkpointed)
        return list(steps)

    with ThreadPoolExecutor(N_RANKS) as threads:
        ranks = [threads.submit(run, rank) for rank in range(N_RANKS)]
        found = [rank.result(300) for rank in ranks]
    names = [name for name, _ in local.named_parameters()]
    for step, lengths in enumerate(STEPS):
        right = expected_gradients(local, lengths)
        largest = max(float(each.abs().max()) for each in right if each is not None)
        for name, expected, *mine in zip(
            names, right, *(rank[step] for rank in found), strict=True
        ):
            gradients = [each for each in mine if each is not None]
            if expected is None:
                assert not any(each.any() for each in gradients), (lengths, name)
                continue
            total = sum(gradients, torch.zeros_like(expected))
            # float32 through two layers; sums that cancel are compared with a thousandth of the
            # largest gradient.
            scale = max(float(expected.abs().max()), 1e-3 * largest)
            error = float((total - expected).abs().max()) / scale
            assert error < 1e-3, f"{lengths[:8]}: {name} differs by {error:.1e}"
