"""One step per function: what needs more than a screen is several."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator

import pytest

from tests import ROOT
from tests.unit.distca.source_tree import PACKAGES

MOST_LINES = 80
"""Of a function with its decorators, docstring and blank lines."""


def _parsed(source: str) -> ast.Module:
    # A greenlet that is collected meanwhile changes the depth that Python 3.11 counts.
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def long_functions(source: str) -> Iterator[str]:
    """Name and lines of each function that is too long."""
    for node in ast.walk(_parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            lines = node.end_lineno - first + 1
            if lines > MOST_LINES:
                yield f"{node.name} has {lines} lines"


@pytest.mark.parametrize("head", ["def f():\n", "async def f():\n", "@cached\ndef f():\n"])
def test_the_check_counts_decorators_and_blank_lines(head: str) -> None:
    rest = MOST_LINES - head.count("\n") - 1
    assert [*long_functions(head + "\n" * rest + "    pass\n")] == []
    found = [*long_functions(head + "\n" * (rest + 1) + "    pass\n")]
    assert found == [f"f has {MOST_LINES + 1} lines"]


def test_no_function_is_longer_than_a_screen() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if path.parent.name != "v1"
        for name in long_functions(path.read_text())
    ]
    assert not found, f"split these: {found}"
