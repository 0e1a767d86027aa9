"""A trainer process from its settings to its report."""

from __future__ import annotations

import hashlib
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from transformers import PretrainedConfig, PreTrainedModel

import trainer_client.models.transformers
from control_plane.jobs.job_spec import planning_options
from control_plane.planner.planning import PlanningOptions
from core_attention.pipelining import Pipelining
from distca.contract.settings import (
    ClientTls,
    IntegritySettings,
    PlanRequest,
    RankTimeouts,
    values_of,
)
from distca.data.packing import BatchShape, PackedStep
from distca.data.settings import DataSettings
from distca.errors import SettingsError, VerificationError
from distca.process.interrupt import StopRequest
from distca.report.display import TrainingDisplay
from distca.report.page import write_report
from distca.report.record import RunRecord, StepRecord
from distca.report.step_log import StepLog
from distca.run_folder import RunFolder
from distca.shapes import local_shape
from distca.train.checkpoint import (
    Checkpoint,
    CheckpointKeeper,
    list_checkpoints,
    load_newest,
    set_aside,
)
from distca.train.device import (
    choose_device,
    collect_garbage,
    keep_what_is_built,
    prepare_process,
)
from distca.train.feed import Feed
from distca.train.model import (
    ServedAttention,
    build_model,
    describe_model,
    model_config,
    served_attention,
)
from distca.train.observer import Observer
from distca.train.parallelism import TENSOR, Parallelism
from distca.train.pipeline_layout import PipelineLayout, pipeline_layout
from distca.train.pipeline_trainer import PipelineStages, PipelineTrainer
from distca.train.ranks import RankEnvironment, check_agreement, process_group, sum_over_ranks
from distca.train.settings import (
    Homes,
    ModelSettings,
    PlanSettings,
    ServiceSettings,
    Sharding,
    TrainingSettings,
    check_together,
)
from distca.train.stages import StageModule
from distca.train.tensor_parallel import TensorParallel, check_plan
from distca.train.timeline import readable_timeline
from distca.train.trainer import StepResult, Trainer
from distca.train.verify import Difference, Verifier
from trainer_client import Session, SessionOptions
from trainer_client.options import Placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainerRun:
    """All settings of one trainer process."""

    ranks: RankEnvironment
    service: ServiceSettings
    data: DataSettings
    model: ModelSettings
    training: TrainingSettings
    plan: PlanSettings
    integrity: IntegritySettings
    tls: ClientTls


def run_trainer(run: TrainerRun, console: Console) -> bool:
    """Trains to the end of the run, or until a signal asks to stop; saves and reports.

    Returns:
        Whether all steps were done.

    Raises:
        DistcaError, SessionError, distca.contract.rpc.RpcError: what went wrong, in words.
    """
    began = datetime.now().isoformat(timespec="seconds")
    check_together(run.data, run.training, run.plan.homes, run.service.placement)
    parallelism = Parallelism.of(run.training, run.ranks.n_ranks)
    feed = Feed(
        run.data,
        _batch_shape(run, parallelism.n_replicas),
        planned_homes=_planned_homes(run),
    )
    config = model_config(run.model, feed.max_document_tokens)
    layout = pipeline_layout(run.training, parallelism.n_replicas, config.num_hidden_layers)
    check_plan(config, run.training.tensor_parallel)
    device = choose_device(run.service.device, run.ranks.local_rank)
    run = replace(run, training=chosen(run.training, run.model, device))
    timeout = run.service.collective_timeout_seconds
    prepare_process(device)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        # Before anything that waits for others: a model that cannot be trained ends every rank.
        model, served = _model_to_train(run, config, device)
        stack.enter_context(process_group(run.ranks, timeout, device))
        identity = {**feed.identity, "seed": run.data.seed, "model": _model_identity(config)}
        check_agreement(
            {
                **identity,
                "steps": run.training.steps,
                "device": device.type,
                "sharding": str(run.training.sharding),
                "tensor parallel": run.training.tensor_parallel,
                "pipeline": None if layout is None else layout.identity,
            }
        )
        parts = _Parts(run, parallelism, config, model, served, device)
        stages = None if layout is None else parts.stages(layout)
        pipelining = None if stages is None else stages.pipelining
        options = session_options(run, served, device, parallelism, pipelining)
        session = stack.enter_context(Session.open(options))
        trainer = parts.trainer(stages, session)
        loop = _Loop(run, feed, config, trainer, served, session, identity, stop, console, device)
        finished = loop.train()
        record = loop.record(began, finished=finished)
    if run.ranks.rank == 0:
        _write_report(record, RunFolder(run.service.run_dir))
        loop.checkpoints.require_last()
    if record.verification is not None and not record.verification.passed:
        raise VerificationError(
            f"loss differs from local attention's by {record.verification.loss:.1e} (allowed "
            f"{record.verification.loss_tolerance:.0e}), gradients by "
            f"{record.verification.gradient:.1e} (allowed "
            f"{record.verification.gradient_tolerance:.0e}) in {record.verification.parameter}"
        )
    return finished


