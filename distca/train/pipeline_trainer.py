"""One rank's training in a pipeline: its stages, the order that they run in, and one optimiser."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from core_attention.pipelining import Pipelining
from distca.data.batch import TokenBatch
from distca.data.packing import PackedStep
from distca.errors import CheckpointError, DivergenceError
from distca.train.checkpoint import is_by_number
from distca.train.layers import checkpoint_layers, compile_layers
from distca.train.parallelism import REPLICA, STAGE, Parallelism, replica_mesh
from distca.train.pipeline_layout import PipelineLayout
from distca.train.ranks import sum_over_ranks
from distca.train.settings import Sharding, TrainingSettings
from distca.train.sharding import by_mesh, clip_gradients, squared_norm, whole
from distca.train.stages import StageModule
from distca.train.tensor_parallel import TensorParallel
from distca.train.trainer import StepResult
from trainer_client import (
    Pipeline,
    Session,
    defer_weights,
    measure_stages,
    prepare_fsdp,
)
from trainer_client.pipelines.deferred_weights import DeferredWeights
from trainer_client.pipelines.pipelining import runtime_of


class PipelineStages:
    """The stages of this rank before a session is open, and the groups of its pipeline.

    Args:
        layout: of the job.
        parallelism: of the run.
        mesh: its ranks.
        rank: this one.
        modules: by stage, those of this rank.
        tensor_parallel: what has spread them over tensor-parallel ranks; empty without.
        settings: batch and optimiser; ``sharding`` and ``activation_checkpointing`` are given.
        device: of the modules.
        width: of hidden states.

    Attributes:
        deferred: by stage, what computes gradients of weights apart, where the schedule has
            backwards in two parts.
        pipelining: what the session needs to know.
    """

    def __init__(
        self,
        layout: PipelineLayout,
        parallelism: Parallelism,
        mesh: DeviceMesh,
        rank: int,
        modules: dict[int, StageModule],
        tensor_parallel: Sequence[TensorParallel],
        settings: TrainingSettings,
        device: torch.device,
        width: int,
    ) -> None:
        self.layout, self.modules, self.settings, self.device = layout, modules, settings, device
        self.tensor_parallel = tensor_parallel
        self.replicas, self.group = replica_mesh(mesh, settings), mesh[STAGE].get_group()
        self.replica_group = mesh[REPLICA].get_group()
        self.tied_group = self._make_tied_groups(parallelism, rank)
        self.deferred: dict[int, DeferredWeights] = {}
        for stage, module in modules.items():
            if layout.schedule.has_backwards_in_parts:
                self.deferred[stage] = defer_weights(module)
            if settings.compile_layers:
                compile_layers(module.layers)
            if settings.activation_checkpointing:
                checkpoint_layers(module.layers)
        shape = (settings.nano_batches, settings.nano_batch_tokens)
        runs = {
            stage: (module, partial(_run_alone, module, shape, width, device, stage == 0))
            for stage, module in modules.items()
        }
        seconds = measure_stages(runs, layout.schedule.n_stages, math.prod(shape))
        self.pipelining = Pipelining(
            schedule=layout.schedule,
            pipeline_ranks=layout.pipeline_ranks,
            layers=layout.layers,
            **seconds._asdict(),
        )

    def _make_tied_groups(self, parallelism: Parallelism, rank: int) -> Any:
        """Of the first and the last stage's ranks, which share a weight."""
        last = self.layout.schedule.rank_of_stage[-1]
        if not last:
            return None
        own = None
        for first in range(parallelism.n_ranks):
            if parallelism.pipeline_rank(first):
                continue
            members = [first, first + last * parallelism.tensor_parallel]
            group = dist.new_group(members)
            same_share = (rank - first) % parallelism.tensor_parallel == 0
            if same_share and parallelism.replica(rank) == parallelism.replica(first):
                own = group
        return own


def _run_alone(
    module: StageModule, shape: tuple[int, int], width: int, device: torch.device, is_first: bool
) -> torch.Tensor:
    ids = torch.zeros(shape, dtype=torch.int64, device=device)
    positions = torch.arange(shape[1], device=device).expand(shape)
    given = ids
    if not is_first:
        dtype = next(module.parameters()).dtype
        given = torch.zeros(*shape, width, dtype=dtype, device=device, requires_grad=True)
    output: torch.Tensor = module(given, position_ids=positions, labels=ids)
    return output


