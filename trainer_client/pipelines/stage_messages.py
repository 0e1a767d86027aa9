"""Messages between stages that arrive at once, whatever the receiving rank does.

A send or a receive of NCCL keeps a device until the other side has come. With core attention served
that side may need this very rank to come: it waits for attention from this rank's server, whose
first call of a CUDA function, or first launch of a kernel, waits for the device. Then nobody goes
on. So a sender says on the host that it has all that it sends, and a thread of the receiver, which
waits for nothing else, posts the receive: neither kernel waits for what the other rank's stage
does.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer_client.errors import SessionError
from trainer_client.step.lane import current_step

_FORWARD, _BACKWARD = 0, 1
_UNSENT = 2
"""So many messages to a rank may be under way before the stage's stream waits for the oldest."""
_LISTENING = timedelta(days=1)
"""A rank that needs a message has a deadline; one that only listens must not end the job."""
_PARTING_SECONDS = 5.0
"""How long a rank that gives up waits until its neighbours have done so, too."""
_GIVEN_UP = -1
"""Stands for a stage: nothing more comes in this step."""


_BETWEEN_STEPS = -1
"""The number of a step for an evaluation that nobody has planned."""


class _Message(NamedTuple):
    kind: int
    stage: int
    microbatch: int


class StageMessages:
    """The messages of a rank's stages. To be made by all ranks of ``torch.distributed`` together.

    Between steps of its pipeline, stages send and receive as PyTorch has them do.

    Args:
        timeout_seconds: how long a stage waits for a message before the rank gives up.
        stages: ``PipelineStage`` objects of this rank; methods are replaced on the objects.
        n_microbatches: of a step.
        device: of the messages.
    """

    def __init__(
        self,
        timeout_seconds: float,
        stages: Sequence[Any],
        n_microbatches: int,
        device: torch.device,
    ) -> None:
        self._timeout_seconds, self._n_microbatches = timeout_seconds, n_microbatches
        self._device = device
        self._indices, self._first = [stage.stage_index for stage in stages], stages[0]
        self._rank = dist.get_rank()
        self._signals = dist.new_group(backend="gloo", timeout=_LISTENING)
        # Messages of one group to a rank keep their order; those of different groups need none. A
        # group has messages of one kind to higher ranks, or to lower ones, so that none waits for
        # one that waits for it.
        self._groups = [
            [dist.new_group(timeout=timedelta(seconds=timeout_seconds)) for _ in range(2)]
            for _ in (_FORWARD, _BACKWARD)
        ]
        # Not safe among threads: a communicator of NCCL, which some settings have a group share.
        self._posting = [[threading.Lock() for _ in range(2)] for _ in (_FORWARD, _BACKWARD)]
        self._on_gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._on_gpu else None
        self._is_connected = self._in_step = self._is_open = False
        self._step = _running_step()
        self._failed_step: int | None = None
        # What no action has waited for yet; the works of each, once they are posted.
        self._arriving: dict[_Message, Future[list[Any]]] = {}
        self._listeners: list[threading.Thread] = []
        self._told: list[tuple[Any, torch.Tensor]] = []
        self._sending: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)
        self._receives: dict[tuple[int, int], Callable[[int], list[Any]]] = {}
        for stage in stages:
            self._watch(stage)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run all stages in the block for one step, that of the session which runs."""
        if self._failed_step is not None:
            # Ranks have sent what nobody received, and a wait for that would have no end.
            raise SessionError(
                f"step {self._failed_step} failed on this rank; end the job, and resume it from a "
                "checkpoint"
            )
        for work, _ in self._told:
            # Those of the step before, which have arrived.
            work.wait()
        self._told.clear()
        self._sending.clear()
        self._arriving.clear()
        self._listeners.clear()
        self._is_open, self._in_step = False, True
        self._step = _running_step()
        try:
            if not self._is_connected:
                self._connect()
                self._is_connected = True
            yield
            self._check_all_ran()
        except BaseException:
            self._failed_step = self._step
            self._give_up()
            raise
        finally:
            self._in_step = False
        for sent in self._sending.values():
            _wait(work for works in sent for work in works)

    def _check_all_ran(self) -> None:
        if self._arriving:
            kind, stage, microbatch = min(self._arriving)
            what = "backward" if kind == _BACKWARD else "forward"
            raise SessionError(
                f"the step ended before the {what} pass of stage {stage} for microbatch "
                f"{microbatch}; run all of the schedule in one step's block"
            )

    def _give_up(self) -> None:
        """Notify the ranks that listen, and wait for those that this one listens to: a thread that
        still listens when the interpreter ends would abort the process."""
        told = torch.tensor([_GIVEN_UP, 0, self._step])
        for index in self._indices:
            for kind, receiver in ((_FORWARD, index + 1), (_BACKWARD, index - 1)):
                if (peer := self._peer(receiver)) is not None:
                    # Who has ended hears nothing.
                    with suppress(RuntimeError):
                        self._told.append((self._signals.send([told], peer, kind), told))
        deadline = time.monotonic() + _PARTING_SECONDS
        for listener in self._listeners:
            listener.join(max(deadline - time.monotonic(), 0.0))

    def _connect(self) -> None:
        """All ranks meet, and neighbours exchange a first message of each kind: that connects them,
        for which a device must be idle."""
        self._meet()
        for boundary in range(self._first.num_stages - 1):
            lower, upper = self._rank_of(boundary), self._rank_of(boundary + 1)
            if lower == upper or self._rank not in (lower, upper):
                continue
            for kind, sender, receiver in (
                (_FORWARD, lower, upper),
                (_BACKWARD, upper, lower),
            ):
                first = torch.zeros(1, device=self._device)
                group, _ = self._group(kind, sender, receiver)
                if self._rank == sender:
                    _wait([dist.isend(first, receiver, group)])
                else:
                    _wait([dist.irecv(first, sender, group)])
        if self._on_gpu:
            torch.cuda.synchronize(self._device)
        # No receive may keep a device while others still connect.
        self._meet()

    def _meet(self) -> None:
        """All ranks come here, on the host."""
        options = dist.BarrierOptions()
        # dist.barrier would go by the default group's device, a GPU.
        options.device = torch.device("cpu")
        self._signals.barrier(options).wait(timedelta(seconds=self._timeout_seconds))

    def _watch(self, stage: Any) -> None:
        index = stage.stage_index
        self._receives[_FORWARD, index] = stage.get_fwd_recv_ops
        self._receives[_BACKWARD, index] = stage.get_bwd_recv_ops
        for kind, to, name in (
            (_FORWARD, index + 1, "get_fwd_send_ops"),
            (_BACKWARD, index - 1, "get_bwd_send_ops"),
        ):
            setattr(stage, name, self._sent_here(getattr(stage, name), kind, to))
        for kind, receives, runs in (
            (_FORWARD, "get_fwd_recv_ops", "forward_one_chunk"),
            (_BACKWARD, "get_bwd_recv_ops", "backward_one_chunk"),
        ):
            setattr(stage, receives, self._received_here(getattr(stage, receives)))
            setattr(stage, runs, self._after_its_message(getattr(stage, runs), kind, index))

    def _sent_here(
        self, method: Callable[[int], list[Any]], kind: int, to: int
    ) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def send(microbatch: int) -> list[Any]:
            operations = method(microbatch)
            if not self._in_step:
                return operations
            self._open()
            if operations:
                self._send(_Message(kind, to, microbatch), operations)
            return []

        return send

    def _received_here(self, method: Callable[[int], list[Any]]) -> Callable[[int], list[Any]]:
        @functools.wraps(method)
        def receive(microbatch: int) -> list[Any]:
            if not self._in_step:
                return method(microbatch)
            self._open()
            return []

        return receive

    def _after_its_message(self, method: Callable[..., Any], kind: int, stage: int) -> Any:
        @functools.wraps(method)
        def run(chunk: int, *args: Any, **kwargs: Any) -> Any:
            if self._in_step:
                self._open()
                self._await(_Message(kind, stage, chunk))
            return method(chunk, *args, **kwargs)

        return run

    def _open(self) -> None:
        """Has messages received from now on. PyTorch has found out shapes by its first call."""
        if self._is_open:
            return
        self._is_open = True
        expected: dict[tuple[int, int], dict[_Message, list[Any]]] = defaultdict(dict)
        for index in self._indices:
            for kind, sender in ((_FORWARD, index - 1), (_BACKWARD, index + 1)):
                if (peer := self._peer(sender)) is None:
                    continue
                for microbatch in range(self._n_microbatches):
                    if operations := self._receives[kind, index](microbatch):
                        message = _Message(kind, index, microbatch)
                        expected[kind, peer][message] = operations
                        self._arriving[message] = Future()
        if self._stream is not None:
            # What used the buffers in the step before is over by then.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for (kind, peer), messages in expected.items():
            futures = {message: self._arriving[message] for message in messages}
            listener = threading.Thread(
                target=self._receive,
                args=(kind, peer, messages, futures),
                name=f"distca-stage-messages-{peer}",
                daemon=True,
            )
            self._listeners.append(listener)
            listener.start()

    def _receive(
        self,
        kind: int,
        peer: int,
        expected: dict[_Message, list[Any]],
        left: dict[_Message, Future[list[Any]]],
    ) -> None:
        """Posts the receives of a step's messages from ``peer`` as they come, in its order, until
        none is left.

        Args:
            expected: PyTorch's operations of each message, not posted yet.
            left: what is to get the works of each.
        """
        group, posting = self._group(kind, peer, self._rank)
        try:
            with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
                while left:
                    told = torch.zeros(3, dtype=torch.int64)
                    self._signals.recv([told], peer, kind).wait()
                    stage, microbatch, step = told.tolist()
                    if stage == _GIVEN_UP:
                        # Maybe one that this rank has ended: all had come that it needed.
                        raise RuntimeError(f"rank {peer} has given up step {step}")
                    if step != self._step:
                        raise RuntimeError(_of_another_step(peer, step, self._step))
                    message = _Message(kind, stage, microbatch)
                    with posting:
                        posted = [
                            dist.irecv(operation.tensor, operation.peer, group)
                            for operation in expected[message]
                        ]
                    left.pop(message).set_result(posted)
        except Exception as error:
            for future in left.values():
                future.set_exception(error)

    def _await(self, message: _Message) -> None:
        arriving = self._arriving.pop(message, None)
        if arriving is None:
            return
        peer = self._peer(message.stage + (1 if message.kind == _BACKWARD else -1))
        lacking = (
            f"rank {peer} of the pipeline has not sent what stage {message.stage} needs for "
            f"microbatch {message.microbatch}"
        )
        try:
            _wait(arriving.result(self._timeout_seconds))
        except TimeoutError as error:
            raise SessionError(
                f"{lacking} within {self._timeout_seconds:.0f} s; its log says why"
            ) from error
        except RuntimeError as error:
            raise SessionError(f"{lacking}: {error}; its log says why") from error

    def _send(self, message: _Message, operations: Sequence[Any]) -> None:
        (peer,) = {operation.peer for operation in operations}
        told = torch.tensor([message.stage, message.microbatch, self._step])
        # Ranks of the group are those of the job: it is made of all.
        self._told.append((self._signals.send([told], peer, message.kind), told))
        sending = self._sending[message.kind, peer]
        if len(sending) == _UNSENT:
            _wait(sending.popleft())
        group, posting = self._group(message.kind, self._rank, peer)
        with posting:
            sending.append([dist.isend(each.tensor, peer, group) for each in operations])

    def _group(
        self, kind: int, sender: int, receiver: int
    ) -> tuple[dist.ProcessGroup, threading.Lock]:
        is_upward = sender < receiver
        return self._groups[kind][is_upward], self._posting[kind][is_upward]

    def _peer(self, stage: int) -> int | None:
        """The rank of a neighbouring stage; None if there is none, or it is this rank's."""
        if not 0 <= stage < self._first.num_stages:
            return None
        rank = self._rank_of(stage)
        return None if rank == self._rank else rank

    def _rank_of(self, stage: int) -> int:
        group: Any = self._first.group or dist.group.WORLD
        return dist.get_global_rank(group, self._first.stage_index_to_group_rank[stage])


def _wait(works: Any) -> None:
    """On a GPU, the current stream waits."""
    for work in works:
        work.wait()


def _running_step() -> int:
    """The number of the caller's step; -1 outside of one."""
    running = current_step.get()
    return _BETWEEN_STEPS if running is None else running.step


def _of_another_step(peer: int, step: int, own: int) -> str:
    """Says that ``peer``, a rank of ``torch.distributed``, has sent what is of ``step``, and not
    what this rank needs in step ``own``."""
    return (
        f"rank {peer} sent tensors of {_name(step)}, and this rank runs {_name(own)}; end the job, "
        "and resume it from a checkpoint"
    )


def _name(step: int) -> str:
    return "an evaluation outside of steps" if step == _BETWEEN_STEPS else f"step {step}"
