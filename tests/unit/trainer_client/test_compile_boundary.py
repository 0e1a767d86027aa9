"""Blocks without compilation, in one thread and in several."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
import torch._dynamo

from trainer_client.hooks.compile_boundary import uncompiled


def compiles() -> bool:
    """Whether a compiled function is compiled now."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    torch.compile(lambda rows: rows + 1, backend=keep)(torch.ones(2))
    return bool(graphs)


def test_nothing_is_compiled_in_the_block_and_in_one_inside_it() -> None:
    assert compiles()
    with uncompiled():
        assert not compiles()
        with uncompiled():
            assert not compiles()
        assert not compiles()
    assert compiles()


def test_an_error_ends_the_block() -> None:
    def fails() -> None:
        with uncompiled():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fails()
    assert compiles()


def test_threads_that_leave_in_the_order_of_their_coming_leave_it_as_it_was() -> None:
    both_inside, first_left = Barrier(2), Barrier(2)

    def comes_first() -> None:
        with uncompiled():
            both_inside.wait(30)
        first_left.wait(30)

    def leaves_last() -> None:
        with uncompiled():
            both_inside.wait(30)
            first_left.wait(30)

    with ThreadPoolExecutor(2) as threads:
        for future in (threads.submit(comes_first), threads.submit(leaves_last)):
            future.result(60)
    assert compiles()
