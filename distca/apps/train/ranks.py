"""The ranks of a job: their process group, and what they must agree on."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from distca.errors import RanksDisagreeError

_RENDEZVOUS = re.compile(r"env://.*|tcp://[^/]+:\d{1,5}([/?].*)?|file://.+")
"""Ways to meet that torch.distributed has."""


@dataclass(frozen=True, kw_only=True)
class RankEnvironment:
    """This process's place among the trainers.

    Attributes:
        rank: from 0.
        n_ranks: trainers in all.
        init_method: as for ``torch.distributed.init_process_group``.
        local_rank: its place among the trainers of its host, from 0.
    """

    rank: int
    n_ranks: int
    init_method: str
    local_rank: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.n_ranks:
            raise ValueError(f"rank {self.rank} is not one of {self.n_ranks} ranks")
        if not _RENDEZVOUS.fullmatch(self.init_method):
            raise ValueError(
                f"rendezvous is {self.init_method!r}; valid are env:// under torchrun, "
                "tcp://HOST:PORT of rank 0, and file:///PATH that all ranks share"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str], init_method: str) -> RankEnvironment:
        """Reads what torchrun sets: ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` (0 if it is not set)
        and, for ``env://``, where rank 0 is.

        Raises:
            ValueError: one of them is missing or no integer, or there is no such ``init_method``.
        """
        if init_method == "env://" and not environ.get("MASTER_ADDR"):
            raise ValueError(
                "environment variable MASTER_ADDR is not set; start trainers with torchrun, or all "
                "processes at once with distca local"
            )
        values = {}
        for name, default in (("RANK", ""), ("WORLD_SIZE", ""), ("LOCAL_RANK", "0")):
            text = environ.get(name, default)
            if not text.isdecimal():
                raise ValueError(
                    f"environment variable {name} is {text!r}; it must be an integer, as torchrun "
                    "sets it"
                )
            values[name] = int(text)
        return cls(
            rank=values["RANK"],
            n_ranks=values["WORLD_SIZE"],
            init_method=init_method,
            local_rank=values["LOCAL_RANK"],
        )


@contextmanager
def process_group(
    environment: RankEnvironment,
    timeout_seconds: float,
    device: torch.device = torch.device("cpu"),  # noqa: B008  (immutable)
) -> Iterator[None]:
    """Joins the group of all ranks, whose waits end after ``timeout_seconds``; leaves it at the
    end. Tensors on the CPU go over gloo, those on ``device``, if it is a GPU, over NCCL."""
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
        device_id=device if on_gpu else None,
        init_method=environment.init_method,
        rank=environment.rank,
        world_size=environment.n_ranks,
        timeout=timedelta(seconds=timeout_seconds),
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def check_agreement(what: Mapping[str, object]) -> None:
    """Checks that all ranks pass equal values.

    Raises:
        RanksDisagreeError: on every rank, naming the field and each rank's value.
    """
    everyone: list[Mapping[str, object]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, dict(what))
    for name in what:
        values = [each.get(name) for each in everyone]
        if any(value != values[0] for value in values):
            raise RanksDisagreeError(
                f"ranks disagree on {name}: {values}, in order of ranks; start all of them with "
                "the same data and options"
            )


def sum_over_ranks(*values: float) -> list[float]:
    """The sums of ``values`` over all ranks, in float64."""
    total = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(total)
    return [float(value) for value in total]
