"""The executor: one thread that fuses whatever tasks are ready into kernel calls.

It is the same in a pool server and in a trainer's in-place server. Sources arrive from any thread;
whenever the device is free, the executor takes the ready parts of all ticks of all jobs in the
order in which they became ready and runs as many as fit one call. A source that is late holds up
only the tasks that need it. Parts that only the rank in its own process waits for come last, the
shortest first, and one at a time while others' are to come: their replies have a way to go.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from attention_node.open_tick import OpenTick, Source
from core_attention.ca_task import Phase
from core_attention.checksum import ChecksumMismatch
from core_attention.kernels.protocol import HIGH_PRIORITY, Kernel
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from distca.contract.timeouts import default_seconds

logger = logging.getLogger(__name__)

DEFAULT_FUSE_QK_PAIRS = {"cpu": 8 * 2**20, "cuda": 2**29}
"""The limit by device type: a call that has this many query-key pairs is not made longer: more
would not use the device any better, and would only hold back the replies of what is in it. On an
H200 it runs for 15 ms with 32 heads of 128; an in-place server's calls each wait for a matrix
product to end."""


@dataclass(frozen=True)
class KernelCall:
    """One kernel call, for metrics and traces.

    Attributes:
        phase: forward or backward.
        ticks: the ticks whose parts it fused.
        tasks: CA-tasks in it.
        query_rows: query rows of those tasks.
        qk_pairs: query-key pairs in it.
        begin_seconds, end_seconds: on ``time.perf_counter``'s clock.
    """

    phase: Phase
    ticks: tuple[OpenTick, ...]
    tasks: int
    query_rows: int
    qk_pairs: int
    begin_seconds: float
    end_seconds: float

    @property
    def seconds(self) -> float:
        return self.end_seconds - self.begin_seconds


class _Stopwatch:
    """An integral over time of a level that one thread sets and any thread reads."""

    def __init__(self, level: float) -> None:
        # One tuple, replaced whole, so that a reader never sees half of a change.
        self._state = (0.0, level, time.perf_counter())

    def set(self, level: float, now: float) -> None:
        """The level from ``now`` (``time.perf_counter()``) on."""
        total, before, since = self._state
        self._state = (total + before * (now - since), level, now)

    def add(self, amount: float) -> None:
        """Adds what the level did not show."""
        total, level, since = self._state
        self._state = (total + amount, level, since)

    def read(self) -> float:
        """Level times seconds so far; never falls while the level is 0 or more."""
        total, level, since = self._state
        return total + level * (time.perf_counter() - since)


_Arrival: TypeAlias = tuple[OpenTick, int, Source]
"""A source on its way to the executor's thread: of which tick, and of which rank."""


class _DeviceTimer:
    """Seconds that the kernels of a call take on a GPU, without those that they wait for it: the
    work of others that was there before. A first, tiny kernel ends when the device lets it in."""

    def __init__(self, device: torch.device) -> None:
        self._begin, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.zeros(1, device=device)
        self._begin.record()

    def stop(self) -> None:
        """After the last kernel was launched."""
        self._end.record()

    def seconds(self) -> float:
        """Once the last kernel has ended."""
        return float(self._begin.elapsed_time(self._end)) / 1e3


