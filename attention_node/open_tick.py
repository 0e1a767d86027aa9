"""The tensors of one tick on one server, from its first message to its last reply.

An open tick belongs to the executor's thread: nothing here is locked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch

from attention_node.machine.tick import TickMachine
from attention_node.tick_route import ASSEMBLED, RowCopy, TickRoute
from core_attention.ca_task import Phase
from core_attention.kernels.protocol import BackwardPart, ForwardPart
from core_attention.message_rows import runs_triton
from core_attention.score_rule import ScoreRule
from core_attention.shape import AttentionShape
from core_attention.tick import Tick


class TickGivenUp(RuntimeError):
    """A tick ended without results: its kernel failed, or its job or step was given up."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Source:
    """One rank's side of a tick: what it sent, where its results go, and whom to inform.

    Attributes:
        inputs: q, k and v, and for backward also do, lse and delta, as in
            ``core_attention.message``: views of its message, or its own tensors in-place.
        outputs: o and lse, or dq, dk and dv: views of the reply, or tensors of the trainer. dk and
            dv hold the rows of the pair's K/V runs; float32 or the job's dtype.
        reply: called once, when the outputs are complete.
        release: called once, when the inputs are no longer read: behind ``reply`` or ``fail``.
        fail: called instead of ``reply`` when the tick cannot be run, or after one that has raised.
        verify: called before the inputs are read; raises ChecksumMismatch if they are damaged.
        written: on a GPU, the event after which a trainer's own inputs are complete; the executor
            waits for it. None for messages, which are complete when they arrive.
    """

    inputs: Mapping[str, torch.Tensor]
    outputs: Mapping[str, torch.Tensor]
    reply: Callable[[], None]
    release: Callable[[], None]
    fail: Callable[[BaseException], None]
    verify: Callable[[], None] = lambda: None
    written: torch.cuda.Event | None = None


