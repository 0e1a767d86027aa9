"""Every fault in every way, for minutes each; ``make chaos`` runs them."""

from __future__ import annotations

from tests.cluster.chaos.conftest import references

__all__ = ["references"]