class Executor:
    """Runs ready parts on one device, from one thread.

    Args:
        kernel: what runs a batch.
        device: where the tensors live.
        fuse_qk_pairs: work beyond which a call takes no further part; None: by device.
        on_call: called on the executor's thread after each kernel call.

    Attributes:
        kernel_seconds: of all calls so far, without what they waited for other work on the device.
    """

    def __init__(
        self,
        kernel: Kernel,
        device: torch.device,
        *,
        fuse_qk_pairs: int | None = None,
        on_call: Callable[[KernelCall], None] = lambda call: None,
    ) -> None:
        self.kernel = kernel
        self.device = device
        self._fuse_qk_pairs = fuse_qk_pairs or DEFAULT_FUSE_QK_PAIRS[device.type]
        self._on_call = on_call
        self.kernel_seconds = 0.0
        self._events: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._ready: deque[tuple[OpenTick, int]] = deque()
        self._own: deque[tuple[OpenTick, int]] = deque()
        # Since when the thread has been at work without finishing a kernel call.
        self._at_work_since: float | None = None
        self._waiting, self._running, self._resting = (_Stopwatch(level) for level in (0, 0, 1))
        self._thread = threading.Thread(target=self._run, name="distca-executor", daemon=True)
        self._thread.start()
        self._unwritten: queue.SimpleQueue[_Arrival | None] = queue.SimpleQueue()
        self._watcher: threading.Thread | None = None

    @property
    def queued_parts(self) -> int:
        """Parts that are ready and not yet run, and sources that came during a call and may make
        more of them ready."""
        return self._n_ready + self._events.qsize()

    @property
    def _n_ready(self) -> int:
        return len(self._ready) + len(self._own)

    @property
    def queued_part_seconds(self) -> float:
        """How long parts have waited for the device, from their last source's arrival on, summed
        over them; its rate is the mean number that waits."""
        return self._waiting.read()

    @property
    def busy_seconds(self) -> float:
        """Seconds in kernel calls since the start."""
        return self._running.read()

    @property
    def idle_seconds(self) -> float:
        """Seconds since the start without a kernel call."""
        return self._resting.read()

    @property
    def oldest_ready_seconds(self) -> float:
        """How long there has been work of which none was finished; 0 if there is none."""
        since = self._at_work_since
        return 0.0 if since is None else max(time.monotonic() - since, 0.0)

    def arrive(self, tick: OpenTick, rank: int, source: Source) -> None:
        """Hands in one source of a tick; its callbacks are made on the executor's thread.

        One whose inputs a stream still writes counts as arrived when they are complete: a kernel
        that waited for them would hold up the parts of others, and its time would be no measure of
        the work.
        """
        if source.written is None:
            self._enqueue(tick, rank, source)
            return
        if self._watcher is None:
            self._watcher = threading.Thread(
                target=self._watch, name="distca-executor-inputs", daemon=True
            )
            self._watcher.start()
        self._unwritten.put((tick, rank, source))

    def run_soon(self, action: Callable[[], None]) -> None:
        """Runs ``action``, which must not raise, on the executor's thread between kernel calls."""
        self._events.put(action)

    def give_up(self, tick: OpenTick, error: BaseException) -> None:
        """Ends a tick without results."""
        self._events.put(partial(self._guard, tick, partial(tick.give_up, error)))

    def leave(self, tick: OpenTick, rank: int) -> None:
        """Goes on with a tick without ``rank``, whose rows will not come."""
        self._events.put(partial(self._guard, tick, partial(tick.leave, rank)))

    def close(self, timeout_seconds: float = default_seconds("close_seconds")) -> None:
        """Stops the thread after the call in progress."""
        self._unwritten.put(None)
        self._events.put(None)
        self._thread.join(timeout_seconds)
        if self._thread.is_alive():
            logger.warning(
                "executor still runs a kernel call after %.1f s; leaving it to the process's end",
                timeout_seconds,
            )

    def _run(self) -> None:
        # A stream of its own, so that kernels run beside the trainer's work in-place; before it
        # where both want the device, since other ranks wait for them.
        on_gpu = self.device.type == "cuda"
        stream = torch.cuda.Stream(self.device, HIGH_PRIORITY) if on_gpu else None
        with torch.no_grad(), torch.cuda.stream(stream):
            while self._take_events():
                if self._n_ready:
                    self._run_batch(self._take_batch())
                    self._at_work_since = time.monotonic()

    def _watch(self) -> None:
        """Follows the streams that inputs are written on; they come in order."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while (waiting := self._unwritten.get()) is not None:
            tick, rank, source = waiting
            assert source.written is not None
            try:
                source.written.synchronize()
            except RuntimeError:
                # The device has failed, and so will the kernel, which ends the tick.
                logger.exception("inputs of %s cannot be waited for", tick.tick)
            self._enqueue(tick, rank, source)
            # Its tensors may be the last of their rank for long.
            del waiting, tick, source

    def _enqueue(self, tick: OpenTick, rank: int, source: Source) -> None:
        arrive = partial(self._arrive, tick, rank, source, time.perf_counter())
        self._events.put(partial(self._guard, tick, arrive))

    def _take_events(self) -> bool:
        """Handles all waiting events, blocking only if nothing is ready; False at the end."""
        block = not self._n_ready
        while True:
            if block:
                self._at_work_since = None
            try:
                event = self._events.get(block=block)
            except queue.Empty:
                return True
            if self._at_work_since is None:
                self._at_work_since = time.monotonic()
            if event is None:
                return False
            event()
            block = block and not self._n_ready

    def _arrive(self, tick: OpenTick, rank: int, source: Source, arrived: float) -> None:
        try:
            source.verify()
        except ChecksumMismatch as error:
            # The rank's connection ends; the tick stays open, until a recovery ends it too.
            source.fail(error)
            source.release()
            return
        ready = tick.arrive(rank, source)
        parts = tick.route.parts
        self._ready.extend((tick, index) for index in ready if not parts[index].is_own)
        own = sorted((i for i in ready if parts[i].is_own), key=lambda i: parts[i].qk_pairs)
        self._own.extend((tick, index) for index in own)
        now = time.perf_counter()
        self._waiting.set(self._n_ready, now)
        # A source that came during a kernel call has waited for this thread already.
        self._waiting.add(len(ready) * (now - arrived))

    def _take_batch(self) -> list[tuple[OpenTick, int]]:
        """The oldest ready part and those behind it that one kernel call can run with it."""
        queue, most_pairs = self._ready or self._own, self._fuse_qk_pairs
        if queue is self._own and any(tick.awaits_others for tick in _distinct_ticks(queue)):
            most_pairs = 1
        kind = _call_kind(queue[0][0])
        batch: list[tuple[OpenTick, int]] = []
        left: list[tuple[OpenTick, int]] = []
        qk_pairs = 0
        while queue:
            tick, index = queue.popleft()
            if tick.closed:
                continue
            if qk_pairs < most_pairs and _call_kind(tick) == kind:
                batch.append((tick, index))
                qk_pairs += tick.route.parts[index].qk_pairs
            else:
                left.append((tick, index))
        queue.extend(left)
        self._waiting.set(self._n_ready, time.perf_counter())
        return batch

    def _run_batch(self, batch: list[tuple[OpenTick, int]]) -> None:
        if not batch:
            return
        phase, scale = batch[0][0].tick.phase, batch[0][0].scale
        rule = batch[0][0].rule
        begin = time.perf_counter()
        self._running.set(1, begin)
        self._resting.set(0, begin)
        timer = _DeviceTimer(self.device) if self.device.type == "cuda" else None
        try:
            if phase is Phase.FORWARD:
                self.kernel.forward(
                    [tick.forward_part(index) for tick, index in batch], scale, rule
                )
            else:
                self.kernel.backward(
                    [tick.backward_part(index) for tick, index in batch], scale, rule
                )
            if timer is not None:
                timer.stop()
            self.kernel.synchronize()
        except Exception as error:
            # The kernel is foreign code and may raise anything; these ticks end, the node lives.
            logger.exception("kernel %s failed in %s", self.kernel.name, batch[0][0].tick)
            # What was launched before it failed may still write to memory that is given back now.
            with suppress(Exception):
                self.kernel.synchronize()
            for tick in _distinct_ticks(batch):
                self._guard(tick, partial(tick.give_up, error))
            return
        finally:
            end = time.perf_counter()
            self._running.set(0, end)
            self._resting.set(1, end)
        call = _describe(batch, begin if timer is None else end - timer.seconds(), end)
        for tick in call.ticks:
            tick.kernel_seconds += call.seconds
        for tick, index in batch:
            share = tick.route.parts[index].qk_pairs / max(call.qk_pairs, 1)
            tick.busy_seconds += call.seconds * share
        self.kernel_seconds += call.seconds
        self._on_call(call)
        for tick, index in batch:
            self._guard(tick, partial(tick.part_done, index))

    def _guard(self, tick: OpenTick, action: Callable[[], None]) -> None:
        """Runs ``action``; a failure (no memory for assembled keys, say) ends the tick and leaves
        the thread to the others."""
        try:
            action()
        except Exception as error:
            logger.exception("%s failed", tick.tick)
            try:
                tick.give_up(error)
            except Exception:
                logger.exception("%s could not be given up", tick.tick)


def _call_kind(tick: OpenTick) -> tuple[Phase, AttentionShape, ScoreRule, float]:
    """Parts of equal kind can share a kernel call, whatever their job."""
    return tick.tick.phase, tick.shape, tick.rule, tick.scale


def _distinct_ticks(batch: Iterable[tuple[OpenTick, int]]) -> list[OpenTick]:
    return list({id(tick): tick for tick, _ in batch}.values())


def _describe(batch: list[tuple[OpenTick, int]], begin: float, end: float) -> KernelCall:
    parts = [tick.route.parts[index] for tick, index in batch]
    return KernelCall(
        phase=batch[0][0].tick.phase,
        ticks=tuple(_distinct_ticks(batch)),
        tasks=sum(len(part.tasks) for part in parts),
        query_rows=sum(part.query_rows for part in parts),
        qk_pairs=sum(part.qk_pairs for part in parts),
        begin_seconds=begin,
        end_seconds=end,
    )
