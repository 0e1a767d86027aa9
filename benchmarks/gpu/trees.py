"""Samples that share a prompt, trained as a tree that DistCA serves and as packed separate rows.

A Llama of transformers, DDP, activation checkpoints, a head whose logits are never whole. Rows are
attended by FlashAttention-4, ``--samples`` of them in a micro-batch. A group is the length of its
prompt, then of each level how many branches a node has and their length.

    python -m benchmarks.gpu.trees --groups 32768,8x8192 65536,8x8192 16384,2x12288,2x8192,2x4096
    python -m benchmarks.gpu.trees --device cpu --tiny --groups 96,4x32
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import distca
import trainer_client.models.transformers
from benchmarks.gpu.end_to_end import start_control_plane
from benchmarks.gpu.training import attention, methods
from benchmarks.gpu.training.stack import ModelShape
from benchmarks.gpu.training.stopwatch import Stopwatch
from benchmarks.gpu.user_loop import COMPILE
from benchmarks.rank_group import RankGroup, begin_rank
from core_attention.kernels.select import select_kernel
from core_attention.manifest import RankManifest, Segment
from distca.apps.local.supervisor import Supervisor
from trainer_client.loops.token_scores import Head, score

Scorer = Callable[[torch.Tensor, Head], list[torch.Tensor]]
"""Makes log-probabilities of hidden states ``[1, rows, hidden]``."""

Batch = tuple[dict[str, torch.Tensor], Scorer, list[float]]
"""Arguments of the model, and the advantage of each sample that the scorer scores."""


def levels_of(group: str) -> list[tuple[int, int]]:
    """(branches of a node, their length) by level; the prompt is one branch."""
    return [
        (int(n or 1), int(length)) for n, _, length in (p.rpartition("x") for p in group.split(","))
    ]


def samples_of(group: str, vocabulary: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    paths = [torch.empty(0, dtype=torch.int64)]
    for n, length in levels_of(group):
        paths = [
            torch.cat([path, torch.randint(vocabulary, (length,), generator=generator)])
            for path in paths
            for _ in range(n)
        ]
    return paths


def operations(group: str, shape: ModelShape, *, shared: bool) -> float:
    """Of a step: layers are computed twice forward but for attention, and the head too."""
    levels, total = levels_of(group), 0.0
    n_leaves, nodes, offset = math.prod(n for n, _ in levels), 1, 0
    layer = (shape.matrix_weights - shape.hidden * shape.vocabulary) / shape.layers
    for depth, (n, length) in enumerate(levels):
        nodes *= n
        times = nodes if shared else n_leaves
        pairs = times * (length * offset + length * (length + 1) // 2)
        attended = shape.attention.qk_flops(pairs) + shape.attention.qk_flops(pairs, backward=True)
        head = shape.hidden * shape.vocabulary if depth else 0
        total += shape.layers * (8 * times * length * layer + attended) + 8 * times * length * head
        offset += length
    return total


class Policy(nn.Module):
    """A model whose forward returns log-probabilities."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: dict[str, torch.Tensor], scorer: Scorer) -> list[torch.Tensor]:
        hidden = self.model.base_model(**inputs, use_cache=False).last_hidden_state
        return scorer(hidden, self.model.lm_head)