def chosen(
    training: TrainingSettings,
    model: ModelSettings,
    device: torch.device,
) -> TrainingSettings:
    """``training`` with what the user left open: the learning rate follows the model; weights are
    spread and layers recomputed where memory is dear."""
    on_gpu = device.type == "cuda"
    sharding, checkpointing = training.sharding, training.activation_checkpointing
    return replace(
        training,
        learning_rate=training.learning_rate or model.default_learning_rate,
        sharding=sharding or (Sharding.FSDP if on_gpu else Sharding.REPLICATED),
        activation_checkpointing=on_gpu if checkpointing is None else checkpointing,
    )


def _model_to_train(
    run: TrainerRun, config: PretrainedConfig, device: torch.device
) -> tuple[PreTrainedModel, ServedAttention]:
    model = build_model(
        config,
        attention=trainer_client.models.transformers.IMPLEMENTATION,
        # Sharded weights are float32, and gathered in the dtype of the run.
        dtype="float32" if run.training.sharding is Sharding.FSDP else run.model.dtype,
        seed=run.data.seed,
        device=device,
    )
    served = served_attention(model, run.model.dtype)
    return model, replace(served, shape=local_shape(served.shape, run.training.tensor_parallel))


class _Parts:
    """The model that is trained, divided among the ranks.

    Args:
        run: all settings.
        parallelism: of the run.
        config: of the model.
        model: whole; it is changed in place.
        served: its core attention, with the heads of one rank.
        device: of the model.
    """

    def __init__(
        self,
        run: TrainerRun,
        parallelism: Parallelism,
        config: PretrainedConfig,
        model: PreTrainedModel,
        served: ServedAttention,
        device: torch.device,
    ) -> None:
        self._run, self._parallelism, self._config = run, parallelism, config
        self._model, self._served, self._device = model, served, device
        self._mesh = parallelism.mesh(device.type)

    def stages(self, layout: PipelineLayout) -> PipelineStages:
        """The stages of this rank, cut out of the model and, if there are several, of copies."""
        run, config, n_calls = self._run, self._config, self._served.n_layers
        if n_calls != config.num_hidden_layers:
            raise SettingsError(
                f"model type {config.model_type!r} calls core attention {n_calls} times in "
                f"{config.num_hidden_layers} layers; --pipeline-stages needs one call a layer"
            )
        modules: dict[int, StageModule] = {}
        shared: list[TensorParallel] = []
        for stage in layout.stages_of(self._parallelism.pipeline_rank(run.ranks.rank)):
            whole = _model_to_train(run, config, self._device)[0] if modules else self._model
            shared += self._shared(whole)
            modules[stage] = StageModule(
                whole,
                layout.layers_of(stage),
                run.training.loss_chunk_tokens,
            )
        return PipelineStages(
            layout,
            self._parallelism,
            self._mesh,
            run.ranks.rank,
            modules,
            shared,
            run.training,
            self._device,
            config.get_text_config().hidden_size,
        )

    def trainer(self, stages: PipelineStages | None, session: Session) -> Trainer | PipelineTrainer:
        """What trains the model, or this rank's stages of it."""
        run = self._run
        dtype = getattr(torch, run.model.dtype)
        if stages is not None:
            return PipelineTrainer(stages, session, dtype)
        return Trainer(
            self._model,
            session,
            run.training,
            dtype,
            self._parallelism,
            self._mesh,
            tensor_parallel=next(iter(self._shared(self._model)), None),
        )

    def _shared(self, model: PreTrainedModel) -> list[TensorParallel]:
        """``model``, spread over tensor-parallel ranks; empty without."""
        if self._parallelism.tensor_parallel == 1:
            return []
        return [TensorParallel(model, self._mesh[TENSOR])]


def _write_report(record: RunRecord, folder: RunFolder) -> None:
    """Writes record and report; that they cannot be written does not undo the training."""
    try:
        record.save(folder.record)
        write_report(record, folder.report, folder.figures)
    except OSError as error:
        logger.warning("the report in %s cannot be written: %s", folder.root, error)


