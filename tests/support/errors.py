"""Failed calls and values that are refused."""

from __future__ import annotations

import traceback

import pytest

from control_plane.errors import RefusedError
from distca.contract.rpc_errors import Reason, RpcError

_OURS = {
    *("attention_node", "control_plane", "core_attention", "data_plane", "distca"),
    *("trainer_client", "benchmarks"),
}


def fails(*reasons: Reason, match: str | None = None) -> pytest.RaisesExc[RefusedError | RpcError]:
    """``pytest.raises`` of a call to the control plane's service for one of ``reasons``."""

    def has_one(error: RefusedError | RpcError) -> bool:
        assert error.reason in reasons, f"{error.reason.kind}: {error}"
        return True

    return pytest.RaisesExc((RefusedError, RpcError), match=match, check=has_one)


def refused() -> pytest.RaisesExc[ValueError]:
    """``pytest.raises`` of a value that a check of the project refuses, nothing that it calls."""

    def is_ours(error: ValueError) -> bool:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        return frame.f_globals["__name__"].partition(".")[0] in _OURS

    return pytest.RaisesExc(ValueError, check=is_ours)
