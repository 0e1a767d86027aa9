"""Which UCX options a transport runs with, and who may change them."""

from __future__ import annotations

from typing import Any

import pytest

from data_plane.ucxx.settings import UcxxSettings
from data_plane.ucxx.transport import UcxxTransport
from tests.support.errors import refused


@pytest.mark.parametrize(
    ("settings", "transports"),
    [
        (UcxxSettings(), "tcp,self"),
        (UcxxSettings(one_host=True), "posix,tcp,self"),
        (UcxxSettings(device="cuda:1"), "tcp,self,cuda_copy,cuda_ipc"),
        (UcxxSettings(device="cuda", one_host=True), "posix,tcp,self,cuda_copy,cuda_ipc"),
    ],
)
def test_default_transports(settings: UcxxSettings, transports: str) -> None:
    assert settings.context_options({})["TLS"] == transports


def test_environment_wins_over_defaults_and_argument_over_both() -> None:
    environ = {"UCX_TLS": "rc,self", "UCX_TCP_KEEPCNT": "9"}
    assert "TLS" not in UcxxSettings().context_options(environ)
    settings = UcxxSettings(options={"UCX_TLS": "tcp,self", "TCP_KEEPCNT": "5"})
    options = settings.context_options(environ)
    assert (options["TLS"], options["TCP_KEEPCNT"]) == ("tcp,self", "5")
    assert options["KEEPALIVE_INTERVAL"] == "1000s"


@pytest.mark.parametrize(
    "wrong",
    [
        {"device": "gpu"},
        {"device": "cuda:x"},
        {"busy_poll_seconds": -1.0},
        {"handshake_timeout_seconds": 0.0},
        {"max_half_open": 0},
        {"max_unclaimed_messages": 0},
        {"max_probe_bytes": 0},
    ],
)
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with refused():
        UcxxSettings(**wrong)


def test_polls_only_on_a_gpu_unless_told() -> None:
    assert UcxxSettings().effective_busy_poll_seconds == 0
    assert UcxxSettings(device="cuda").effective_busy_poll_seconds > 0
    assert UcxxSettings(device="cuda", busy_poll_seconds=0.0).effective_busy_poll_seconds == 0


def test_unknown_option_is_refused() -> None:
    with pytest.raises((ValueError, RuntimeError)):
        UcxxTransport(UcxxSettings(options={"NO_SUCH_OPTION": "1"}))