def _batch_shape(run: TrainerRun, n_ranks: int) -> BatchShape:
    """Sizes of a step's batch."""
    training = run.training
    return BatchShape(
        n_ranks=n_ranks,
        n_nano_batches=training.step_nano_batches,
        nano_batch_tokens=training.nano_batch_tokens,
        span_ranks=run.data.span_ranks,
        cut_documents=run.data.cut_documents,
    )


def _planned_homes(run: TrainerRun) -> PlanningOptions | None:
    """Options of planned homes, or None if documents stay where packing puts them."""
    if run.plan.homes is Homes.PACKED:
        return None
    return planning_options(
        tolerance=run.plan.tolerance,
        min_forward_tokens=run.plan.min_forward_tokens,
        min_backward_tokens=run.plan.min_backward_tokens,
    )


def session_options(
    run: TrainerRun,
    served: ServedAttention,
    device: torch.device,
    parallelism: Parallelism,
    pipelining: Pipelining | None = None,
) -> SessionOptions:
    """How this rank joins the job, which is named for the run."""
    return SessionOptions(
        control_plane=run.service.control_plane,
        job=RunFolder(run.service.run_dir).name,
        rank=run.ranks.rank,
        n_ranks=run.ranks.n_ranks,
        n_layers=served.n_layers if pipelining is None else pipelining.max_layers,
        n_nano_batches=run.training.step_nano_batches,
        pipelining=pipelining,
        tensor_parallel_ranks=parallelism.group(run.ranks.rank),
        shape=served.shape,
        softmax_scale=served.softmax_scale,
        placement=Placement(run.service.placement),
        device=str(device),
        # Gathering sharded weights keeps the ranks together, if that is layer by layer.
        kept_forward_ticks=(
            3 if run.training.sharding is Sharding.FSDP and pipelining is None else None
        ),
        data_host=run.service.rows_host,
        transport=run.service.transport,
        one_host=run.service.one_host,
        collective_timeout_seconds=run.service.collective_timeout_seconds,
        min_gigabytes_per_second=run.service.min_gigabytes_per_second,
        metrics_port=_metrics_port(run),
        **values_of(RankTimeouts, run.service),
        **values_of(PlanRequest, run.plan),
        **values_of(IntegritySettings, run.integrity),
        **values_of(ClientTls, run.tls),
    )


def _metrics_port(run: TrainerRun) -> int | None:
    """The port of this rank: consecutive on a host, unless any free one will do."""
    first = run.service.metrics_port
    return first if not first else first + run.ranks.local_rank


