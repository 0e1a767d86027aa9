"""Sampled lengths follow their quantile tables."""

from __future__ import annotations

import numpy as np
import pytest

from distca.apps.simulator.lengths import (
    LENGTHS_AT_QUANTILES,
    QUANTILES,
    UPSAMPLED_FROM_TOKENS,
    sample_lengths,
)
from tests.support.errors import refused

TOTAL = 40_000_000


@pytest.mark.parametrize("name", LENGTHS_AT_QUANTILES)
def test_quantiles_below_the_upsampled_lengths_are_those_of_the_table(name: str) -> None:
    lengths = sample_lengths(name, TOTAL, 2**20, 0)
    # Undo the upsampling: every second long document.
    long = lengths >= UPSAMPLED_FROM_TOKENS
    once = np.concatenate([lengths[~long], np.sort(lengths[long])[::2]])
    for quantile, expected in zip(QUANTILES[1:-1], LENGTHS_AT_QUANTILES[name][1:-1], strict=True):
        # Over 10,000 draws: the standard error of a share is 0.5% at most, 0.1% at the ends.
        share = float((once <= expected).mean())
        error = np.sqrt(quantile * (1 - quantile) / len(once))
        assert share == pytest.approx(quantile, abs=4 * error), expected


def test_the_total_the_maximum_and_the_seed_hold() -> None:
    lengths = sample_lengths("prolong", 1_000_003, 32_768, 7)
    assert lengths.sum() == 1_000_003
    assert lengths.max() <= 32_768
    assert lengths.min() >= 1
    np.testing.assert_array_equal(lengths, sample_lengths("prolong", 1_000_003, 32_768, 7))
    assert not np.array_equal(lengths, sample_lengths("prolong", 1_000_003, 32_768, 8))


@pytest.mark.parametrize(
    "arguments",
    [
        ("wikipedia", 10, 10, 0),
        ("prolong", 0, 10, 0),
        ("prolong", 10, 0, 0),
        ("prolong", 10, 10**23, 0),
    ],
)
def test_bad_input_is_refused(arguments: tuple[str, int, int, int]) -> None:
    with refused():
        sample_lengths(*arguments)
