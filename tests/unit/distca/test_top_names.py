"""At 80 columns names stay apart: what they share is left out."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from distca.apps.top.names import short_names
from distca.apps.top.snapshot import Snapshot
from distca.apps.top.view import render
from tests.service.distca.test_top import JOB, server_view


@pytest.mark.parametrize(
    ("names", "width", "short"),
    [
        (["node-0", "node-1"], 10, ["node-0", "node-1"]),
        (
            ["distca-attention-node-0", "distca-attention-node-12"],
            12,
            ["…0", "…12"],
        ),
        (
            ["gpu-a.rack-7.example.com", "gpu-b.rack-7.example.com"],
            12,
            ["…a…", "…b…"],
        ),
        (["train.rank-0", "train.rank-1", "distca-attention-node-0"], 12, None),
        (["alone-in-a-long-name"], 10, ["…long-name"]),
        (["same-long-name-1"] * 2, 8, ["…-name-1"] * 2),
        (["abcdefghijklmnop-x", "ponmlkjihgfedcba-x"], 8, ["abcdefghijklmnop-x", None]),
    ],
)
def test_names_are_shortened_where_they_are_alike(
    names: list[str], width: int, short: list[str | None] | None
) -> None:
    made = short_names(names, width)
    assert len(set(made)) == len(set(names))
    if short is None:
        assert all(len(name) <= width for name in made)
    elif None not in short:
        assert made == short


def test_eighty_columns_show_every_server_and_every_imbalance() -> None:
    nodes = [
        replace(server_view(), server_id=f"distca-attention-node-{index}", host=f"gpu-{index}")
        for index in (0, 1, 12)
    ]
    in_place = replace(server_view(), server_id="train.rank-3", job="train", rank=3)
    snapshot = Snapshot(
        address="cp:7700",
        version="0.1.0",
        unix_seconds=0.0,
        uptime_seconds=7200.0,
        servers=(*nodes, in_place),
        jobs=(JOB,),
        planner_state="compiling",
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(render(snapshot))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    for words in ("node-0 ", "node-1 ", "node-12 ", "train.rank-3", "in train, rank 3"):
        assert words in text
    assert "forward 1.50 1.02 1.30  backward 1.40 1.01 -" in text
    assert "planner is being compiled" in " ".join(text.split())
