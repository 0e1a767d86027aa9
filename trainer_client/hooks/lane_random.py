"""Random numbers by lane.

An activation checkpoint replays the random numbers of a region from the state of the generators at
its beginning. That is right only if nobody else has drawn from them meanwhile: so each lane has
generators of its own, on the CPU and on every CUDA device. A lane's numbers do not depend on how
the lanes take turns, either.

The first lane goes on with the default generators as they are; the others begin at states that
follow from theirs, without a draw. So lanes that draw nothing leave the generators as they were,
and lanes that begin with equal generators draw equal numbers.
"""

from __future__ import annotations

import hashlib

import torch


class LaneRandom:
    """The random numbers of lanes that take turns. Does not wait for a device.

    Args:
        n_lanes: how many.
    """

    def __init__(self, n_lanes: int) -> None:
        now = _states()
        self._begun = [now, *(_derived(lane) for lane in range(1, n_lanes))]
        self._left = list(self._begun)

    def enter(self, lane: int) -> None:
        """Has the generators go on where ``lane`` was left."""
        _set(self._left[lane])

    def leave(self, lane: int) -> None:
        """Keeps where ``lane`` is left."""
        self._left[lane] = _states()

    def end(self) -> None:
        """The lanes are over: each generator goes on where the first lane that drew from it was
        left, so that lanes to come differ from these, or where it was if none did."""
        ends = list(self._left[0])
        for begun, left in zip(reversed(self._begun), reversed(self._left), strict=True):
            for index, (before, after) in enumerate(zip(begun, left, strict=False)):
                if not torch.equal(before, after):
                    ends[index] = after
        _set(ends)


def _generators() -> list[torch.Generator]:
    """The default ones: of the CPU, and of each CUDA device that may be used."""
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]


def _states() -> list[torch.Tensor]:
    return [generator.get_state() for generator in _generators()]


def _set(states: list[torch.Tensor]) -> None:
    for generator, state in zip(_generators(), states, strict=False):
        generator.set_state(state)


def _derived(lane: int) -> list[torch.Tensor]:
    """States that follow from those of the generators now and the lane."""
    return [
        torch.Generator(generator.device).manual_seed(_seed(generator, lane)).get_state()
        for generator in _generators()
    ]


def _seed(generator: torch.Generator, lane: int) -> int:
    state = generator.get_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=7, salt=bytes([lane])).digest())
