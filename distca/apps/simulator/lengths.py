"""Document lengths drawn from two known distributions, given as quantiles.

*ProLong-like* and *Pretrain-like* follow the two training sets of the paper (arXiv 2510.18121,
section 6). A length is drawn by inverting the quantile table, logarithmically between its points.
For long-context training, documents of 64K tokens and more are *upsampled*: taken twice as often.
"""

from __future__ import annotations

import numpy as np

from core_attention.arrays import Float64Array, Int64Array

QUANTILES = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 0.999, 1.0)

LENGTHS_AT_QUANTILES = {
    # The first value is an assumption: the tables begin at 1%.
    "prolong": (512, 678, 801, 919, 1237, 1914, 3467, 6051, 8379, 16273, 47500, 340149),
    "pretrain": (16, 63, 324, 646, 1606, 3227, 4832, 5784, 6110, 26070, 119836, 124913),
}
"""Tokens of a document at each of :data:`QUANTILES`."""

UPSAMPLED_FROM_TOKENS = 64 * 1024
"""Documents of this length and more are drawn twice as often as the table says."""

_MOST_TOKENS = 2**63 - 1
"""The most that int64 holds."""


def sample_lengths(name: str, total_tokens: int, max_length: int, seed: int) -> Int64Array:
    """Lengths of documents that hold ``total_tokens`` together, in random order.

    Args:
        name: ``"prolong"`` or ``"pretrain"``.
        total_tokens: their sum; the last document is cut to meet it.
        max_length: longer draws are cut to it, as a loader with a context limit does.
        seed: of the generator; the same arguments give the same lengths.

    Raises:
        ValueError: the name is unknown, or a number is below 1 or beyond int64.
    """
    if name not in LENGTHS_AT_QUANTILES:
        raise ValueError(f"name is {name!r}; valid are {sorted(LENGTHS_AT_QUANTILES)}")
    for field, value in (("total_tokens", total_tokens), ("max_length", max_length)):
        if not 1 <= value <= _MOST_TOKENS:
            raise ValueError(f"{field} is {value}; it must be 1 to {_MOST_TOKENS}")
    generator = np.random.default_rng(seed)
    log_lengths = np.log(LENGTHS_AT_QUANTILES[name])
    drawn: list[Int64Array] = []
    missing = total_tokens
    while missing > 0:
        batch = np.minimum(_draw(generator, log_lengths, missing // 2048 + 16), max_length)
        end = np.cumsum(batch)
        n_whole = int(np.searchsorted(end, missing))
        if n_whole < len(batch):
            batch = batch[: n_whole + 1]
            batch[-1] -= end[n_whole] - missing
        drawn.append(batch)
        missing -= int(batch.sum())
    return np.concatenate(drawn)


def _draw(generator: np.random.Generator, log_lengths: Float64Array, n: int) -> Int64Array:
    quantile = generator.random(n)
    lengths = np.exp(np.interp(quantile, QUANTILES, log_lengths)).astype(np.int64)
    twice = np.repeat(lengths, np.where(lengths >= UPSAMPLED_FROM_TOKENS, 2, 1))
    return np.asarray(generator.permutation(twice), dtype=np.int64)
