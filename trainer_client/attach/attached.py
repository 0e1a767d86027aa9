"""The one door: a model is attached once, and its user's own loop trains it.

Each forward with gradients is a step of the job, with its backward: its documents are read when it
comes, and lie in one of the job's nano-batches, by turns, so that several steps may be open. A step
ends with the backward pass that computes its last gradients, or when its graph is gone.
"""

from __future__ import annotations

import builtins
import functools
import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.util import Finalize
from types import TracebackType
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist
from torch import nn

from distca.contract.checks import check_range
from trainer_client.attach.open_steps import OpenSteps
from trainer_client.attach.own_forwards import OwnForwards
from trainer_client.attach.scalars import balance_of
from trainer_client.attach.served_decoder import ServedDecoder, holds_transformers
from trainer_client.environment import options_of_environment, with_own_port
from trainer_client.errors import SessionClosed, SessionError
from trainer_client.models.entrance import open_door
from trainer_client.options import SessionOptions
from trainer_client.session import Session

OPEN_STEPS = 4
"""Forward passes whose backward passes have not come yet."""


def attach(
    model: nn.Module,
    *,
    control_plane: str | None = None,
    job: str | None = None,
    placement: str | None = None,
    open_steps: int = OPEN_STEPS,
    turns: int = 1,
    serve_windows: bool = False,
    **options: Any,
) -> Attached:
    """Serves the core attention of ``model`` from its next forward with gradients on. The ranks of
    the job are those of ``torch.distributed``; all attach their models in the same order.

    Args:
        model: holds one model of transformers with ``attn_implementation="distca"``; whatever is
            wrapped around it may come before or after.
        control_plane: ``host:port``.
        job: its name; None: ``DISTCA_JOB``, or else the id of torchrun's run.
        placement: pool, in-place or mixed; in-place by default.
        open_steps: forward passes that may wait for their backward passes at a time.
        turns: parts of a forward's rows that take turns inside a decoder of transformers, so that
            one computes while the rows of another travel: 2 for pools and slow links.
        serve_windows: whether servers compute layers with windows as well, for documents that
            ranks share; otherwise each rank computes them itself.
        options: of :class:`trainer_client.SessionOptions`. Those that are not given, and the
            above, are read from the environment: ``DISTCA_CONTROL_PLANE``, ``DISTCA_TLS_CA``, ...

    Raises:
        ValueError: no control plane is named, ``model`` holds no model that asks for served
            attention, or several.
    """
    given = {"control_plane": control_plane, "job": job, "placement": placement, **options}
    known = {name: value for name, value in given.items() if value is not None}
    if serve_windows:
        known["serve_windows"] = True
    return Attached(model, open_steps, turns, {**_of_environment(), **known})


def _of_environment() -> dict[str, Any]:
    job = os.environ.get("DISTCA_JOB") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    if job == "none":
        # As torchrun calls each run that was given no id: its port tells runs of a host apart.
        job = f"run-{os.environ.get('MASTER_PORT', os.getpid())}"
    return {"job": job, **options_of_environment()}


class Attached:
    """A model whose core attention is served; made by :func:`attach`. A context manager."""

    _all: ClassVar[list[Attached]] = []

    def __init__(
        self, model: nn.Module, open_steps: int, turns: int, options: dict[str, Any]
    ) -> None:
        if "control_plane" not in options:
            raise SessionError(
                "no control plane is named: set DISTCA_CONTROL_PLANE=host:port, call "
                "distca.attach(model, control_plane=...), or set DISTCA_OFF=1 to compute at home"
            )
        if any(getattr(each, "_is_replica", False) for each in model.modules()):
            raise SessionError(
                "torch.nn.DataParallel runs several GPUs in one process; start one process a GPU "
                "by torchrun"
            )
        number = len(Attached._all)
        job = options.pop("job")
        job = f"{job}.{number}" if number else job
        check_range("turns", turns, 1, 2)
        if options.get("cut_documents") and turns != 2:
            raise SessionError(f"cut_documents=True cuts rows in two, and turns is {turns}")
        self._options = {**with_own_port(options, number), "n_nano_batches": open_steps * turns}
        self._job, self._n_opened, self._turns = job, 0, turns
        self._steps: OpenSteps | None = None
        self._asleep = self._closed = False
        if holds_transformers(model):
            ServedDecoder(model, self._open, turns)
        elif turns == 1 and "serve_windows" not in options:
            OwnForwards(model, self._open)
        else:
            raise SessionError(
                f"{type(model).__name__} holds no model of transformers; leave turns and "
                "serve_windows out"
            )
        Attached._all.append(self)
        _Exit.watch()

    @property
    def session(self) -> Session | None:
        """The session that serves it; None before its first forward, asleep and once closed."""
        return None if self._steps is None else self._steps.session

    def close(self, error: str = "") -> None:
        """Leaves the job; the model's forwards raise from then on. Idempotent.

        Args:
            error: why, for the other ranks; empty when training is done.
        """
        self._closed = True
        self._leave(error)

    def sleep(self) -> None:
        """Leaves the job and frees its memory until :meth:`wake`, on all ranks alike."""
        self._asleep = True
        self._leave("")

    def wake(self) -> None:
        """The next forward with gradients joins the job again, on all ranks alike."""
        self._asleep = False

    def scalars(
        self, *, flops_per_token: float | None = None, peak_flops: float | None = None
    ) -> dict[str, float]:
        """Figures for a logger: ``wandb.log(attached.scalars())``. Empty without a session.

        ``distca/tokens_per_second`` and ``distca/mfu`` are of this rank since the last call; the
        others of the latest step that all ranks have reported: ``step_seconds``; ``wait_seconds``,
        in which core attention held up a rank; ``imbalance``, max over mean busy seconds of the
        servers, and ``home_imbalance`` if nothing had moved; ``saved_seconds``, by which the
        busiest would have been busier.

        Args:
            flops_per_token: FLOPs of the model for a token in a step without attention, 6 for each
                parameter that it uses; attention is counted from the documents.
            peak_flops: FLOP/s of a device, by its data sheet; with the above, MFU is known.
        """
        if self._steps is None:
            return {}
        session = self._steps.session
        rates = self._steps.throughput.take(session.options, flops_per_token, peak_flops)
        step = session.last_step()
        return rates if step is None else {**rates, **balance_of(step)}

    def __enter__(self) -> Attached:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        """Leaves the job, at its end or with an error."""
        if self.session is not None and error is not None:
            with suppress(SessionClosed):
                self.session.await_cause(error)
        self.close(_reason(error))

    def _leave(self, error: str) -> None:
        steps, self._steps = self._steps, None
        if steps is not None:
            steps.close(error)

    def _open(self, complete: Callable[[dict[str, Any]], dict[str, Any]]) -> OpenSteps:
        """The steps. Opened at the first forward: the model is then on its device and as it is
        trained, and ranks that share its weights come here together."""
        if self._closed or self._asleep:
            state = "closed" if self._closed else "asleep; call wake() on all ranks first"
            raise SessionError(f"the attached model is {state}")
        _Exit.asked = None
        if self._steps is None:
            rank, n_ranks = _place()
            # After a sleep under another name: other ranks may not have left the job yet.
            job = f"{self._job}-{self._n_opened}" if self._n_opened else self._job
            self._n_opened += 1
            given = {"rank": rank, "n_ranks": n_ranks, "job": job, **self._options}
            options = complete(given)
            self._steps = OpenSteps(Session.open(SessionOptions(**options)), self._turns)
        return self._steps


