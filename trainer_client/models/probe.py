"""A probe of the core attention that a model calls: one forward in which none is served.

During the probe :func:`trainer_client.core_attention` notes what it is given and returns zeros. The
model is left as it was: no gradients, and random number generators, buffers and what modules keep
on themselves stay as they are.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.parallel import DistributedDataParallel

from attention_node.settings import check_device, device_name
from core_attention.ca_task import MaskKind
from core_attention.errors import TensorError
from core_attention.shape import AttentionShape
from core_attention.tensor_checks import check_qkv
from trainer_client.errors import SessionError
from trainer_client.hooks.compile_boundary import uncompiled
from trainer_client.hooks.kept_state import untouched
from trainer_client.hooks.probing import current_probe
from trainer_client.hooks.sharded_weights import is_fsdp_1, units
from trainer_client.hooks.tensor_parallel import (
    check_local,
    mesh_of,
    n_shares,
    named_failures,
)
from trainer_client.step.ping_pong import PingPong

logger = logging.getLogger(__name__)

DOCUMENT_TOKENS = 4
"""The default inputs are two documents of so many tokens, packed."""


def refuse_prompts(model: nn.Module) -> None:
    """Checks that no adapter of peft in ``model`` puts tokens or keys before its rows."""

    for module in model.modules():
        config: Any = getattr(module, "active_peft_config", None)
        if getattr(config, "is_prompt_learning", False) is True:
            raise SessionError(
                f"{type(config).__name__} of peft puts {config.num_virtual_tokens} virtual tokens "
                "before every row; use an adapter inside the layers, such as LoRA, or 'with "
                "trainer_client.at_home():'"
            )


_BY_HAND = "or set n_layers, shape and softmax_scale of SessionOptions yourself"


@dataclass(frozen=True, kw_only=True)
class CallKind:
    """The properties that all calls of core attention in a job share.

    Attributes:
        shape: heads, head dims and dtype.
        softmax_scale: what the model multiplies q.k by; None: it does not say.
        device: where the tensors are.
    """

    shape: AttentionShape
    softmax_scale: float | None
    device: torch.device

    def __str__(self) -> str:
        shape = ", ".join(
            f"{field.name}={getattr(self.shape, field.name)}" for field in fields(self.shape)
        )
        return f"{shape}, softmax_scale={self.softmax_scale} on {self.device}"


class Recorder:
    """Takes the calls of core attention of one forward.

    Args:
        model: its modules name the calls.
    """

    def __init__(self, model: nn.Module) -> None:
        self.calls: list[tuple[str, CallKind]] = []
        self.home_calls = 0
        self._names = {id(module): name for name, module in model.named_modules()}
        self._inside: list[nn.Module] = []

    def call(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        scale: float | None = None,
        *,
        softcap: float | None = None,
        mask: MaskKind = MaskKind.CAUSAL,
        served: bool = True,
    ) -> torch.Tensor:
        """Notes a call; of those that are computed at home only that there was one.

        Args:
            q: ``[rows, num_heads, head_dim]``.
            k: ``[rows, num_heads_kv, head_dim]``.
            v: ``[rows, num_heads_kv, head_dim_v]``.
            scale: what the model multiplies q.k by, if it says.
            softcap: of the scores.
            mask: which keys a query sees.
            served: whether servers are to compute it.

        Returns:
            Zeros in the place of o, ``[rows, num_heads, head_dim_v]``.
        """
        check_local(q=q, k=k, v=v)
        q, k, v = (_as_under_autocast(tensor) for tensor in (q, k, v))
        for name, tensor in (("q", q), ("k", k), ("v", v)):
            if tensor.dim() != 3:
                raise TensorError(
                    f"{name} has shape {tuple(tensor.shape)}; it must have 3 dimensions: rows, "
                    "heads, head dim"
                )
        shape = AttentionShape(
            num_heads=q.shape[1],
            num_heads_kv=k.shape[1],
            head_dim=q.shape[2],
            head_dim_v=v.shape[2],
            dtype=str(q.dtype).removeprefix("torch."),
            softcap=softcap or 0.0,
            mask=mask,
        )
        check_qkv(q, k, v, shape, len(q))
        if served:
            self.calls.append(
                (self._place(), CallKind(shape=shape, softmax_scale=scale, device=q.device))
            )
        else:
            self.home_calls += 1
        return q.new_zeros(len(q), shape.num_heads, shape.head_dim_v)

    def kind(self) -> CallKind:
        """The properties that all calls have in common."""

        kinds: dict[CallKind, list[str]] = {}
        for place, kind in self.calls:
            kinds.setdefault(kind, []).append(place)
        if not kinds and self.home_calls:
            raise SessionError(
                f"all {self.home_calls} layers of the model have a window or chunks, and servers "
                "would have nothing to do; train it without DistCA"
            )
        if not kinds:
            raise SessionError(
                "the model did not call core attention; load it with attn_implementation='distca' "
                "after 'import trainer_client.models.transformers', or call "
                "trainer_client.core_attention in it"
            )
        if len(kinds) > 1:
            shown = "; ".join(f"{_some(places)}: {kind}" for kind, places in kinds.items())
            raise SessionError(
                f"calls of core attention differ in shape, dtype or scale: {shown}; serve layers "
                "of one kind, and give the others another implementation"
            )
        return next(iter(kinds))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Calls of core attention inside the block come here."""
        token = current_probe.set(self)
        try:
            with (
                register_module_forward_pre_hook(self._enter),
                register_module_forward_hook(self._leave, always_call=True),
            ):
                yield
        finally:
            current_probe.reset(token)

    def _enter(self, module: nn.Module, _: Any) -> None:
        # The hooks are the process's; other threads run modules too.
        if current_probe.get() is self:
            self._inside.append(module)

    def _leave(self, module: nn.Module, *_: Any) -> None:
        if current_probe.get() is self:
            self._inside.pop()

    def _place(self) -> str:
        """The name of the module that calls."""
        names = (self._names.get(id(module)) for module in reversed(self._inside))
        return next((name for name in names if name), f"call {len(self.calls) + 1}")


