"""The authorities of the service's tests."""

from __future__ import annotations

from tests.service.security.conftest import foreign_pki, pki

__all__ = ["foreign_pki", "pki"]
