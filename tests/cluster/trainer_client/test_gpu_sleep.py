"""A sleeping model gives its GPU back to a rollout engine, and takes it again."""

from __future__ import annotations

import gc
import os
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import distca
from core_attention.shape import AttentionShape
from tests.cluster.trainer_client.test_gpu_parity import ON_GPU
from tests.support.cluster import cluster, keep_profile, on_this_host
from tests.support.process_groups import process_group
from tests.support.tiny_models import TINY_LLAMA

pytestmark = ON_GPU

CYCLES, MIB = 50, 2**20
LEFT_MIB, LEAKED_MIB, WAKE_SECONDS = 200, 16, 1.0
"""Of a device: at most left by a model that sleeps, and more of it after all cycles."""

SHAPE = AttentionShape(num_heads=32, num_heads_kv=8, head_dim=128, head_dim_v=128, dtype="bfloat16")
SIZES = {
    **TINY_LLAMA, "hidden_size": 4096, "head_dim": 128,
    "num_attention_heads": 32, "num_key_value_heads": 8,
}  # fmt: skip


def used_mib() -> float:
    """Of the device by all processes, without what PyTorch keeps for later."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def step(model: torch.nn.Module, ids: torch.Tensor, positions: torch.Tensor) -> float:
    began = time.perf_counter()
    model(input_ids=ids, position_ids=positions).logits.float().mean().backward()
    model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def test_a_sleeping_model_leaves_the_device_and_wakes_in_time(tmp_path: Path) -> None:
    lengths = [30000, 1, 2767]
    positions = torch.cat([torch.arange(n) for n in lengths])[None].cuda()
    ids = torch.randint(64, positions.shape).cuda()
    auto: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        model, plain = (
            auto.from_config(
                AutoConfig.for_model("llama", **SIZES),
                attn_implementation=attention,
                dtype=torch.bfloat16,
            )
            for attention in ("distca", "sdpa")
        )
    # What any training on the device leaves there: libraries' workspaces and modules.
    step(plain, ids[:, :512], positions[:, :512])
    del plain
    keep_profile(tmp_path, SHAPE, "cuda")
    with cluster(tmp_path, 0) as running, process_group(tmp_path):
        before = used_mib()
        options = {"placement": "in-place", **on_this_host(tmp_path)}
        with distca.attach(model, control_plane=running.address, job="s", **options) as attached:
            awake = [step(model, ids, positions) for _ in range(4)]
            left, woken, threads, files = [], [], [], []
            for _ in range(CYCLES):
                attached.sleep()
                left.append(used_mib() - before)
                threads.append(threading.active_count())
                files.append(len(os.listdir("/proc/self/fd")))
                attached.wake()
                woken.append(step(model, ids, positions) - statistics.median(awake[1:]))
    print(
        f"left asleep {left[0]:.0f} MiB, after {CYCLES} cycles {left[-1]:.0f}; waking takes "
        f"{statistics.median(woken):.3f} s, at most {max(woken):.3f}; "
        f"threads {threads[0]} {threads[-1]}, files {files[0]} {files[-1]}"
    )
    assert max(left) <= LEFT_MIB
    assert left[-1] - left[1] <= LEAKED_MIB
    assert statistics.median(woken) <= WAKE_SECONDS
    assert threads[-1] <= threads[1]
    assert files[-1] <= files[1] + 1