@dataclass(frozen=True, kw_only=True)
class ProbedAttention:
    """The core attention of a model.

    Attributes:
        n_layers: calls in one forward that are served.
        kind: what they share.
    """

    n_layers: int
    kind: CallKind

    def complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """``options`` of a session, with those that follow from the model."""

        found = {
            "n_layers": self.n_layers,
            "shape": self.kind.shape,
            "softmax_scale": self.kind.softmax_scale,
            "device": str(self.kind.device),
        }
        for name, value in found.items():
            given = options.get(name)
            if given is not None and value is not None and not _agree(given, value):
                raise ValueError(
                    f"{name} is {given}, and the probe of the model found {value}; leave {name} "
                    "out, or probe the model as it is trained (device, autocast, inputs)"
                )
        return {**found, **{name: value for name, value in options.items() if value is not None}}


def probe_model(model: nn.Module, inputs: Mapping[str, Any] | None = None) -> ProbedAttention:
    """Runs one forward of ``model``, in the mode (train or eval) and the autocast that it is in.

    ``DistributedDataParallel``, :class:`trainer_client.PingPong` and ``torch.compile`` around the
    model are passed by, so that no collective runs and nothing is compiled.

    The ranks of a tensor-parallel group call it together.

    Args:
        model: any module that calls core attention.
        inputs: keyword arguments of its forward, as of a nano-batch; a few tokens are enough.
            None: two short documents as ``input_ids`` and ``position_ids``, for a model of
            transformers.

    Raises:
        SessionError: the model's weights are sharded by FSDP or on the meta device, it does not
            call core attention, its calls differ, or an adapter adds to its rows.
        ValueError: the model is not one of transformers and ``inputs`` were not given, or it is one
            that cannot be served (``trainer_client.models.transformers.UnsupportedModel``).
    """
    refuse_prompts(model)
    model = _bare(model)
    _check_weights(model)
    given = _default_inputs(model) if inputs is None else inputs
    device = next((parameter.device for parameter in model.parameters()), None)
    moved = {
        name: value.to(device) if isinstance(value, torch.Tensor) and device else value
        for name, value in given.items()
    }
    recorder = Recorder(model)
    with named_failures(model):
        _check_documents(model)
        with untouched(model), uncompiled(), recorder.recording():
            model(**moved)
    found = ProbedAttention(n_layers=len(recorder.calls), kind=recorder.kind())
    logger.info(
        "%s: one forward of a few tokens, without gradients, called core attention in %d layers "
        "that are served and %d that are computed at home: %s",
        type(model).__name__,
        found.n_layers,
        recorder.home_calls,
        found.kind,
    )
    return found


def _check_documents(model: nn.Module) -> None:
    """While the weights are whole. Models of transformers are there only if the integration is."""
    if "trainer_client.models.transformers" in sys.modules:
        from trainer_client.models.document_check import check_models_in

        check_models_in(model)


def _bare(model: nn.Module) -> nn.Module:
    """``model`` without what is wrapped around it."""
    while True:
        # The wrapper of torch.compile has no public name.
        if isinstance(compiled := getattr(model, "_orig_mod", None), nn.Module):
            model = compiled
        elif isinstance(model, DistributedDataParallel | PingPong):
            model = model.module
        else:
            return model


def _check_weights(model: nn.Module) -> None:
    """A forward must need no other rank but those of a tensor-parallel group, and give true shapes
    and devices."""
    if is_fsdp_1(model):
        raise SessionError(
            "the model is sharded with FullyShardedDataParallel, whose forward needs all ranks; "
            f"call SessionOptions.for_model before the model is wrapped, {_BY_HAND}"
        )
    # Under tensor parallelism ranks come together anyway.
    if next(units(model), None) is not None and mesh_of(model) is None:
        raise SessionError(
            "the model is sharded with fully_shard, whose forward needs all ranks; call "
            f"SessionOptions.for_model before the model is sharded, {_BY_HAND}"
        )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise SessionError(
                f"{name} is on the meta device; give the model memory before "
                f"SessionOptions.for_model (model.to_empty(device=...)), {_BY_HAND}"
            )


def _default_inputs(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):
        raise ValueError(
            f"{type(model).__name__} is not a model of transformers; give SessionOptions.for_model "
            f"inputs={{...}}, the keyword arguments of one forward"
        )
    # Sequence parallelism gives all ranks of a group equally many rows.
    positions = torch.arange(DOCUMENT_TOKENS * n_shares(model)).repeat(2)[None]
    inputs = {
        "input_ids": positions % config.get_text_config().vocab_size,
        "position_ids": positions,
        "use_cache": False,
    }
    parameters = inspect.signature(model.forward).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return inputs
    return {name: value for name, value in inputs.items() if name in parameters}


def _as_under_autocast(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in the dtype that autocast gives to attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype is torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _agree(given: Any, found: Any) -> bool:
    if isinstance(found, float):
        return math.isclose(given, found, rel_tol=1e-6)
    if isinstance(found, str):
        return _numbered(given) == _numbered(found)
    return bool(given == found)


def _numbered(device: str | torch.device) -> str:
    """``device`` with its number: ``"cuda"`` is the current one."""
    device = device_name(device)
    check_device("device", device)
    if torch.device(device).type == "cuda" and torch.device(device).index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return device


def _some(places: list[str]) -> str:
    shown = ", ".join(places[:4])
    return shown if len(places) <= 4 else f"{shown} and {len(places) - 4} more"