class PipelineTrainer:
    """A model in stages, under data-parallel training of whole pipelines.

    Args:
        stages: of this rank.
        session: this rank's membership in the job.
        compute_dtype: of sharded models' activations; others compute in their weights' dtype.
    """

    def __init__(
        self,
        stages: PipelineStages,
        session: Session,
        compute_dtype: torch.dtype,
    ) -> None:
        self._stages, self._session, self._settings = stages, session, stages.settings
        self._scale = 1.0
        layout, modules = stages.layout, stages.modules
        wrapped = {stage: self._wrap(module, compute_dtype) for stage, module in modules.items()}
        self._pipeline_stages = [
            PipelineStage(
                module,
                stage,
                layout.schedule.n_stages,
                stages.device,
                group=stages.group,
                dw_builder=stages.deferred.get(stage),
            )
            for stage, module in wrapped.items()
        ]
        self._schedule = self._make_schedule()
        self._pipeline = Pipeline(session, *self._pipeline_stages)
        self._modules = nn.ModuleDict({str(stage): m.model for stage, m in modules.items()})
        self._optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(self._modules.parameters())],
            lr=self._settings.learning_rate_at(0),
            betas=(0.9, 0.95),
            weight_decay=self._settings.weight_decay,
            fused=stages.device.type == "cuda",
        )

    @property
    def n_parameters(self) -> int:
        """Of the whole model; all ranks call it."""
        own = sum(parameter.numel() for _, parameter in self._own_parameters())
        (total,) = sum_over_ranks(float(own))
        layout = self._stages.layout
        return round(total) // (layout.n_replicas * layout.tensor_parallel)

    def run(self, packed: PackedStep, batches: list[TokenBatch]) -> StepResult:
        """Forward and backward of one step; leaves the gradients of all replicas in the stages.

        Args:
            packed: the step, whose manifest has been submitted.
            batches: this replica's nano-batches.

        Raises:
            SessionError: core attention failed; see ``Session.step``.
        """
        self._optimizer.zero_grad()
        n_replicas = self._stages.layout.n_replicas
        # Gradients are averaged over the replicas, but each has only its own share of the sum.
        self._scale = n_replicas / packed.predicted_tokens
        ids, positions, labels = (
            torch.cat([getattr(batch, name) for batch in batches]).to(self._stages.device)
            for name in ("input_ids", "position_ids", "labels")
        )
        losses: list[torch.Tensor] = []
        is_first = 0 in self._stages.modules
        with self._pipeline.step(packed.step) as running:
            self._schedule.step(
                *([ids] if is_first else []),
                target=labels,
                losses=losses,
                return_outputs=False,
                position_ids=positions,
                labels=labels,
            )
        for shared in self._stages.tensor_parallel:
            shared.share_gradients()
        if self._averages_gradients:
            self._average_gradients()
        self._share_tied_gradients()
        assert running.report is not None
        own = sum(float(loss.detach()) for loss in losses) / n_replicas
        own /= self._stages.layout.tensor_parallel
        (total,) = sum_over_ranks(own)
        return StepResult(total, running.report, running.trace)

    def update(self, step: int) -> float:
        """Clips the gradients of all stages by one norm and updates the weights; returns the norm
        before clipping.

        Raises:
            DivergenceError: the norm is not finite, so the weights would be lost.
        """
        squares = squared_norm(parameter for _, parameter in self._own_parameters())
        total = torch.tensor([squares], dtype=torch.float64, device=self._stages.device)
        dist.all_reduce(total, group=self._stages.group)
        norm = float(total.sqrt())
        if not math.isfinite(norm):
            raise DivergenceError(
                f"step {step}: the gradients' norm is {norm}; lower --learning-rate"
            )
        clip_gradients(self._modules.parameters(), norm, self._settings.max_gradient_norm)
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.learning_rate_at(step)
        self._optimizer.step()
        return norm

    def weights(self) -> dict[str, torch.Tensor]:
        """All of the whole model, on every rank. All ranks call it."""
        names = self._names()
        own = {names[name]: whole(p).cpu() for name, p in self._modules.named_parameters()}
        return self._of_pipeline(own)

    def gradients(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """Those of all parameters, on every rank. All ranks call it."""
        names = self._names()
        own = {
            names[name]: None if p.grad is None else whole(p.grad).cpu()
            for name, p in self._own_parameters()
        }
        yield from self._of_pipeline(own).items()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Whole state dicts of model and optimiser for the first rank to save, by the whole model's
        names. All ranks call it."""
        model, optimizer = self._own_state()
        names = self._names(model)
        own = (
            {names[name]: tensor for name, tensor in model.items()},
            {names[name]: state for name, state in optimizer["state"].items()},
        )
        every: list[Any] = [None] * self._stages.layout.n_ranks
        dist.all_gather_object(every, own, self._stages.group)
        models, optimizers = (
            {k: v for each in every for k, v in each[at].items()} for at in (0, 1)
        )
        return models, {"state": optimizers}

    def load_state(self, model: dict[str, Any], optimizer: dict[str, Any]) -> None:
        """Takes up what :meth:`state` gave the first rank, of this run or of one without stages.

        Raises:
            CheckpointError: it does not say whose moments it has.
        """
        if is_by_number(optimizer):
            raise CheckpointError(
                "the checkpoint numbers the parameters whose moments it has, as version 0.1 saved "
                "them, and stages need their names: go on without --pipeline-stages until the "
                "next checkpoint"
            )
        own_model, own = self._own_state()
        names = self._names(own_model)
        set_state_dict(
            self._modules,
            self._optimizer,
            model_state_dict={name: self._kept(model, names[name]) for name in own_model},
            optim_state_dict={
                "state": {
                    name: self._kept(optimizer["state"], names[name]) for name in own["state"]
                },
                "param_groups": own["param_groups"],
            },
            options=_WHOLE,
        )

    def _kept(self, state: dict[str, Any], name: str) -> Any:
        """Of the whole model's parameter ``name``; without stages a tied weight is kept once."""
        tied = next(iter(self._stages.modules.values())).tied_names
        names = (name, *(tied if name in tied else ()))
        return state[next((each for each in names if each in state), name)]

    def _own_state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        state: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(
            self._modules, self._optimizer, options=_WHOLE
        )
        return state

    @property
    def _is_sharded(self) -> bool:
        """Whether FSDP2 has the replicas: DistributedDataParallel knows no weights that are spread
        over other ranks."""
        return self._settings.sharding is Sharding.FSDP or bool(self._stages.tensor_parallel)

    @property
    def _averages_gradients(self) -> bool:
        """Whether gradients are shared after the step: DistributedDataParallel would reduce them
        before those of weights are there."""
        has_replicas = self._stages.layout.n_replicas > 1
        return bool(self._stages.deferred) and has_replicas and not self._is_sharded

    def _wrap(self, module: StageModule, compute_dtype: torch.dtype) -> nn.Module:
        """The module with replicas that share its gradients."""
        if self._is_sharded:
            policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
            for layer in module.layers:
                fully_shard(layer, mesh=self._stages.replicas, mp_policy=policy)
            fully_shard(module, mesh=self._stages.replicas, mp_policy=policy)
            prepare_fsdp(module)
            return module
        if self._stages.layout.n_replicas == 1 or self._averages_gradients:
            return module
        return DistributedDataParallel(module, process_group=self._stages.replica_group)

    def _make_schedule(self) -> Any:
        return runtime_of(
            self._stages.layout.schedule,
            self._pipeline_stages,
            loss_fn=lambda losses, labels: losses.sum() * self._scale,
            scale_grads=False,
        )

    def _tied_weight(self) -> nn.Parameter | None:
        found = [m.tied_weight for m in self._stages.modules.values() if m.tied_weight is not None]
        return found[0] if found and self._stages.tied_group is not None else None

    def _average_gradients(self) -> None:
        """Over the replicas, as DistributedDataParallel does."""
        for parameter in self._modules.parameters():
            if parameter.requires_grad:
                total = _sum_gradient(parameter, self._stages.replica_group)
                total /= self._stages.layout.n_replicas

    def _share_tied_gradients(self) -> None:
        """Embedding and head are one weight: each gets the sum of both gradients."""
        weight = self._tied_weight()
        if weight is not None:
            _sum_gradient(weight, self._stages.tied_group)

    def _own_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that count here: a tied weight counts on the first stage."""
        tied = self._tied_weight() if 0 not in self._stages.modules else None
        for name, parameter in self._modules.named_parameters():
            if parameter is not tied:
                yield name, parameter

    def _names(self, known: dict[str, Any] | None = None) -> dict[str, str]:
        """By names in the stages of this rank, those in the whole model."""
        every = known or dict(self._modules.named_parameters())
        names = {}
        for name in every:
            stage, _, own = name.partition(".")
            names[name] = self._stages.modules[int(stage)].whole_name(own)
        return names

    def _of_pipeline(self, own: dict[str, Any]) -> dict[str, Any]:
        every: list[Any] = [None] * self._stages.layout.n_ranks
        dist.all_gather_object(every, own, self._stages.group)
        return {name: tensor for each in every for name, tensor in each.items()}


def _sum_gradient(parameter: nn.Parameter, group: Any) -> torch.Tensor:
    """Sums a gradient over ``group``, zeros where there is none; returns this rank's part of it."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    grad = parameter.grad
    own: torch.Tensor = grad.to_local() if isinstance(grad, DTensor) else grad
    dist.all_reduce(own, group=group)
    return own


_WHOLE = StateDictOptions(full_state_dict=True)