class Loop:
    """One rank's steps on one group.

    Args:
        chosen: the program's arguments.
        device: of the rank, made current.
    """

    def __init__(self, chosen: argparse.Namespace, device: torch.device) -> None:
        self._chosen, self._device, self._shape = chosen, device, shape_of(chosen)
        self._rank, self._n_ranks = dist.get_rank(), dist.get_world_size()
        (group,) = chosen.groups
        self._prompt = levels_of(group)[0][1]
        self._samples = samples_of(group, self._shape.vocabulary)
        generator = torch.Generator().manual_seed(1)
        self._advantages = torch.randn(len(self._samples), generator=generator).tolist()
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        served = chosen.way == "tree"
        names = trainer_client.models.transformers.IMPLEMENTATION, attention.IMPLEMENTATION
        with device:
            model = auto.from_config(
                self._shape.config(max(map(len, self._samples))),
                attn_implementation=names[0] if served else names[1],
                dtype=getattr(torch, self._shape.dtype),
            )
        self.model = model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
        self._ddp = DistributedDataParallel(Policy(model))
        self._optimizer = torch.optim.AdamW(model.parameters(), 1e-5, fused=device.type == "cuda")

    def run(self) -> tuple[list[float], list[float], float, float]:
        """Seconds of each measured step, losses and the first gradient's norm of all, and GiB."""
        n_scored = sum(len(sample) - self._prompt for sample in self._samples)
        seconds, losses, norms = [], [], []
        for _ in range(self._chosen.warm_ups + self._chosen.steps):
            began, total = time.perf_counter(), 0.0
            batches = [*(self._tree() if self._chosen.way == "tree" else self._rows())]
            for at, (inputs, scorer, advantages) in enumerate(batches):
                last = at == len(batches) - 1
                with nullcontext() if last else self._ddp.no_sync():
                    pairs = zip(self._ddp(inputs, scorer), advantages, strict=True)
                    loss = -sum((a * logs.sum() for logs, a in pairs), torch.zeros(())) / n_scored
                    (loss * self._n_ranks).backward()
                total += loss.item()
            norms.append(nn.utils.clip_grad_norm_(self._ddp.parameters(), 1.0).item())
            self._optimizer.step()
            self._optimizer.zero_grad()
            on_gpu = self._device.type == "cuda"
            if on_gpu:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - began)
            losses.append(total)
        gib = torch.cuda.max_memory_reserved() / 2**30 if on_gpu else 0.0
        return seconds[self._chosen.warm_ups :], losses, norms[0], gib

    def _tree(self) -> Iterator[Batch]:
        tree = distca.pack_tree(
            self._samples,
            prompt_lengths=[self._prompt] * len(self._samples),
            device=self._device,
            rank=self._rank,
            world_size=self._n_ranks,
        )
        yield tree.inputs, tree.log_probs, self._advantages

    def _rows(self) -> Iterator[Batch]:
        kernel = select_kernel(self._device)
        kernel.warm_up(self._shape.attention)
        mine = range(self._rank, len(self._samples), self._n_ranks)
        for first in range(0, len(mine), self._chosen.samples):
            packed = [self._samples[i] for i in mine[first : first + self._chosen.samples]]
            segments = tuple(Segment(i, len(s), 0, len(s)) for i, s in enumerate(packed))
            manifest = RankManifest(0, self._rank, (segments,))
            watch = Stopwatch(self._device)
            attention.use(attention.WholeDocuments(kernel, manifest, self._device, watch))
            positions = torch.cat([torch.arange(len(sample)) for sample in packed])
            ends = torch.tensor([len(sample) for sample in packed]).cumsum(0) - 1
            scored = positions >= self._prompt - 1
            scored[ends] = False
            scorer = partial(self._scores, packed, scored.nonzero()[:, 0])
            inputs = {"input_ids": torch.cat(packed)[None], "position_ids": positions[None]}
            inputs = {name: each.to(self._device) for name, each in inputs.items()}
            advantages = [self._advantages[i] for i in mine[first : first + self._chosen.samples]]
            yield inputs, scorer, advantages

    def _scores(
        self, packed: list[torch.Tensor], at: torch.Tensor, hidden: torch.Tensor, head: Head
    ) -> list[torch.Tensor]:
        tokens, rows = torch.cat(packed)[at + 1], hidden[0, at.to(hidden.device)]
        (logs,) = score(rows, head, torch.arange(len(at)), tokens, 1.0, entropies=False)
        return list(logs.split([len(sample) - self._prompt for sample in packed]))


