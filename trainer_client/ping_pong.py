"""Ping-pong: the nano-batches of a step take turns; one computes while the other's data move.

Works for any module without changing its code: every nano-batch's forward runs in a greenlet of
its own, and core attention switches to the next one after sending (paper, section 4.1).
"""

from __future__ import annotations

import contextvars
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import greenlet
import torch
from torch import nn

from trainer_client.errors import SessionError
from trainer_client.fsdp import require_prepared
from trainer_client.graphs import outside_graphs
from trainer_client.lane import Lane, current_lane, require_step
from trainer_client.running_step import RunningStep


class PingPong(nn.Module):
    """Runs a module over the nano-batches of a step, interleaved at the attention points.

    Wrap it in ``DistributedDataParallel`` as any module; its parameters are the module's.

    Args:
        module: the model; called once per nano-batch with the nano-batch's keyword arguments.
        interleave: False runs the nano-batches one after the other, for comparison.
    """

    def __init__(self, module: nn.Module, *, interleave: bool = True) -> None:
        super().__init__()
        self.module = module
        self.interleave = interleave
        self._checked = False

    @outside_graphs
    def forward(self, nano_batches: Sequence[Mapping[str, Any]]) -> list[Any]:
        """The module's outputs, one per nano-batch.

        Raises:
            SessionError: no step is running, it has another number of nano-batches, or the module
                is sharded by FSDP2 and not prepared, see :func:`trainer_client.prepare_fsdp`.
        """
        running = require_step()
        if len(nano_batches) != running.job.n_nano_batches:
            raise SessionError(
                f"{len(nano_batches)} nano-batches were given; the job has n_nano_batches="
                f"{running.job.n_nano_batches}"
            )
        if not self.interleave or len(nano_batches) == 1:
            return [
                self._run_alone(running, index, batch) for index, batch in enumerate(nano_batches)
            ]
        if not self._checked:
            require_prepared(self.module)
            self._checked = True
        return _Turns(self.module, running, nano_batches).run()

    def _run_alone(self, running: RunningStep, index: int, batch: Mapping[str, Any]) -> Any:
        token = current_lane.set(Lane(running, index))
        try:
            return self.module(**batch)
        finally:
            current_lane.reset(token)


class _Turns:
    """One greenlet per nano-batch; this one hands out the turns, round robin."""

    def __init__(
        self, module: nn.Module, running: RunningStep, nano_batches: Sequence[Mapping[str, Any]]
    ) -> None:
        self._module = module
        self._running = running
        self._outputs: list[Any] = [None] * len(nano_batches)
        self._referee = greenlet.getcurrent()
        self._players = [self._player(index, batch) for index, batch in enumerate(nano_batches)]

    def run(self) -> list[Any]:
        state = _ThreadState.capture()
        try:
            playing = dict(enumerate(self._players))
            while playing:
                for index, player in list(playing.items()):
                    begin = time.perf_counter()
                    player.switch()
                    self._running.record(
                        f"nano-batch {index}", "turn", begin, time.perf_counter(), "forward"
                    )
                    state.restore()
                    if player.dead:
                        del playing[index]
            return self._outputs
        finally:
            # After an error in one lane the others must not stay suspended with their tensors.
            for player in self._players:
                if not player.dead:
                    player.throw(greenlet.GreenletExit)
            # Their contexts lead back here: a cycle that would keep the outputs, and all that
            # autograd has saved for them, until garbage is collected.
            self._players.clear()
            state.restore()

    def _player(self, index: int, batch: Mapping[str, Any]) -> greenlet.greenlet:
        context = contextvars.copy_context()
        context.run(current_lane.set, Lane(self._running, index, self._give_way))

        def play() -> None:
            self._outputs[index] = self._module(**batch)

        player = greenlet.greenlet(play)
        player.gr_context = context
        return player

    def _give_way(self) -> None:
        state = _ThreadState.capture()
        self._referee.switch()
        state.restore()


class _ThreadState:
    """PyTorch's settings that belong to a thread, not to a greenlet: a lane that switches inside
    ``torch.no_grad``, ``torch.autocast`` or an activation checkpoint (whose hooks take what
    autograd saves) must not change the other lane's."""

    _DEVICE_TYPES = ("cpu", "cuda")

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        self._cache = torch.is_autocast_cache_enabled()
        self._autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in self._DEVICE_TYPES
        }
        self._hooks = self._take_hooks()
        self._put_hooks()

    @classmethod
    def capture(cls) -> _ThreadState:
        return cls()

    def restore(self) -> None:
        torch.set_grad_enabled(self._grad)
        torch.set_autocast_cache_enabled(self._cache)
        for kind, (enabled, dtype) in self._autocast.items():
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        self._take_hooks()
        self._put_hooks()

    @staticmethod
    def _take_hooks() -> list[_Hooks]:
        """Removes all hooks on saved tensors; returns them, the innermost first."""
        hooks = []
        while (top := _top_hooks(False)) is not None:
            hooks.append(top)
            torch._C._autograd._pop_saved_tensors_default_hooks()
        return hooks

    def _put_hooks(self) -> None:
        for pack, unpack in reversed(self._hooks):
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
_top_hooks: Callable[[bool], _Hooks | None] = torch._C._autograd._top_saved_tensors_default_hooks
