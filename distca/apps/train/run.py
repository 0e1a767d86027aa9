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
from distca.apps.data.packing import BatchShape, PackedStep
from distca.apps.data.settings import DataSettings, Homes
from distca.apps.report.display import TrainingDisplay
from distca.apps.report.observer import Observer
from distca.apps.report.page import write_report
from distca.apps.report.readable_timeline import readable_timeline
from distca.apps.report.record import RunRecord, TrainingStep
from distca.apps.report.step_log import StepLog
from distca.apps.train.checkpoint import (
    Checkpoint,
    CheckpointKeeper,
    load_newest,
    set_aside,
)
from distca.apps.train.device import (
    choose_device,
    collect_garbage,
    keep_what_is_built,
    prepare_process,
)
from distca.apps.train.feed import Feed
from distca.apps.train.model import build_model, check_packed, describe_model, model_config
from distca.apps.train.ranks import RankEnvironment, check_agreement, process_group, sum_over_ranks
from distca.apps.train.settings import (
    ModelSettings,
    PlanSettings,
    ServiceSettings,
    Sharding,
    TrainingSettings,
    check_together,
)
from distca.apps.train.trainer import Trainer
from distca.apps.train.verify import Verifier
from distca.contract.settings import (
    ClientTls,
    IntegritySettings,
    PlanRequest,
    RankTimeouts,
    values_of,
)
from distca.errors import VerificationError
from distca.process.interrupt import StopRequest
from distca.run_folder import RunFolder, list_checkpoints
from trainer_client import Session, SessionOptions

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
    feed = Feed(run.data, _batch_shape(run), planned_homes=_planned_homes(run))
    config = model_config(run.model, feed.max_document_tokens)
    device = choose_device(run.service.device, run.ranks.local_rank)
    run = replace(run, training=chosen(run.training, run.model, device))
    timeout = run.service.collective_timeout_seconds
    prepare_process(device)
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        # Before anything that waits for others: a model that cannot be trained ends every rank.
        model = _model_to_train(run, config, device)
        options = _session_options(run, model, device)
        stack.enter_context(process_group(run.ranks, timeout, device))
        identity = {**feed.identity, "seed": run.data.seed, "model": _model_identity(config)}
        check_agreement(
            {
                **identity,
                "steps": run.training.steps,
                "device": device.type,
                "sharding": str(run.training.sharding),
            }
        )
        session = stack.enter_context(Session.open(options))
        trainer = Trainer(model, session, run.training, getattr(torch, run.model.dtype))
        loop = _Loop(run, feed, config, trainer, session, identity, console)
        finished = loop.train(stop)
        record = loop.record(began, finished=finished)
    if run.ranks.rank == 0:
        _write_report(record, RunFolder(run.service.run_dir))
        loop.checkpoints.require_last()
    verified = record.verification
    if verified is not None and not verified.passed:
        raise VerificationError(
            f"local attention differs by {verified.loss:.1e} of the loss (allowed "
            f"{verified.loss_tolerance:.0e}) and {verified.gradient:.1e} of gradients (allowed "
            f"{verified.gradient_tolerance:.0e}), in {verified.parameter}"
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
) -> PreTrainedModel:
    model = build_model(
        config,
        attention=trainer_client.models.transformers.IMPLEMENTATION,
        # Sharded weights are float32, and gathered in the dtype of the run.
        dtype="float32" if run.training.sharding is Sharding.FSDP else run.model.dtype,
        seed=run.data.seed,
        device=device,
    )
    check_packed(model)
    return model


def _write_report(record: RunRecord, folder: RunFolder) -> None:
    """Writes record and report; that they cannot be written does not undo the training."""
    try:
        record.save(folder.record)
        write_report(record, folder.report, folder.figures)
    except OSError as error:
        logger.warning("the report in %s cannot be written: %s", folder.root, error)