def run_rank(chosen: argparse.Namespace) -> None:
    """A rank's process, one way on one group."""
    begin_rank()
    rank, device, folder = int(os.environ["RANK"]), torch.device("cpu"), Path(chosen.folder)
    if chosen.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if rank == 0:
            methods.ship_profile(folder, device, shape_of(chosen).attention)
    dist.init_process_group()
    loop = Loop(chosen, device)
    with ExitStack() as stack:
        if chosen.way == "tree":
            given: dict[str, Any] = {"placement": "in-place", "data_host": "127.0.0.1"}
            address = chosen.control_plane
            stack.enter_context(
                distca.attach(loop.model, control_plane=address, profile_dir=folder, **given)
            )
        seconds, losses, norm, gib = loop.run()
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, (seconds, losses, gib))
    found = {
        "seconds": [max(step) for step in zip(*(each[0] for each in ranks), strict=True)],
        "losses": [sum(step) for step in zip(*(each[1] for each in ranks), strict=True)],
        "norm": norm,
        "gib": max(each[2] for each in ranks),
    }
    (folder / f"found-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def shape_of(chosen: argparse.Namespace) -> ModelShape:
    if chosen.tiny:
        return ModelShape.tiny(2, chosen.device)
    return ModelShape(layers=chosen.layers)


def measure(chosen: argparse.Namespace, group: str, way: str, address: str) -> dict[str, Any]:
    """Runs a way in processes of its own; returns what they found, nothing if one failed."""
    with tempfile.TemporaryDirectory() as folder:
        own = [f"--groups={group}", f"--way={way}", f"--control-plane={address}"]
        command = [sys.executable, "-m", "benchmarks.gpu.trees", *sys.argv[1:], *own]
        ranks = RankGroup(
            [*command, f"--folder={folder}"],
            chosen.gpus,
            Path(folder),
            limit_seconds=chosen.limit_seconds,
        )
        if any(ranks.wait()):
            print(f"{group} as {way} did not end rightly:\n{ranks.tails(40)}", flush=True)
            return {}
        found: dict[str, Any] = json.loads(Path(folder, "found-0.json").read_text())
        return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--groups", nargs="+", default=["32768,8x8192"], help="PROMPT,NxLENGTH,...")
    parser.add_argument("--ways", default="rows,tree")
    parser.add_argument("--gpus", type=int, default=1, help="ranks, one a GPU")
    parser.add_argument("--layers", type=int, default=8, help="of the Llama-3-8B shape")
    parser.add_argument("--samples", type=int, default=2, help="separate rows of a micro-batch")
    parser.add_argument("--steps", type=int, default=3, help="measured")
    parser.add_argument("--warm-ups", type=int, default=2, help="steps before them")
    parser.add_argument("--limit-seconds", type=float, default=200.0, help="of each way")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    for internal in ("--way", "--control-plane", "--folder"):
        parser.add_argument(internal, default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    chosen = parse()
    if chosen.way:
        run_rank(chosen)
        return
    table = Table(title=f"{chosen.gpus} x {chosen.device}, {shape_of(chosen).layers} layers")
    for column in ("group", "way", "samples/s", "step s", "reserved GiB", "losses", "first norm"):
        table.add_column(column, overflow="fold")
    table.add_column("faster, of operations' ratio")
    subprocess.run([sys.executable, "-c", COMPILE], check=True)
    with tempfile.TemporaryDirectory() as folder, Supervisor() as supervisor:
        start_control_plane(supervisor, Path(folder))
        address = methods.await_address(Path(folder, methods.ADDRESS_FILE))
        for group in chosen.groups:
            n_samples, rates = len(samples_of(group, 2)), []
            work = [operations(group, shape_of(chosen), shared=shared) for shared in (False, True)]
            for way in chosen.ways.split(","):
                found = measure(chosen, group, way, address)
                if not found:
                    continue
                rates.append(n_samples * chosen.steps / sum(found["seconds"]))
                gain = ""
                if way == "tree" and len(rates) == 2:
                    gain = f"{rates[1] / rates[0]:.2f} of {work[0] / work[1]:.2f}"
                table.add_row(
                    group,
                    way,
                    f"{rates[-1]:.3f}",
                    " ".join(f"{seconds:.3f}" for seconds in found["seconds"]),
                    f"{found['gib']:.1f}",
                    " ".join(f"{loss:+.6f}" for loss in found["losses"]),
                    f"{found['norm']:.5f}",
                    gain,
                )
                Console(width=170).print(table)


if __name__ == "__main__":
    main()
