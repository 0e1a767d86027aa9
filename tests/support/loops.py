"""Loops around models: attached ones, and those of steps that are submitted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

import distca
from core_attention.manifest import RankManifest
from tests.support.cluster import NODE_SHAPE, Cluster, keep_profile, on_this_host
from trainer_client import Session, in_nano_batch
from trainer_client.hooks.compile_boundary import outside_graphs
from trainer_client.step.fsdp import prepare_turns
from trainer_client.step.lane import require_step
from trainer_client.step.ping_pong import Call, run_in_turns
from trainer_client.turns.manifests import lengths_of_documents

NanoBatches = Sequence[Mapping[str, Any]]


def attached(cluster: Cluster, model: nn.Module, job: str, **options: Any) -> distca.Attached:
    """``model`` served by the nodes of ``cluster``, as the only rank."""
    keep_profile(cluster.folder, NODE_SHAPE)
    given = {"placement": "pool", **on_this_host(cluster.folder), **options}
    return distca.attach(model, control_plane=cluster.address, job=job, **given)


def submitted(session: Session, steps: Iterable[NanoBatches]) -> Iterator[tuple[int, NanoBatches]]:
    """Each step with its number; all are submitted before the first one."""
    numbered = list(enumerate(steps, session.next_step))
    for step, batches in numbered:
        lengths = [lengths_of_documents(batch["position_ids"]) for batch in batches]
        session.submit(RankManifest.from_lengths(step, session.options.rank, lengths))
    yield from numbered


class PingPong(nn.Module):
    """Runs a module over the nano-batches of a step, in turns or one after the other; over those
    without rows only if ``takes_no_rows``, else there are no outputs of them."""

    def __init__(
        self, module: nn.Module, *, interleave: bool = True, takes_no_rows: bool = False
    ) -> None:
        super().__init__()
        self.module, self.interleave = module, interleave
        self._takes_no_rows = takes_no_rows

    @outside_graphs
    def forward(self, nano_batches: NanoBatches) -> list[Any]:
        running = require_step()
        held = [
            index
            for index in range(len(nano_batches))
            if self._takes_no_rows or running.n_rows(index)
        ]
        if self.interleave and held:
            prepare_turns(self.module)
            first, last = held[0], held[-1]
            calls: list[Call] = [((), batch) for batch in nano_batches[first : last + 1]]
            return run_in_turns(self.module, calls, first)
        outputs = []
        for index in held:
            with in_nano_batch(index):
                outputs.append(self.module(**nano_batches[index]))
            running.lane_returned(index)
        return outputs
