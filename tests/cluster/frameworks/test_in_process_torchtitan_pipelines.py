"""The order of torchtitan's pipelines, as plans know it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest

from core_attention.errors import ScheduleError
from core_attention.schedule import write_csv
from core_attention.schedule_orders import zero_bubble
from trainer_client.frameworks.torchtitan.pipelines import order_of
from trainer_client.frameworks.versions import UnsupportedSetting


def test_a_file_says_the_order_wherever_it_lies(tmp_path: Path) -> None:
    order = zero_bubble(2, 4)
    found = []
    for folder in ("a", "b"):
        path = tmp_path / folder / "zb.csv"
        path.parent.mkdir()
        path.write_text(write_csv(order))
        found.append(order_of(None, str(path), 4))
    assert found[0] == found[1]
    assert found[0] is not None
    assert (found[0].name, found[0].slots) == ("zb.csv", order.slots)


@pytest.mark.parametrize(
    ("text", "n_microbatches", "error"),
    [
        (write_csv(zero_bubble(2, 4)), 8, UnsupportedSetting),
        ("0F0,0B0\n1B0,1F0\n", 1, ScheduleError),
    ],
)
def test_a_file_of_another_order_is_refused(
    tmp_path: Path, text: str, n_microbatches: int, error: type[Exception]
) -> None:
    path = tmp_path / "zb.csv"
    path.write_text(text)
    with pytest.raises(error):
        order_of(None, str(path), n_microbatches)


def test_a_schedule_that_does_not_say_its_order_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert order_of(SimpleNamespace(), None, 4) is None
    assert caplog.records
