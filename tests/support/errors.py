"""Failed calls, on either side of the control plane's service."""

from __future__ import annotations

import pytest

from control_plane.errors import RefusedError
from distca.contract.rpc_errors import Reason, RpcError


def fails(*reasons: Reason, match: str | None = None) -> pytest.RaisesExc[RefusedError | RpcError]:
    """``pytest.raises`` of a call for one of ``reasons``."""

    def has_one(error: RefusedError | RpcError) -> bool:
        assert error.reason in reasons, f"{error.reason.kind}: {error}"
        return True

    return pytest.RaisesExc((RefusedError, RpcError), match=match, check=has_one)
