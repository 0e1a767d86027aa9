"""docs/architecture.md follows a tick in eight lines by names of functions that are there."""

from __future__ import annotations

import re
from importlib import import_module

import pytest

from tests import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIFE = PAGE.partition("## The life of a tick\n")[2].partition("\n## ")[0]
NAMES = re.findall(r"`((?:\w+\.)+\w+)`", LIFE)


def test_a_tick_lives_for_eight_lines() -> None:
    assert re.findall(r"^(\d)\. ", LIFE, re.MULTILINE) == list("12345678")
    assert len(NAMES) >= 8


@pytest.mark.parametrize("name", NAMES)
def test_its_functions_are_there(name: str) -> None:
    parts = name.split(".")
    # Modules are in lower case, what they define is looked up in them.
    n_modules = next(i for i, part in enumerate(parts) if i == len(parts) - 1 or part[0].isupper())
    found = import_module(".".join(parts[:n_modules]))
    for part in parts[n_modules:]:
        found = getattr(found, part)
    assert callable(found)
