"""Two lanes: while one nano-batch's rows travel, the other one computes (ping-pong).

A lane is the ticks of a nano-batch in order: forward by layer, then backward mirrored. It stops
twice in each tick, where it would have to wait, and the other lane goes on:

    lane 0   dispatch          serve            collect, rest, dispatch         serve
    lane 1            dispatch          serve                          collect, rest, ...

So lane 1's rows travel while lane 0's tasks are computed, and lane 0's replies behind lane 1's
tasks: a tick costs max(compute, exchange) instead of their sum. *Rest* is what stays at home, the
part of a layer that is linear in tokens, and needs no neighbour:

    q, k, v = x W_qkv       y = x + o W_out       next x = y + relu(y W_up) W_down
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from examples.nano_distca.exchange import Exchange
from examples.nano_distca.route import BACKWARD, FORWARD, Phase, Rows
from examples.nano_distca.tasks import Shape

Weights = dict[str, torch.Tensor]
"""``qkv``, ``out``, ``up`` and ``down``, each ``[layers, in, out]``."""


def project(x: torch.Tensor, weights: Weights, layer: int, shape: Shape) -> list[torch.Tensor]:
    """q, k and v, ``[rows, heads or heads_kv, head_dim]``."""
    heads = (x @ weights["qkv"][layer]).unflatten(1, (-1, shape.head_dim))
    return list(heads.split([shape.heads, shape.heads_kv, shape.heads_kv], dim=1))


def rest(x: torch.Tensor, o: torch.Tensor, weights: Weights, layer: int) -> torch.Tensor:
    """The layer's output ``[rows, hidden]``."""
    y = x + o.flatten(1) @ weights["out"][layer]
    return y + torch.relu(y @ weights["up"][layer]) @ weights["down"][layer]


@dataclass
class Home:
    """A rank's rows of a lane, and the layers around core attention. ``x`` goes into the first
    layer, ``dx`` is at first the gradient of what comes out of the last: ``[tokens, hidden]``.
    """

    rows: slice
    x: torch.Tensor
    dx: torch.Tensor
    weights: Weights
    shape: Shape

    def __post_init__(self) -> None:
        self._tokens, self._tape = len(self.x), list[dict[str, Any]]()
        self.x, self.dx = self.x[self.rows], self.dx[self.rows]

    def before(self, phase: Phase, layer: int) -> Rows:
        """What core attention is asked with."""
        if phase is FORWARD:
            x = self.x.detach().requires_grad_()
            q, k, v = project(x, self.weights, layer, self.shape)
            self._tape.append({"x": x, "q": q, "k": k, "v": v})
        else:
            tape = self._tape[layer]
            tape["y"].backward(self.dx)
            tape["do"] = tape["o"].grad
            tape["delta"] = (tape["do"] * tape["o"]).sum(-1)
        names = sum(phase.request, ())
        return {name: self._spread(self._tape[layer][name]) for name in names}

    def after(self, phase: Phase, layer: int, results: Rows) -> None:
        """Takes in what core attention gave."""
        tape = self._tape[layer]
        tape.update({name: rows[self.rows].clone() for name, rows in results.items()})
        if phase is FORWARD:
            tape["y"] = rest(tape["x"], tape["o"].requires_grad_(), self.weights, layer)
            self.x = tape["y"]
        else:
            torch.autograd.backward([tape[n] for n in "qkv"], [tape["d" + n] for n in "qkv"])
            self.dx = tape["x"].grad

    def _spread(self, own: torch.Tensor) -> torch.Tensor:
        rows = own.new_zeros(self._tokens, *own.shape[1:])
        rows[self.rows] = own.detach()
        return rows


def ticks_of(lane: int, layers: int, exchange: Exchange, home: Home | None) -> Iterator[None]:
    """Runs a lane; yields where the other one may go on. A server that is no rank has no home."""
    there_and_back = [(FORWARD, n) for n in range(layers)]
    there_and_back += [(BACKWARD, n) for n in reversed(range(layers))]
    for phase, layer in there_and_back:
        with exchange.timed("linear", lane):
            rows = home.before(phase, layer) if home else {}
        tick = exchange.dispatch(phase, lane, rows)
        yield
        exchange.serve(tick)
        yield
        results = exchange.collect(tick)
        with exchange.timed("linear", lane):
            if home:
                home.after(phase, layer, results)


def take_turns(lanes: Iterable[Iterator[None]]) -> None:
    """Ping-pong: one stretch of each lane, again and again, in the same order everywhere."""
    running = [*lanes]
    while running:
        running = [lane for lane in running if next(lane, running) is not running]
