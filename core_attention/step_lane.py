"""The nano-batches of a step that the control plane has numbered.

The job has nano-batches for a few steps: its places, each of equally many. Step n has its documents
in place n, modulo their number, so that several steps may be open at a time.
"""

from __future__ import annotations

from core_attention.manifest import RankManifest


def place_of(step: int, n_nano_batches: int, turns: int) -> int:
    """The place of ``step``, where each has ``turns`` of ``n_nano_batches``."""
    return step % (n_nano_batches // turns)


def placed(manifest: RankManifest, step: int, turns: int) -> RankManifest:
    """The documents of ``manifest``, which are in its first ``turns`` nano-batches, in the place of
    ``step``."""
    first = place_of(step, manifest.n_nano_batches, turns) * turns
    columns = manifest.columns
    moved = columns._replace(nano_batch=columns.nano_batch + first)
    return RankManifest.from_columns(step, manifest.rank, manifest.n_nano_batches, moved)
