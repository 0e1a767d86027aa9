"""Options of a session, some of them found in the model or in the environment."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args, get_type_hints

from torch import nn

from distca.contract.settings import ClientTls
from trainer_client.models.found_options import options_of_model
from trainer_client.options import Placement, RankOptions

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


class SessionOptions(RankOptions):
    """Options with which a rank joins a job: those of :class:`RankOptions`."""

    @classmethod
    def in_environment(cls, control_plane: str | None = None, **options: Any) -> SessionOptions:
        """The options that are given, and those that :func:`options_of_environment` finds beside
        them."""
        found = {**options_of_environment(), **options}
        if control_plane is not None:
            found["control_plane"] = control_plane
        if "control_plane" not in found:
            raise ValueError(
                "control_plane is not given; pass its host:port, or set DISTCA_CONTROL_PLANE"
            )
        return cls(**found)

    @classmethod
    def for_model(cls, model: nn.Module, **options: Any) -> SessionOptions:
        """Options whose ``n_layers``, ``shape``, ``softmax_scale`` and ``device`` follow from the
        models of transformers in ``model``, and others from the environment. The models run a few
        tokens, without gradients, and are left as they were; nothing is sent.

        Call it as the model is trained: on its device, in its dtype, inside ``torch.autocast`` if
        its steps are. Where weights are sharded, all ranks call it together. Under tensor
        parallelism ``shape`` is what one rank has, and ``tensor_parallel_ranks`` are found too.
        """
        return cls.in_environment(**options_of_model(model, options))


def options_of_environment(environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """The options that ``environ`` names: ``DISTCA_`` and the option in capitals, of TLS the
    variables of ``distca train``. Empty ones count as not given."""
    tls = {each.name: each.metadata["option"][0].envvar for each in fields(ClientTls)}
    hints = get_type_hints(RankOptions)
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
    if found.get("metrics_port"):
        # Ranks of a host take consecutive ports.
        found["metrics_port"] += int(environ.get("LOCAL_RANK", "0"))
    return found
