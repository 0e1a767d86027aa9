"""The ``Trainer`` of transformers, and what is made of it, such as TRL's ``SFTTrainer``.

:func:`serve_trainer` has a trainer train with served core attention, in turns of two nano-batches.
It changes nothing of the trainer's own: batches, loss, gradient accumulation, clipping, evaluation
and checkpoints are the library's. Three of its methods are wrapped while the block lasts: batches
are fetched some ahead, and their manifests submitted; each ``training_step`` is a step of the
session; and the model's decoder splits the packed row
(:mod:`trainer_client.models.whole_rows`).
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.utils.data import IterableDataset
from transformers import Trainer

import trainer_client.models.transformers  # noqa: F401  # registers the implementation
from core_attention.errors import ManifestError
from distca.contract.checks import check_count
from trainer_client.errors import SessionError
from trainer_client.loops.feed import LastBatch, manifest_of_step
from trainer_client.loops.fsdp import prepare_fsdp
from trainer_client.models.probe import probe_model
from trainer_client.models.whole_rows import turns_inside
from trainer_client.session import Session
from trainer_client.session_options import SessionOptions


class UnsupportedTrainer(ValueError):
    """A trainer has a setting that served core attention does not go with; names it."""


@contextmanager
def serve_trainer(trainer: Trainer, *, ahead: int = 3, **options: Any) -> Iterator[Session]:
    """Have ``trainer.train()`` in the block train with served core attention. One rank a process.

    Its batches must be packed, one row ``[1, rows]`` with ``position_ids`` that restart at 0, or
    padded, with an ``attention_mask``. In ``evaluate``, ``predict`` and ``generate``
    core attention is computed at home, and so it is in the reference model of DPO and KTO.

    Args:
        trainer: whose model was loaded with ``attn_implementation="distca"``.
        ahead: batches that are fetched beyond the one that is trained on, so that plans are ready.
        options: of :class:`trainer_client.SessionOptions`: ``control_plane`` and ``job`` at least.
            Rank, shape, layers, scale and device are the trainer's.

    Yields:
        The session.

    Raises:
        UnsupportedTrainer: a setting of the trainer is not supported.
        SessionError: the model does not call core attention.
        ValueError: an option is invalid, or the model cannot be served (``UnsupportedModel``).
    """
    check_count("ahead", ahead)
    if trainer in _served_now:
        raise UnsupportedTrainer(
            f"this {type(trainer).__name__} is in a block of serve_trainer already; one is enough"
        )
    _check_settings(trainer)
    assert isinstance(trainer.model, nn.Module)
    session_options = _session_options(trainer, options)
    with ExitStack() as stack:
        session = stack.enter_context(Session.open(session_options))
        stack.enter_context(turns_inside(trainer.model))
        _served_now.add(trainer)
        stack.callback(_served_now.discard, trainer)
        served = _Served(trainer, session, ahead)
        stack.enter_context(_replaced(trainer, "get_batch_samples", served.get_batch_samples))
        stack.enter_context(_replaced(trainer, "training_step", served.training_step))
        yield session


_served_now: WeakSet[Trainer] = WeakSet()


@contextmanager
def _replaced(trainer: Trainer, name: str, wrap: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of the trainer by ``wrap``, which gets the original first."""
    original = getattr(trainer, name)
    own = vars(trainer).get(name)
    setattr(trainer, name, lambda *args, **kwargs: wrap(original, *args, **kwargs))
    try:
        yield
    finally:
        if own is None:
            delattr(trainer, name)
        else:
            setattr(trainer, name, own)


