"""The check of a measured bandwidth against a floor."""

from __future__ import annotations

import logging

import pytest

from data_plane.probe import BandwidthTooLow, check_bandwidth
from data_plane.transport import ProbeResult

RESULT = ProbeResult(
    peer="10.0.0.3:7001",
    transport="ucxx",
    lanes="tcp",
    nbytes=2**24,
    gigabytes_per_second=1.25,
    round_trip_seconds=5e-5,
)


@pytest.mark.parametrize("floor", [0.0, 1.0, 1.25])
def test_fast_enough(floor: float, caplog: pytest.LogCaptureFixture) -> None:
    assert check_bandwidth(RESULT, floor, on_low="error")
    assert not caplog.records


def test_too_slow_warns_with_all_that_is_needed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert not check_bandwidth(RESULT, 100.0)
    for part in ("10.0.0.3:7001", "ucxx", "tcp", "1.25 GB/s", "100 GB/s"):
        assert part in caplog.text


def test_too_slow_raises_when_asked_to() -> None:
    with pytest.raises(BandwidthTooLow, match=r"1\.25 GB/s"):
        check_bandwidth(RESULT, 100.0, on_low="error")


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="ignore"):
        check_bandwidth(RESULT, 1.0, on_low="ignore")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nan"):
        check_bandwidth(RESULT, float("nan"))
