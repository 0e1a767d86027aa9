"""Frameworks that know GPUs alone, on a CPU: what they ask of ``torch.cuda`` is answered here.

Import it before a framework, in a process that runs nothing else. The frameworks' files stay as
they are; nothing that computes is touched, but for the dtype of experts.
"""

from __future__ import annotations

import copy
import types
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.overrides import TorchFunctionMode
from transformers import masking_utils  # noqa: F401  # its annotations name torch.cuda.Stream


class CpuModule(types.ModuleType):
    """``torch.cpu``, with what torchtitan reads from ``torch.cuda``."""

    def __init__(self) -> None:
        super().__init__("cpu_devices")
        self.get_device_name = lambda device=None: "CPU"
        self.get_device_properties = lambda device=None: types.SimpleNamespace(total_memory=2**34)
        self.reset_peak_memory_stats = lambda device=None: None
        self.empty_cache = lambda: None
        self.memory_stats: Any = lambda device=None: {}
        self.current_device = lambda: 0
        self.device_count = lambda: 64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


def torchtitan_on_cpu() -> None:
    """torchtitan takes "cuda" if there is no accelerator; its choice is in two globals."""
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", CpuModule()
    untyped: Any = dist
    if not hasattr(dist, "set_timeout"):  # which is new in torch 2.14
        untyped.set_timeout = lambda *_, **__: None
    divide = FSDPModule.set_gradient_divide_factor

    def divide_and_sum(self: FSDPModule, factor: float) -> None:
        divide(self, factor)
        # gloo has no sum with a factor.
        self.set_force_sum_reduction_for_comms(True)

    fsdp: Any = FSDPModule
    fsdp.set_gradient_divide_factor = divide_and_sum


def float32_experts() -> None:
    """torchtitan's experts convert to bfloat16 whatever the model's dtype, so that gradients could
    be compared to 1 in 256 only. They stay in float32."""
    untyped: Any = torch.Tensor
    untyped.bfloat16 = torch.Tensor.float


class CudaIsCpu(TorchFunctionMode):
    """Tensors that are asked for on "cuda" are made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        named = dict(kwargs or {})
        if str(named.get("device", "")).startswith("cuda"):
            named["device"] = "cpu"
        if function is torch.Tensor.cuda:
            return args[0]
        return function(*args, **named)


def megatron_on_cpu() -> None:
    """Megatron-core makes its buffers on ``torch.cuda.current_device()``, or "cuda"; it keeps a
    GPU's random numbers for what it recomputes, and experts have a stream of their own."""
    untyped: Any = torch.cuda
    untyped.current_device = lambda: torch.device("cpu")
    untyped.synchronize = lambda *_: None
    untyped.random.get_rng_state = lambda device=None: torch.zeros(16, dtype=torch.uint8)
    stream: Any = types.SimpleNamespace(
        record_event=lambda: types.SimpleNamespace(synchronize=lambda: None)
    )
    untyped.Stream = untyped.current_stream = lambda *_, **__: stream
    untyped.stream = lambda _: nullcontext()
    mode: Any = CudaIsCpu()
    mode.__enter__()
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    if not hasattr(moe_utils, "te_general_gemm"):
        # 0.16.1 asks whether it is None, and defines it with TransformerEngine alone.
        moe_utils.te_general_gemm = None
    # Counts of tokens become arrays when they are moved from a GPU.
    token_dispatcher.maybe_move_tensor_to_cpu = lambda tensor, as_numpy=False, **_: (
        tensor.numpy() if as_numpy else tensor
    )
    # What recomputes norms asks TransformerEngine for its state, which is not there.
    random.FP8GlobalStateManager = types.SimpleNamespace(is_fp8_enabled=lambda: False)
    random.activation_recompute_forward = random.fp8_autocast = lambda **_: nullcontext()
    make = WrappedTorchNorm.__new__

    def make_for_parts(cls: Any, config: Any, *args: Any, **named: Any) -> Any:
        """It knows no sequence parallelism, of which what is computed is the same."""
        whole = copy.copy(config)
        whole.sequence_parallel = False
        norm = make(cls, whole, *args, **named)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    norms: Any = WrappedTorchNorm
    norms.__new__ = make_for_parts
