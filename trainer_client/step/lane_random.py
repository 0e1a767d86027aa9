"""Random numbers by lane.

An activation checkpoint replays the random numbers of a region from the state of the generators at
its beginning. That is right only if nobody else has drawn from them meanwhile: so each lane has
generators of its own, on the CPU and on every CUDA device. A lane's numbers do not depend on how
the lanes take turns, either.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_PHILOX_STEP = 4
"""CUDA generators count in steps of 4."""


@dataclass(frozen=True)
class RandomState:
    """Of the default generators: of the CPU, and of each CUDA device that may be used."""

    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]

    @classmethod
    def capture(cls) -> RandomState:
        """What the generators would draw next. Does not wait for a device."""
        return cls(torch.get_rng_state(), tuple(g.get_state() for g in _cuda_generators()))

    def restore(self) -> None:
        """Has the generators draw the same again."""
        torch.set_rng_state(self.cpu)
        for generator, state in zip(_cuda_generators(), self.cuda, strict=False):
            generator.set_state(state)


def lane_states(n_lanes: int) -> list[RandomState]:
    """Where each lane's numbers begin. The first lane goes on with the generators as they are; the
    others begin at seeds drawn from them, which moves the generators on, so that the next step's
    lanes differ from this one's.
    """
    others = []
    for lane in range(1, n_lanes):
        cpu = torch.Generator().manual_seed(int(torch.randint(2**62, ())))
        others.append(
            RandomState(cpu.get_state(), tuple(_lane_state(g, lane) for g in _cuda_generators()))
        )
    if n_lanes > 1:
        for generator in _cuda_generators():
            generator.set_offset(generator.get_offset() + _PHILOX_STEP)
    return [RandomState.capture(), *others]


def _lane_state(generator: torch.Generator, lane: int) -> torch.Tensor:
    """A state of ``generator`` that depends on its seed, its offset and the lane, found without
    asking the device."""
    seed = hash((generator.initial_seed(), generator.get_offset(), lane)) % 2**63
    seeded = torch.Generator(generator.device).manual_seed(seed)
    return seeded.get_state()


def _cuda_generators() -> tuple[torch.Generator, ...]:
    return tuple(torch.cuda.default_generators) if torch.cuda.is_initialized() else ()
