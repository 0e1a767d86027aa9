"""Priorities of CUDA streams."""

from __future__ import annotations

HIGH_PRIORITY = -1
"""Of core attention, above the default of 0."""
