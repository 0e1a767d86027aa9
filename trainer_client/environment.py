"""Options of a session that the environment gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from distca.contract.settings import ClientTls
from trainer_client.options import Placement, SessionOptions

_FOUND_OTHERWISE = {
    *("job", "rank", "n_ranks", "tensor_parallel_ranks"),
    *("n_layers", "n_nano_batches", "softmax_scale", "device"),
}
"""Options that no variable gives: they follow from model and process."""

_SWITCHES = {"1": True, "true": True, "0": False, "false": False}
_READ: dict[Any, Callable[[str], Any]] = {
    **dict.fromkeys((str, Path, Placement), str),
    int: int,
    float: float,
    bool: lambda text: _SWITCHES[text.lower()],
}
"""The readers of variables, by the type of their option."""


def session_options(**given: Any) -> SessionOptions:
    """The options that are given, and those that :func:`options_of_environment` finds beside
    them."""
    known = {name: value for name, value in given.items() if value is not None}
    found = with_own_port({**options_of_environment(), **known})
    if "control_plane" not in found:
        raise ValueError(
            "control_plane is not given; pass its host:port, or set DISTCA_CONTROL_PLANE"
        )
    return SessionOptions(**found)


def options_of_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that ``environ`` names: ``DISTCA_`` and the option in capitals, of TLS the
    variables of ``distca train``. Empty ones count as not given."""
    tls = {each.name: each.metadata["option"][0].envvar for each in fields(ClientTls)}
    hints = get_type_hints(SessionOptions)
    found: dict[str, Any] = {}
    for name in hints.keys() - _FOUND_OTHERWISE:
        variable = tls.get(name, f"DISTCA_{name.upper()}")
        kind = next(iter(get_args(hints[name])), hints[name])
        if (text := environ.get(variable)) and kind in _READ:
            try:
                found[name] = _READ[kind](text)
            except (KeyError, ValueError):
                valid = ", ".join(_SWITCHES) if kind is bool else f"numbers ({kind.__name__})"
                raise ValueError(f"{variable} is {text!r}; valid: {valid}") from None
    return found


def with_own_port(
    options: dict[str, Any], model: int = 0, environ: Mapping[str, str] = os.environ
) -> dict[str, Any]:
    """``options`` with this rank's ``metrics_port`` in place of the host's first: ranks take
    consecutive ports, and those of a further ``model`` of theirs follow."""
    if not (first := options.get("metrics_port")):
        return options
    before = model * int(environ.get("LOCAL_WORLD_SIZE", "1"))
    return {**options, "metrics_port": first + before + int(environ.get("LOCAL_RANK", "0"))}
