"""Figures of a training for a logger: Weights & Biases, TensorBoard, MLflow."""

from __future__ import annotations

import time

import numpy as np

from core_attention.ca_task import causal_qk_pairs
from distca.v1 import jobs_pb2
from trainer_client.options import SessionOptions
from trainer_client.turns.branches import RowDocuments

_PASSES = 3
"""A backward pass counts as two forward passes in MFU (PaLM, arXiv 2204.02311, appendix B)."""


class Throughput:
    """The tokens that a rank has trained on since it was last asked."""

    def __init__(self) -> None:
        self._tokens = self._pairs = 0
        self._since = time.perf_counter()

    def count(self, documents: RowDocuments) -> None:
        """Counts a forward with gradients of these documents."""
        begins = np.array(documents.offsets, np.int64)
        ends = begins + documents.lengths
        self._tokens += sum(documents.lengths)
        self._pairs += int(causal_qk_pairs(begins, ends).sum())

    def take(
        self, options: SessionOptions, flops_per_token: float | None, peak_flops: float | None
    ) -> dict[str, float]:
        """The rates since the last call; see :meth:`Attached.scalars`."""
        now = time.perf_counter()
        seconds = now - self._since
        rates = {"distca/tokens_per_second": self._tokens / seconds}
        if flops_per_token and peak_flops:
            attention = options.shape.qk_flops(self._pairs) * options.n_layers * _PASSES
            flops = self._tokens * flops_per_token + attention
            rates["distca/mfu"] = flops / (seconds * peak_flops)
        self._tokens = self._pairs = 0
        self._since = now
        return rates


def balance_of(step: jobs_pb2.StepStatus) -> dict[str, float]:
    """The balance of a step: imbalances are max over mean busy seconds of the servers."""
    found = {"distca/step_seconds": step.step_seconds}
    if step.HasField("wait_seconds"):
        found["distca/wait_seconds"] = step.wait_seconds
    known = [each for each in step.phases if each.measured_imbalance and each.home_imbalance]
    if busy := sum(each.busy_seconds for each in known):
        home = sum(each.busy_seconds * each.home_imbalance for each in known)
        measured = sum(each.busy_seconds * each.measured_imbalance for each in known)
        found["distca/home_imbalance"] = home / busy
        found["distca/imbalance"] = measured / busy
        found["distca/saved_seconds"] = home - measured
    return found
