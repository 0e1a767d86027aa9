"""Tests of others' scripts and loops, where their packages are installed (``make test-others``)."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") and find_spec("deepspeed") else ["test_*.py"]