def _batch_shape(run: TrainerRun) -> BatchShape:
    training = run.training
    return BatchShape(
        n_ranks=run.ranks.n_ranks,
        n_nano_batches=training.nano_batches,
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


def _session_options(
    run: TrainerRun, model: PreTrainedModel, device: torch.device
) -> SessionOptions:
    """The options by which this rank joins the job, which has the run's name."""
    dtype = getattr(torch, run.model.dtype)
    with torch.autocast(device.type, dtype, enabled=model.dtype != dtype):
        return SessionOptions.for_model(
            model,
            control_plane=run.service.control_plane,
            job=RunFolder(run.service.run_dir).name,
            rank=run.ranks.rank,
            n_ranks=run.ranks.n_ranks,
            n_nano_batches=run.training.nano_batches,
            placement=run.service.placement,
            # Gathering sharded weights keeps the ranks together.
            kept_forward_ticks=3 if run.training.sharding is Sharding.FSDP else None,
            data_host=run.service.rows_host,
            transport=run.service.transport,
            one_host=run.service.one_host,
            replace=run.service.replace,
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
        trainer: Trainer,
        session: Session,
        identity: dict[str, Any],
        console: Console,
    ) -> None:
        self._run = run
        self._rank = run.ranks.rank
        self._device = trainer.model.device
        self._feed = feed
        self._config = config
        self._session = session
        self._identity = identity
        self._folder = RunFolder(run.service.run_dir)
        self._log = StepLog(self._folder.step_log)
        self.checkpoints = CheckpointKeeper(self._folder.checkpoints)
        self._trainer = trainer
        self._verifier: Verifier | None = None
        if run.training.verify:
            dtype = run.model.dtype
            self._verifier = Verifier(config, dtype, feed.corpus, self._rank, self._device)
        self._display = TrainingDisplay(console, "training", run.training.steps)
        self._observer = Observer(
            session.fetch_step, self._log, session.options.n_layers, show=self._display.show
        )
        self._submitted: dict[int, PackedStep] = {}
        self._next_to_submit = 0

    def train(self, stop: StopRequest) -> bool:
        """Runs all steps that are left; returns False when it was stopped before the last."""
        first = self._resume()
        if self._rank == 0:
            if not first:
                set_aside(self._folder.checkpoints)
            self._log.forget_from(first)
        done = self._next_to_submit = first
        keep_what_is_built(self._device)
        with self._display:
            for step in range(first, self._run.training.steps):
                self._train_step(step)
                done = step + 1
                if _agree_to_stop(stop):
                    break
                if done % self._run.training.checkpoint_every == 0:
                    self._save(done)
            if self._rank == 0:
                self._observer.finish()
        self._save(done)
        # A run that is resumed may have gone further than it is asked to.
        return done >= self._run.training.steps

    def record(self, began: str, *, finished: bool) -> RunRecord:
        """The record of the run; complete on rank 0 only."""
        run = self._run
        return RunRecord(
            name=self._folder.name,
            mode=run.service.placement,
            finished=finished,
            began=began,
            model=describe_model(self._config),
            parameters=self._trainer.n_parameters,
            dtype=run.model.dtype,
            data=self._feed.description,
            n_ranks=run.ranks.n_ranks,
            n_nano_batches=run.training.nano_batches,
            tokens_per_rank=run.training.tokens_per_rank,
            steps=self._log.read() if self._rank == 0 else (),
            detail=self._observer.detail,
            verification=self._verifier.result if self._verifier else None,
            device=self._device.type,
        )

    def _train_step(self, step: int) -> None:
        self._submit_until(step + self._run.plan.steps_ahead)
        collect_garbage(self._device)
        packed = self._submitted.pop(step)
        batches = self._feed.batches(packed, self._rank)
        began = time.perf_counter()
        result = self._trainer.run(packed, batches)
        ran_seconds = time.perf_counter() - began
        if self._verifier is not None and self._run.training.is_verified(step):
            self._verifier.compare(
                packed, result.loss, self._trainer.weights(), self._trainer.gradients()
            )
        began = time.perf_counter()
        norm = self._trainer.update(step)
        seconds = ran_seconds + time.perf_counter() - began
        if self._rank == 0:
            record = TrainingStep(
                step=step,
                loss=result.loss,
                gradient_norm=norm,
                tokens=self._feed.shape.step_tokens,
                step_seconds=seconds,
                wait_seconds=result.report.exposed_seconds,
            )
            self._observer.step_done(record, readable_timeline(result.trace))

    def _submit_until(self, end: int) -> None:
        """Hands in the manifests of all steps before ``end`` that were not yet."""
        end = min(end, self._run.training.steps)
        for step in range(self._next_to_submit, end):
            packed = self._feed.packed(step)
            self._session.submit(packed.rank_manifest(self._rank))
            self._submitted[step] = packed
        self._next_to_submit = max(self._next_to_submit, end)

    def _resume(self) -> int:
        """Takes up the newest checkpoint if one is asked for; returns the step to go on with. Ranks
        whose folders hold other checkpoints than the first one's are named."""
        training, folder = self._run.training, self._folder.checkpoints
        if not training.resume:
            if not training.resume_or_start:
                return 0
            found = bool(list_checkpoints(folder))
            check_agreement({"has a checkpoint": found})
            if not found:
                return 0
        checkpoint = load_newest(folder, self._identity)
        check_agreement({"checkpoint": checkpoint.steps_done})
        self._trainer.load_state(checkpoint.model, checkpoint.optimizer)
        logger.info("resumed after %d steps", checkpoint.steps_done)
        return checkpoint.steps_done

    def _save(self, steps_done: int) -> None:
        model, optimizer = self._trainer.state()
        if self._rank == 0:
            self.checkpoints.save(Checkpoint(steps_done, self._identity, model, optimizer))
        # Nobody goes on, or leaves, before it is written.
        dist.barrier()


def _agree_to_stop(stop: StopRequest) -> bool:
    """Lets all ranks stop after the same step once any of them was asked to."""
    (asked,) = sum_over_ranks(float(stop.requested))
    return asked > 0


def _model_identity(config: PretrainedConfig) -> str:
    """Sixteen hexadecimal digits that differ between configurations."""
    return hashlib.sha256(config.to_json_string(use_diff=False).encode()).hexdigest()[:16]
