"""Settings for all tests."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import hypothesis
import pytest
import torch

# Also where a shell has started the tests in the background, and had it ignored: what is ignored
# here is ignored by every child, and Ctrl-C is what some of them are tested with.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Attention nodes of the tests run with one thread each; so does this process, to share two cores.
torch.set_num_threads(1)

# A busy machine does not make a property false.
hypothesis.settings.register_profile("distca", deadline=None)
hypothesis.settings.load_profile("distca")

_MARK_OF_MODULE = re.compile(r"^pytestmark = .*\bpytest\.mark\.(training|faults)\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out modules of which no test is asked for, instead of importing them first: what they
    import, libraries of training loops above all, takes each worker ten seconds."""
    left_out = set(re.findall(r"\bnot (\w+)", config.option.markexpr))
    if not left_out or collection_path.suffix != ".py" or " or " in config.option.markexpr:
        return None
    marks = _MARK_OF_MODULE.findall(collection_path.read_text())
    return True if left_out.intersection(marks) else None
