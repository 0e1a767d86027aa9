"""What settings of all transports share: devices, UCX options, and surroundings that cost speed.

Both libraries move bytes with a UCX of their own, which reads the same ``UCX_*`` variables.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Final

logger = logging.getLogger(__name__)

TCP_OPTIONS: Final[Mapping[str, str]] = {
    # The same in every process of a job, or connections reset.
    "TCP_TX_SEG_SIZE": "1M",
    "TCP_RX_SEG_SIZE": "1M",
    "TCP_KEEPIDLE": "1s",
    "TCP_KEEPINTVL": "1s",
    "TCP_KEEPCNT": "3",
    # UCX's own keepalive would keep the TCP one from ever being sent.
    "KEEPALIVE_INTERVAL": "1000s",
    "TCP_SYN_CNT": "2",
    "TCP_CM_SYN_CNT": "2",
    "TCP_CONN_NB": "y",
}
"""1 MiB segments make TCP five times faster, and a long UCX keepalive lets TCP's own see a cut link
within seconds."""


def check_device(device: str) -> None:
    """Raises ValueError unless ``device`` is ``"cpu"``, ``"cuda"`` or ``"cuda:<index>"``."""
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ValueError(f"device is {device!r}; valid: 'cpu', 'cuda', 'cuda:<index>'")


def choose_options(
    defaults: Mapping[str, str], options: Mapping[str, str], environ: Mapping[str, str]
) -> dict[str, str]:
    """UCX options, names without ``UCX_``: ``options`` win over the variables of ``environ``, which
    win over ``defaults``. What ``environ`` sets is left out: UCX reads it from there."""
    chosen = {name: value for name, value in defaults.items() if f"UCX_{name}" not in environ}
    return chosen | {name.removeprefix("UCX_"): value for name, value in options.items()}


def warn_about_allocator(device: str, environ: Mapping[str, str]) -> None:
    """Logs a warning if PyTorch is told to allocate GPU memory that UCX cannot share."""
    if device.startswith("cuda") and sets_expandable_segments(environ):
        logger.warning(
            "PYTORCH_CUDA_ALLOC_CONF sets expandable_segments:True: cuda_ipc cannot export "
            "such memory and transfers between GPUs fall back to copies through the host; "
            "set expandable_segments:False"
        )


def sets_expandable_segments(environ: Mapping[str, str]) -> bool:
    """Whether PyTorch is told to allocate GPU memory that cuda_ipc cannot export."""
    names = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    settings = ",".join(environ.get(name, "") for name in names)
    return "expandable_segments:true" in settings.replace(" ", "").lower()