class _Loop:
    """The steps of one process, and what is kept of them."""

    def __init__(
        self,
        run: TrainerRun,
        feed: Feed,
        config: PretrainedConfig,
        trainer: Trainer | PipelineTrainer,
        served: ServedAttention,
        session: Session,
        identity: dict[str, Any],
        stop: StopRequest,
        console: Console,
        device: torch.device,
    ) -> None:
        self._run = run
        self._device = device
        self._feed = feed
        self._config = config
        self._session = session
        self._identity = identity
        self._stop = stop
        self._folder = RunFolder(run.service.run_dir)
        self._log = StepLog(self._folder.step_log)
        self.checkpoints = CheckpointKeeper(self._folder.checkpoints)
        # Where the rank's rows are in the batch: in its replica's part, of which it has a copy.
        self._parallelism = Parallelism.of(run.training, run.ranks.n_ranks)
        self._home, self._copy = divmod(run.ranks.rank, self._parallelism.copies)
        self._trainer = trainer
        self._n_parameters = trainer.n_parameters
        verifies = self._home if self._copy == 0 else -1
        self._verifier = (
            Verifier(config, run.model.dtype, feed.corpus, verifies, device)
            if run.training.verify
            else None
        )
        self._display = TrainingDisplay(console, "training", run.training.steps)
        self._observer = Observer(
            session.fetch_step,
            self._log,
            served.shape,
            session.options.n_layers,
            show=self._display.show,
        )
        self._submitted: dict[int, PackedStep] = {}
        self._next_to_submit = 0

    @property
    def _leads(self) -> bool:
        return self._run.ranks.rank == 0

    def train(self) -> bool:
        """Runs all steps that are left; returns False when it was stopped before the last."""
        first = self._resume() if self._resumes() else 0
        if self._leads:
            if not first:
                set_aside(self._folder.checkpoints)
            self._log.forget_from(first)
        done = self._next_to_submit = first
        keep_what_is_built(self._device)
        with self._display:
            for step in range(first, self._run.training.steps):
                self._train_step(step)
                done = step + 1
                if self._agree_to_stop():
                    break
                if done % self._run.training.checkpoint_every == 0:
                    self._save(done)
            if self._leads:
                self._observer.finish()
        self._save(done)
        # A run that is resumed may have gone further than it is asked to.
        return done >= self._run.training.steps

    def record(self, began: str, *, finished: bool) -> RunRecord:
        """What is known of the run; complete on rank 0 only."""
        run = self._run
        return RunRecord(
            name=self._folder.name,
            mode=run.service.placement,
            finished=finished,
            began=began,
            model=describe_model(self._config),
            parameters=self._n_parameters,
            dtype=run.model.dtype,
            data=self._feed.description,
            n_ranks=run.ranks.n_ranks,
            n_nano_batches=run.training.step_nano_batches,
            tokens_per_rank=run.training.tokens_per_rank,
            steps=self._log.read() if self._leads else (),
            detail=self._observer.detail,
            verification=self._verifier.result if self._verifier else None,
            device=self._device.type,
        )

    def _train_step(self, step: int) -> None:
        self._submit_until(step + self._run.plan.steps_ahead)
        collect_garbage(self._device)
        packed = self._submitted.pop(step)
        batches = self._feed.batches(packed, self._home)
        began = time.perf_counter()
        result = self._trainer.run(packed, batches)
        ran_seconds = time.perf_counter() - began
        difference = None
        if self._verifier is not None and self._run.training.is_verified(step):
            difference = self._verifier.compare(self._trainer, packed, result.loss)
        began = time.perf_counter()
        norm = self._trainer.update(step)
        seconds = ran_seconds + time.perf_counter() - began
        if self._leads:
            self._observer.step_done(
                self._step_record(step, result, norm, seconds, difference),
                readable_timeline(result.trace),
            )

    def _step_record(
        self,
        step: int,
        result: StepResult,
        norm: float,
        seconds: float,
        difference: Difference | None,
    ) -> StepRecord:
        record = StepRecord(
            step=step,
            loss=result.loss,
            gradient_norm=norm,
            tokens=self._feed.shape.step_tokens,
            step_seconds=seconds,
            wait_seconds=result.report.exposed_seconds,
        )
        if difference is None:
            return record
        return replace(
            record, loss_difference=difference.loss, gradient_difference=difference.gradient
        )

    def _submit_until(self, end: int) -> None:
        """Hands in the manifests of all steps before ``end`` that were not yet."""
        end = min(end, self._run.training.steps)
        for step in range(self._next_to_submit, end):
            packed = self._feed.packed(step)
            manifest = packed.rank_manifest(
                self._home, copy=self._copy, n_copies=self._parallelism.copies
            )
            self._session.submit(manifest)
            self._submitted[step] = packed
        self._next_to_submit = max(self._next_to_submit, end)

    def _agree_to_stop(self) -> bool:
        """Whether any rank was asked to stop: then all stop after the same step."""
        (asked,) = sum_over_ranks(float(self._stop.requested))
        return asked > 0

    def _resumes(self) -> bool:
        """Whether a checkpoint is to be taken up. Ranks whose folder holds other checkpoints than
        the first one's, or none, are named by :meth:`_resume` or here."""
        training = self._run.training
        if training.resume or not training.resume_or_start:
            return training.resume
        found = bool(list_checkpoints(self._folder.checkpoints))
        check_agreement({"has a checkpoint": found})
        return found

    def _resume(self) -> int:
        """Takes up the newest checkpoint; returns the step to go on with."""
        checkpoint = load_newest(self._folder.checkpoints, self._identity)
        check_agreement({"checkpoint": checkpoint.steps_done})
        self._trainer.load_state(checkpoint.model, checkpoint.optimizer)
        logger.info("resumed after %d steps", checkpoint.steps_done)
        return checkpoint.steps_done

    def _save(self, steps_done: int) -> None:
        model, optimizer = self._trainer.state()
        if self._leads:
            self.checkpoints.save(Checkpoint(steps_done, self._identity, model, optimizer))
        # Nobody goes on, or leaves, before it is written.
        dist.barrier()


def _model_identity(config: PretrainedConfig) -> str:
    """Sixteen hexadecimal digits that differ between configurations."""
    return hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