@dataclass(eq=False)
class OpenTick:
    """The tensors of a tick, and the instructions of its machine carried out.

    A rank's tensors are let go with its reply, and sums with the last reply that takes from them.
    In pipelines the ranks of a tick come to it slots apart: theirs would pile up on the device.

    Attributes:
        machine: which sources have arrived, which parts are ready or done, which replies are due.
        route: what belongs to it.
        shape: of the job's core attention.
        rule: for its scores.
        scale: multiplies q.k before softmax.
        device: where the assembled keys live.
        on_closed: called once, when the tick is over.
        busy_seconds: its share of the kernel seconds of the calls it was part of so far.
        kernel_seconds: wall seconds of those calls.
    """

    machine: TickMachine
    route: TickRoute
    shape: AttentionShape
    rule: ScoreRule
    scale: float
    device: torch.device
    on_closed: Callable[[OpenTick], None]
    busy_seconds: float = 0.0
    kernel_seconds: float = 0.0
    _sources: dict[int, Source] = field(default_factory=dict)
    _answered: set[int] = field(default_factory=set)
    _assembled: dict[str, torch.Tensor] = field(default_factory=dict)
    _gradients: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @property
    def tick(self) -> Tick:
        """The exchange."""
        return self.machine.tick

    @property
    def closed(self) -> bool:
        """Returns whether the tick is over: complete, failed or dropped."""
        return self.machine.closed

    @property
    def failure(self) -> BaseException | None:
        """The reason why it was given up, or None."""
        return self.machine.failure

    def arrive(self, rank: int, source: Source) -> list[int]:
        """Takes in ``rank``'s message; returns the parts that are ready now, in order."""
        if self.closed:
            # The same reason as for those who came before the failure.
            source.fail(self.failure or TickGivenUp(f"{self.tick} is over on this server"))
            source.release()
            return []
        if rank in self._sources or rank in self._answered:
            # Over another connection, since a tag is taken once on each. The first one counts.
            source.fail(TickGivenUp(f"{self.tick}: rank {rank} has sent it before"))
            source.release()
            return []
        self._sources[rank] = source
        ready = self.machine.arrive(rank)
        self._assemble(rank, source)
        self._reply(self.machine.last_replies())
        return ready

    @property
    def awaits_others(self) -> bool:
        """Returns whether parts that other ranks wait for have not run."""
        return any(not self.route.parts[index].is_own for index in self.machine.undone)

    def forward_part(self, index: int) -> ForwardPart:
        """The kernel's view of a ready part, forward."""
        part = self.route.parts[index]
        home = self._sources[part.q_source]
        return ForwardPart(
            q=home.inputs["q"],
            k=self._keys(part.k_source, "k"),
            v=self._keys(part.k_source, "v"),
            o=home.outputs["o"],
            lse=home.outputs["lse"],
            tasks=part.tasks,
        )

    def backward_part(self, index: int) -> BackwardPart:
        """The kernel's view of a ready part, backward; its dK and dV begin as zeros."""
        part = self.route.parts[index]
        home = self._sources[part.q_source]
        shape, rows = self.shape, part.n_dk_rows
        dk, dv = (
            torch.zeros(
                (rows, shape.num_heads_kv, head_dim), dtype=torch.float32, device=self.device
            )
            for head_dim in (shape.head_dim, shape.head_dim_v)
        )
        self._gradients[index] = (dk, dv)
        return BackwardPart(
            q=home.inputs["q"],
            k=self._keys(part.k_source, "k"),
            v=self._keys(part.k_source, "v"),
            do=home.inputs["do"],
            lse=home.inputs["lse"],
            delta=home.inputs["delta"],
            dq=home.outputs["dq"],
            dk=dk,
            dv=dv,
            tasks=part.tasks,
        )

    def part_done(self, index: int) -> None:
        """Notes that a part has run, and sends the replies that waited for it."""
        self._reply(self.machine.part_done(index))
        undone = (self.route.parts[other] for other in self.machine.undone)
        if self._assembled and all(part.k_source != ASSEMBLED for part in undone):
            self._assembled.clear()

    def leave(self, rank: int) -> None:
        """Goes on without ``rank``, whose rows will not come."""
        if not self.closed:
            self.machine.leave({rank})
            self._reply(self.machine.last_replies())

    def give_up(self, error: BaseException) -> None:
        """Ends the tick without results, and fails every source that has arrived and got no
        reply."""
        if self.closed:
            return
        unanswered = [self._sources[rank] for rank in self.machine.give_up(error)]
        for source in unanswered:
            source.fail(error)
        for source in unanswered:
            source.release()
        self._close()

    def _assemble(self, rank: int, source: Source) -> None:
        copies = self.route.assembly[rank]
        if not len(copies.length):
            return
        if not self._assembled:
            shape, rows = self.shape, self.route.n_assembled_rows
            for name, head_dim in (("k", shape.head_dim), ("v", shape.head_dim_v)):
                # Zeros, because kernels read beside a task and multiply what they find by zero: a
                # NaN in rows that have not arrived yet would spread.
                self._assembled[name] = torch.zeros(
                    (rows, shape.num_heads_kv, head_dim),
                    dtype=getattr(torch, shape.dtype),
                    device=self.device,
                )
        if runs_triton(self.device):
            from core_attention.gpu_rows import move_rows

            pairs = [(source.inputs[name], target) for name, target in self._assembled.items()]
            move_rows(pairs, *self.route.assembly_rows(rank, self.device))
            return
        for name, target in self._assembled.items():
            for copy in copies.each():
                _rows(target, copy.target_row, copy.length).copy_(
                    _rows(source.inputs[name], copy.source_row, copy.length)
                )

    def _keys(self, k_source: int, name: str) -> torch.Tensor:
        return (
            self._assembled[name] if k_source == ASSEMBLED else self._sources[k_source].inputs[name]
        )

    def _reply(self, ranks: list[int]) -> None:
        """Sends the replies of ``ranks``; with the last one the tick is over."""
        for rank in ranks:
            self._reply_to(rank)
        if self.machine.is_complete:
            self._close()

    def _reply_to(self, rank: int) -> None:
        source = self._sources[rank]
        if self.tick.phase is Phase.BACKWARD:
            self._sum_gradients(rank, source)
        # Its tensors are let go before the rank goes on, which may need the room. Keys that other
        # ranks' tasks read were copied together when they came; its own tasks have run, and dK and
        # dV are sums of tensors of this tick.
        source = self._sources[rank] = replace(source, inputs={}, outputs={})
        source.reply()
        self.machine.replied(rank)
        self._answered.add(rank)
        del self._sources[rank]
        source.release()

    def _sum_gradients(self, rank: int, source: Source) -> None:
        """Writes dK and dV of ``rank``, and lets go of parts from which nobody else takes rows."""
        sums = self.route.dk_sums[rank]
        for which, name in enumerate(("dk", "dv")):
            terms = [(self._gradients[part][which], copy) for part, copy in sums]
            _sum_rows(terms, source.outputs[name])
        others = self.machine.unreplied - {rank}
        wanted = {part for other in others for part, _ in self.route.dk_sums[other]}
        for part, _ in sums:
            if part not in wanted:
                self._gradients.pop(part, None)

    def _close(self) -> None:
        self.machine.close()
        self._sources.clear()
        self._assembled.clear()
        self._gradients.clear()
        self.on_closed(self)


def _rows(tensor: torch.Tensor, begin: int, length: int) -> torch.Tensor:
    return tensor.narrow(0, begin, length)


def _sum_rows(terms: list[tuple[torch.Tensor, RowCopy]], out: torch.Tensor) -> None:
    """Writes the float32 sum of ``terms`` to ``out``, rounding once if ``out`` is narrower."""
    ends = [0, *accumulate(copy.length for _, copy in terms)]
    if [*(copy.target_row for _, copy in terms), out.shape[0]] == ends:
        for gradient, copy in terms:
            _rows(out, copy.target_row, copy.length).copy_(
                _rows(gradient, copy.source_row, copy.length)
            )
        return
    total = out if out.dtype == torch.float32 else torch.empty_like(out, dtype=torch.float32)
    total.zero_()
    for gradient, copy in terms:
        _rows(total, copy.target_row, copy.length).add_(
            _rows(gradient, copy.source_row, copy.length)
        )
    if total is not out:
        out.copy_(total)