def _place() -> tuple[int, int]:
    """This rank, and the number of ranks."""
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if (started := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise SessionError(
            f"{started} processes were started, and this one would train by itself; call "
            "torch.distributed.init_process_group before the first forward"
        )
    return 0, 1


def _reason(error: object) -> str:
    """The reason of an end with ``error``, for the other ranks; empty if its training is done."""
    if error is None or (isinstance(error, SystemExit) and not error.code):
        return ""
    return f"{type(error).__name__}: {error}"


def log_scalars(
    trainer: Any, *, flops_per_token: float | None = None, peak_flops: float | None = None
) -> None:
    """Adds the scalars of the attached model to each training log of a ``Trainer`` of
    transformers, before its loggers, its printed lines and its history get it.

    Args:
        trainer: whose ``log`` is replaced on the object.
        flops_per_token, peak_flops: see :meth:`Attached.scalars`.
    """
    own = trainer.log

    @functools.wraps(own)
    def log(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        opened = [each for each in Attached._all if each.session is not None]
        if opened and "loss" in logs and trainer.is_world_process_zero():
            figures = {"flops_per_token": flops_per_token, "peak_flops": peak_flops}
            logs = {**logs, **opened[0].scalars(**figures)}
        own(logs, *args, **kwargs)

    trainer.log = log


class _Exit:
    """Leaves all jobs when the process ends, or ``torch.distributed`` does, with the error if one
    ends it.

    Python forgets an exit code before anything is called, so each ``sys.exit``, ``exit`` and
    ``quit`` is noted; the next forward shows that the process went on. A bare ``raise SystemExit``
    leaves no trace.
    """

    asked: SystemExit | None = None
    _watched = False

    @classmethod
    def watch(cls) -> None:
        """From now on. Idempotent."""
        if cls._watched:
            return
        cls._watched = True
        os.register_at_fork(after_in_child=Attached._all.clear)
        # At the end of a process of multiprocessing, while the error that ends it is at hand.
        Finalize(None, cls._leave, exitpriority=0)
        # Nothing public is called before executors are ended, which sessions need to leave.
        untyped: Any = threading
        untyped._register_atexit(cls._leave)
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(module, name):
                setattr(module, name, cls._noting(getattr(module, name)))
        for module in (dist, dist.distributed_c10d):
            untyped = module
            untyped.destroy_process_group = cls._leaving(module.destroy_process_group)

    @classmethod
    def _leave(cls) -> None:
        error = sys.exc_info()[1] or getattr(sys, "last_value", None) or cls.asked
        for attached in Attached._all:
            attached._end(error)

    @classmethod
    def _noting(cls, exit_: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
        @functools.wraps(exit_)
        def noted(code: Any = None, /) -> NoReturn:
            if threading.current_thread() is threading.main_thread():
                cls.asked = SystemExit(code)
            exit_(code)

        return noted

    @classmethod
    def _leaving(cls, destroy: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(destroy)
        def destroy_process_group(*args: Any, **kwargs: Any) -> None:
            if not any(args) and not any(kwargs.values()):
                cls._leave()
            destroy(*args, **kwargs)

        return destroy_process_group


open_door.append(attach)
