"""Tests of torchtitan and Megatron-core, where both are installed (``make test-frameworks``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torchtitan") else ["test_*.py"]
