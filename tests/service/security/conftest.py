"""One authority for all tests: keys take time to make."""

from __future__ import annotations

import pytest

from tests.service.security.pki import Pki


@pytest.fixture(scope="session")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """An authority."""
    return Pki(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="session")
def foreign_pki(tmp_path_factory: pytest.TempPathFactory) -> Pki:
    """Another authority, which nobody trusts."""
    return Pki(tmp_path_factory.mktemp("foreign"))
