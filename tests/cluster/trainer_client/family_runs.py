"""A tiny model of any family, trained by ranks with real servers: in threads on a CPU, in processes
on GPUs, where ranks of one process would share the thread of autograd."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from core_attention.ca_task import MaskKind
from core_attention.manifest import RankManifest, Segment
from tests.cluster.trainer_client.model_sweep import make_model
from tests.support.cluster import Cluster, keep_profile, on_this_host
from tests.support.cut_manifests import in_halves, whole_on_ranks, within_nano_batches
from tests.support.loops import PingPong
from tests.support.model_options import options_for
from tests.support.tiny_models import VOCABULARY
from trainer_client import Session, SessionOptions
from trainer_client.models.transformers import check_documents

Gradients = Mapping[str, np.ndarray]
"""float32, by the names of parameters; without those that got none."""

N_RANKS = 2
STEPS: tuple[tuple[int, ...], ...] = (
    # Windows of tiny models have six keys: lengths 1, W - 1, W and W + 1, and others.
    (9, 1, 5, 21, 6, 7, 15),
    # One document over all ranks and nano-batches.
    (53,),
    # Hundreds of tiny ones.
    (1, 2, 3) * 70,
)
"""Lengths of the documents of each step."""

_MAKING = threading.Lock()
"""transformers changes torch's global defaults while it makes a model."""


@dataclass(frozen=True)
class FamilyRun:
    """What both ranks do: a step with each of ``steps``.

    Attributes:
        config: of the model.
        weights: file of its state.
        control_plane: its address.
        profiles: folder where servers look for cost profiles.
        job: its name.
        placement: of the session.
        checkpointed: whether with checkpoints and ping-pong.
        dtype: of weights and activations.
        devices: of the ranks.
        steps: lengths of the documents of each.
    """

    config: PreTrainedConfig
    weights: Path
    control_plane: str
    profiles: Path
    job: str
    placement: str
    checkpointed: bool
    dtype: torch.dtype = torch.float32
    devices: tuple[str, ...] = ("cpu",) * N_RANKS
    steps: tuple[tuple[int, ...], ...] = STEPS


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Layers under checkpoints train, so they would draw."""
    for name, value in config.to_dict().items():
        if isinstance(value, float) and "drop" in name:
            setattr(config, name, 0.0)
    return config


def job_name(family: str, placement: str) -> str:
    return f"{family}-{placement}".replace("_", "-").replace(".", "-")


def train_ranks(ranks: Sequence[Executor], run: FamilyRun) -> list[list[Gradients]]:
    """The gradients of each step, by rank; each rank by an executor of its own."""
    futures = [executor.submit(train_rank, run, rank) for rank, executor in enumerate(ranks)]
    return [future.result(300) for future in futures]


def train_rank(run: FamilyRun, rank: int) -> list[Gradients]:
    device = run.devices[rank]
    with _MAKING:
        model: Any = make_model(run.config, "distca")
    model.load_state_dict(torch.load(run.weights))
    model.to(device, run.dtype)
    if run.checkpointed and model.supports_gradient_checkpointing:
        _checkpoint_layers(model)
    calls = check_documents(model).calls
    shares = len({(c.shape, c.scale, bool(c.kind.chunk)) for c in calls}) == 1
    is_hybrid = len({c.kind.is_full for c in calls}) == 2
    options = options_for(
        model,
        serve_windows=shares and is_hybrid,
        control_plane=run.control_plane,
        job=run.job,
        rank=rank,
        n_ranks=N_RANKS,
        placement=run.placement,
        **on_this_host(run.profiles),
        tolerance=0.02,
    )
    keep_profile(run.profiles, options.shape, device)
    # Layers at home need their documents whole.
    lay = in_halves if shares else whole_on_ranks
    if options.shape.mask is MaskKind.FULL:
        # Queries need keys of later nano-batches.
        lay = within_nano_batches
    return list(_steps(run, model, options, lay))


def _steps(
    run: FamilyRun,
    model: nn.Module,
    options: SessionOptions,
    lay: Callable[..., list[RankManifest]],
) -> Iterator[Gradients]:
    ping_pong = PingPong(model, interleave=run.checkpointed)
    with Session.open(options) as session:
        for step, lengths in enumerate(run.steps):
            nano_batches = lay(N_RANKS, *lengths)[options.rank].nano_batches
            batches = [_batch(segments, lengths, options.device) for segments in nano_batches]
            session.submit(RankManifest(step, options.rank, nano_batches))
            model.zero_grad()
            with session.step(step):
                if losses := [loss_of(output.logits) for output in ping_pong(batches)]:
                    torch.stack(losses).sum().backward()
            yield gradients_of(model)


def _checkpoint_layers(model: Any) -> None:
    """What is in a layer does not train, which adds noise to some experts."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for module in model.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.training = True


def _documents(lengths: Sequence[int]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(len(lengths))
    return [torch.randint(8, VOCABULARY, (n,), generator=generator) for n in lengths]


def _batch(segments: Sequence[Segment], lengths: Sequence[int], device: str) -> dict[str, Any]:
    """Arguments of the model; without rows if there are no ``segments``."""
    documents = _documents(lengths)
    ids, positions = [torch.zeros(0, dtype=torch.int64)], [torch.zeros(0, dtype=torch.int64)]
    for segment in segments:
        begin, end = segment.offset, segment.offset + segment.length
        ids.append(documents[segment.document_id][begin:end])
        positions.append(torch.arange(begin, end))
    return {
        "input_ids": torch.cat(ids)[None].to(device),
        "position_ids": torch.cat(positions)[None].to(device),
        "use_cache": False,
    }


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    """One to which every row and every logit adds."""
    weights = torch.linspace(0.5, 1.5, logits.shape[-1], device=logits.device)
    return (logits.double() * weights).sin().sum()


def gradients_of(model: nn.Module) -> Gradients:
    return {
        name: parameter.grad.float().cpu().numpy().copy()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def distance(mine: Gradients, exact: Gradients) -> float:
    """Norm of the difference of all gradients that both have, relative to that of ``exact``."""
    shared = mine.keys() & exact.keys()
    assert shared
    off, whole = (
        sum(float(np.square(each, dtype=np.float64).sum()) for each in rows)
        for rows in (
            [mine[name] - exact[name] for name in shared],
            [exact[name] for name in shared],
        )
    )
    return float(np.sqrt(off / whole))


def gradients_alone(local: PreTrainedModel, lengths: Sequence[int]) -> Gradients:
    """With transformers' own attention, each document in a row of its own."""
    local.zero_grad()
    documents = _documents(lengths)
    for length in sorted(set(lengths)):
        ids = torch.stack([each for each in documents if len(each) == length]).to(local.device)
        positions = torch.arange(length, device=local.device).expand(ids.shape)
        loss_of(local(input_ids=ids, position_ids=positions, use_cache=False).logits).backward()
    return gradients_of(local)


def keep_weights(local: PreTrainedModel, folder: Path) -> Path:
    path = folder / "weights.pt"
    torch.save(local.state_dict(), path)
    return path


def run_on(
    cluster: Cluster,
    config: PreTrainedConfig,
    weights: Path,
    family: str,
    placement: str,
    **more: Any,
) -> FamilyRun:
    """Of servers of ``cluster``."""
    return FamilyRun(
        config,
        weights,
        cluster.address,
        cluster.folder,
        job_name(family, placement),
        placement,
        **more,
    )