class _Served:
    """The wrapped methods."""

    def __init__(self, trainer: Trainer, session: Session, ahead: int) -> None:
        self._trainer, self._session, self._n_ahead = trainer, session, ahead
        self._batches: _BatchesAhead | None = None
        self._handed_out: list[tuple[int, Any]] = []
        self._prepared = False

    def get_batch_samples(
        self, original: Callable[..., Any], epoch_iterator: Iterator[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The batches of an optimiser's step; later ones are fetched and submitted."""
        if self._batches is None or self._batches.source is not epoch_iterator:
            self._batches = _BatchesAhead(epoch_iterator, self._submit, self._n_ahead)
        self._handed_out.clear()
        self._batches.handed_out = self._handed_out
        return original(self._batches, *args, **kwargs)

    def training_step(
        self, original: Callable[..., Any], model: nn.Module, inputs: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Forward and backward of a batch, as a step of the session."""
        self._prepare(model)
        step = next((step for step, batch in self._handed_out if batch is inputs), None)
        if step is None:
            raise SessionError(
                f"training_step of {type(self._trainer).__name__} is called with a batch that its "
                f"data loader did not give. {_MAKE_BATCHES}"
            )
        with self._session.step(step):
            return original(model, inputs, *args, **kwargs)

    def _submit(self, batch: Any) -> int:
        if not isinstance(batch, Mapping):
            raise ManifestError(
                f"the data loader gives {type(batch).__name__}; give one packed row [1, rows], or "
                f"a batch padded on the right. {_MAKE_BATCHES}"
            )
        rows = ("input_ids", "inputs_embeds", "position_ids", "cu_seq_lens_q")
        if all(batch.get(name) is None for name in rows):
            raise ManifestError(
                f"the data loader gives batches of {', '.join(map(str, batch))}, without "
                f"input_ids. {_MAKE_BATCHES}"
            )
        step = self._session.next_step
        self._session.submit(manifest_of_step(self._session, step, batch))
        return step

    def _prepare(self, model: nn.Module) -> None:
        """The wrapped model, before its first step."""
        if self._prepared:
            return
        self._prepared = True
        if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
            raise UnsupportedTrainer(_FSDP_1)
        if any(isinstance(module, FSDPModule) for module in model.modules()):
            prepare_fsdp(model)


class _BatchesAhead:
    """The batches of an epoch, fetched and submitted ahead.

    Args:
        source: what is fetched from.
        submit: submits a batch's manifest; returns its step.
        n_ahead: how many are fetched beyond the one that is handed out.

    Attributes:
        handed_out: gets (step, batch) of every batch that is handed out.
    """

    def __init__(self, source: Iterator[Any], submit: Callable[[Any], int], n_ahead: int) -> None:
        self.source = source
        self.handed_out: list[tuple[int, Any]] = []
        self._submit, self._n_ahead = submit, n_ahead
        self._fetched: deque[tuple[int, Any]] = deque()
        self._last = LastBatch()

    def __iter__(self) -> _BatchesAhead:
        return self

    def __next__(self) -> Any:
        self._last.used()
        while len(self._fetched) <= self._n_ahead and self._last.may_fetch:
            self._fetched.extend((self._submit(b), b) for b in self._last.fetch(self.source))
        if not self._fetched:
            raise StopIteration
        handed = self._fetched.popleft()
        self.handed_out.append(handed)
        self._last.hand_out(is_last=not self._fetched)
        return handed[1]


def _session_options(trainer: Trainer, options: dict[str, Any]) -> SessionOptions:
    args = trainer.args
    fixed = {"rank": args.process_index, "n_ranks": args.world_size, "device": str(args.device)}
    if given := sorted(fixed.keys() & options.keys()):
        raise ValueError(
            f"{', '.join(given)}: these options follow from the trainer; leave them out"
        )
    # As its steps compute: accelerate wraps the model's forward in autocast.
    assert isinstance(trainer.model, nn.Module)
    with trainer.accelerator.autocast():
        found = probe_model(trainer.model).complete(options)
    return SessionOptions(**{**found, **fixed})


_MAKE_BATCHES = "Trainers that make batches of their own train in 'with trainer_client.at_home():'"

_FSDP_1 = (
    "FSDP1 (FullyShardedDataParallel) is not supported; use FSDP2: fsdp_config={'fsdp_version': 2, "
    "...}, or fsdp_version: 2 in the config of accelerate"
)


def _check_settings(trainer: Trainer) -> None:
    """Refuses settings by name, before anything is opened."""

    args: Any = trainer.args
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    checkpointing = (
        getattr(args, "gradient_checkpointing_kwargs", None)
        or getattr(args, "activation_checkpointing_kwargs", None)
        or {}
    )
    parallel = getattr(trainer.accelerator, "parallelism_config", None)
    sizes = {
        name: getattr(parallel, name, 1) or 1 for name in ("tp_size", "cp_size", "sp_size")
    } | {"tp_size of the model": getattr(trainer.model, "tp_size", None) or 1}
    started = int(os.environ.get("WORLD_SIZE", "1"))
    refusals = [
        (
            args.world_size == 1 < started,
            f"{started} processes were started, and each trains by itself; on machines without "
            "GPUs the trainer is distributed with TrainingArguments(use_cpu=True) only",
        ),
        (
            trainer.is_deepspeed_enabled,
            "DeepSpeed is not supported; use DistributedDataParallel (the default) or FSDP2",
        ),
        (plugin is not None and getattr(plugin, "fsdp_version", 1) != 2, _FSDP_1),
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process (torch.nn.DataParallel) are not supported; start "
            "one process a GPU with torchrun or accelerate launch",
        ),
        (
            args.torch_compile,
            "torch_compile=True compiles the model as a whole, and core attention is outside of "
            "all graphs; leave it out and compile parts of layers yourself (docs/gpu_training.md)",
        ),
        (
            args.auto_find_batch_size,
            "auto_find_batch_size=True begins steps twice, which other ranks do not; leave it out",
        ),
        (
            bool(checkpointing.get("use_reentrant")),
            "gradient_checkpointing_kwargs={'use_reentrant': True} would call core attention "
            "again in the backward pass; set use_reentrant to False",
        ),
        (
            any(size > 1 for size in sizes.values()),
            "only data parallelism is supported, and there is "
            + ", ".join(f"{name}={size}" for name, size in sizes.items() if size > 1),
        ),
        (
            trainer.model_init is not None,
            "model_init makes another model when train() begins, after this one was looked at; "
            "make the model first: Trainer(model_init(), ...)",
        ),
        (_makes_batches(trainer), _MAKE_BATCHES),
        *_refusals_of_batches(trainer),
    ]
    for holds, refusal in refusals:
        if holds:
            raise UnsupportedTrainer(f"{type(trainer).__name__}: {refusal}")


def _makes_batches(trainer: Trainer) -> bool:
    """Return whether rows are made after they were to be planned: of a loader's lists by generation
    (GRPO, RLOO), or of pairs (CPO, ORPO)."""
    kind = type(trainer)
    if hasattr(kind, "concatenated_inputs"):
        return True
    if kind._prepare_inputs is Trainer._prepare_inputs:
        return False
    try:
        return isinstance(trainer.data_collator([{"input_ids": [0]}]), list)
    except Exception:  # it needs more of an example, so it makes something of it
        return False


def _refusals_of_batches(trainer: Trainer) -> list[tuple[bool, str]]:
    """Return whether batches are split over ranks, and what is said of it."""
    args: Any = trainer.args
    config = args.accelerator_config
    return [
        (
            bool(config.split_batches or config.dispatch_batches),
            "accelerator_config has split_batches or dispatch_batches, and a packed row cannot be "
            "split over ranks; set both to False",
        ),
        (
            config.dispatch_batches is None
            and args.world_size > 1
            and isinstance(trainer.train_dataset, IterableDataset),
            f"train_dataset is iterable ({type(trainer.train_dataset).__name__}), and with "
            "dispatch_batches=None accelerate splits its batches over ranks, which cannot be done "
            "with packed rows; set accelerator_config={'dispatch_batches': False}: every rank then "
            "takes batches of its own",
        ),
    ]
