"""Models of transformers with windows, sinks and experts: served beside plain packing, in one run.

    python -m benchmarks.gpu.models --ranks 2 --json out.json
    python -m benchmarks.gpu.models --model llama-3-8b --frozen 0,4       # lowest layers frozen
    python -m benchmarks.gpu.models --model gemma-3-12b --tokens 32768 --over-ranks
    python -m benchmarks.gpu.models --model gpt-oss-20b --layers 2        # documents of up to 128K
    python -m benchmarks.gpu.models --device cpu --model tiny-gpt-oss --tokens 512 --steps 2

The shapes are gpt-oss-20b's and Gemma-3-12B's with fewer layers, from random weights. A rank has
two nano-batches of ``--tokens`` tokens, packed with documents of up to the tokens of both in the
order in which they are drawn; one that crosses from the first to the second is in both. Weights
are sharded (FSDP2), layers recomputed, logits made in chunks.

*plain* is a session of its own whose tolerance lets everything stay at home, so that both ways run
the same code: windows at home, full layers by the rank's own server. Each runs twice, plain
first and last, since what runs later in a process is faster. *Headroom* is how much faster
plain packing would be if core attention of full layers were spread evenly, as plans forecast it.
``--over-ranks`` has documents of up to the tokens of a step, which go on over nano-batches and
ranks, inside windows as well; *edge waits* are what a rank's thread waited for keys of others.
With *frozen* layers, the embedding and the lowest layers have no gradients, as under adapters in
the upper layers alone; *saved* is what that saves of a step.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.gpu.end_to_end import start_control_plane
from benchmarks.gpu.plain_packing import TOLERANCES, seconds_lost
from benchmarks.gpu.training.batches import (
    draw_batch,
    over_ranks,
    packed_in_halves,
    tokens_of,
)
from benchmarks.gpu.training.methods import await_address
from benchmarks.gpu.training.rank_processes import joined, let_go, spawned
from core_attention.manifest import RankManifest, Segment
from distca.local.supervisor import Supervisor
from distca.train.loss import chunked_loss
from distca.train.measurements import StepMeasurements
from distca.train.sharding import ShardedModel
from trainer_client import PingPong, Session, SessionOptions

MODELS: dict[str, dict[str, Any]] = {
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 4},
    "gemma-3-12b": {
        "model_type": "gemma3_text",
        "num_hidden_layers": 6,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
    },
    "llama-3-8b": {
        "model_type": "llama",
        "num_hidden_layers": 8,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "tiny-gpt-oss": {
        "model_type": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "vocab_size": 512,
    },
}
"""Published shapes with fewer layers, each with its own order of kinds; and one for CPUs."""

WARM_UPS = 2


@dataclass(frozen=True, kw_only=True)
class Run:
    """What every rank must know; ``tokens`` are of a nano-batch, ``control_plane`` is a file,
    ``layers`` is 0 for those of MODELS, ``frozen`` is how many of the lowest layers are."""

    model: str
    ranks: int
    tokens: int
    steps: int
    device: str
    distribution: str
    control_plane: str
    layers: int = 0
    frozen: int = 0
    over_ranks: bool = False

    @property
    def name(self) -> str:
        """Of the model as it is trained."""
        return self.model + (f", {self.frozen} frozen" if self.frozen else "")

    @property
    def turns(self) -> list[str]:
        """Ways, in the order in which they run; no rank can hold a document of several at home."""
        ways = ["served"] if self.over_ranks else list(TOLERANCES)
        return [*ways, *reversed(ways)] if len(ways) > 1 else ways


class WithLoss(nn.Module):
    """Sums the loss of a nano-batch's tokens; logits are made in chunks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model.model
        self.head = model.lm_head

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """``[1, tokens]`` each; labels are of the next tokens."""
        hidden = self.model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False
        ).last_hidden_state
        return chunked_loss(hidden[0], self.head.weight, labels[0])


class Interleaved(nn.Module):
    """All nano-batches of a step in one call, as FSDP wants it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._ping_pong = PingPong(module)

    def forward(self, nano_batches: list[dict[str, torch.Tensor]]) -> torch.Tensor:
        losses: list[torch.Tensor] = self._ping_pong(nano_batches)
        return torch.stack(losses).sum()


def config_of(run: Run) -> PretrainedConfig:
    """Of the model, with its layers."""
    fields = dict(MODELS[run.model])
    fields["num_hidden_layers"] = run.layers or fields["num_hidden_layers"]
    return AutoConfig.for_model(fields.pop("model_type"), use_cache=False, **fields)


def manifests_of(run: Run, seed: int) -> list[RankManifest]:
    """Of all ranks, for the documents of ``seed``."""
    if run.over_ranks:
        whole = draw_batch(seed, 1, 2 * run.tokens * run.ranks, run.distribution)
        return over_ranks(whole, run.ranks)
    return packed_in_halves(draw_batch(seed, run.ranks, 2 * run.tokens, run.distribution))


def tensors(
    segments: Sequence[Segment], vocabulary: int, seed: int, device: str
) -> dict[str, torch.Tensor]:
    """Random tokens of one nano-batch, without the lowest ids, which mean something to models; no
    document predicts the next one."""
    return asdict(tokens_of(seed, segments, vocabulary, torch.device(device), lowest=8))


def run_turn(run: Run, turn: int, rank: int, device: str, address: str) -> dict[str, Any]:
    """Trains one way for ``run.steps`` after the warm-ups; what a rank saw."""
    way = run.turns[turn]
    torch.manual_seed(0)
    config = config_of(run)
    on_gpu = device != "cpu"
    dtype = torch.bfloat16 if on_gpu else torch.float32
    with torch.device(device):
        auto: Any = AutoModelForCausalLM
        model = auto.from_config(config, attn_implementation="distca", dtype=dtype)
    options = SessionOptions.for_model(
        model,
        control_plane=address,
        job=f"{run.model}-{run.frozen}-{turn}-{way}",
        rank=rank,
        n_ranks=run.ranks,
        tolerance=TOLERANCES[way],
        data_host="127.0.0.1",
        one_host=True,
        kept_forward_ticks=3,
        profile_dir=Path(run.control_plane).parent,
    )
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    layers = list(model.model.layers)
    if run.frozen:
        for part in (model.model.embed_tokens, *layers[: run.frozen]):
            part.requires_grad_(False)
    sharded = ShardedModel(
        Interleaved(WithLoss(model)),
        layers,
        mesh=init_device_mesh("cuda" if on_gpu else "cpu", (run.ranks,)),
        compute_dtype=dtype,
    )
    optimizer = torch.optim.SGD(
        [each for each in sharded.module.parameters() if each.requires_grad], lr=1e-3
    )
    found: dict[str, Any] = {
        name: [] for name in ("seconds", "losses", "over", "imbalance", "edge_waits")
    }
    drawn = [manifests_of(run, seed)[rank] for seed in [*range(WARM_UPS), *range(run.steps)]]
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with Session.open(options) as session:
        for step, manifest in enumerate(drawn):
            session.submit(RankManifest(step, rank, manifest.nano_batches))
        for step, manifest in enumerate(drawn):
            nano_batches = [
                tensors(segments, config.vocab_size, step, device)
                for segments in manifest.nano_batches
            ]
            dist.barrier()
            begin = time.perf_counter()
            with session.step(step) as running:
                loss = sharded.module(nano_batches) / (2 * run.tokens * run.ranks)
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if on_gpu:
                torch.cuda.synchronize()
            if step >= WARM_UPS:
                found["seconds"].append(time.perf_counter() - begin)
                found["losses"].append(float(loss.detach()))
                assert running.report is not None
                found["edge_waits"].append(running.report.edge_wait_seconds)
                seen = StepMeasurements.from_proto(session.fetch_step(step))
                found["over"].append(seconds_lost(seen, options.n_layers, wait_in_layers=True))
                found["imbalance"].append([seen.home_imbalance, seen.planned_imbalance])
    found["gib"] = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    return found


def run_rank(rank: int, run: Run) -> None:
    """One rank, in a process of its own."""
    on_gpu = run.device == "cuda"
    if not on_gpu:
        torch.set_num_threads(1)
    folder = Path(run.control_plane).parent
    with joined(rank, run.ranks, on_gpu=on_gpu, rendezvous=folder / "rendezvous") as device:
        address = await_address(Path(run.control_plane))
        for turn in range(len(run.turns)):
            found = run_turn(run, turn, rank, str(device), address)
            (folder / f"{turn}-{rank}.json").write_text(json.dumps(found))
            let_go(device)


def measure(run: Run, supervisor: Supervisor, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What the ranks saw, by way; the steps of its turns one after another."""
    with spawned(run_rank, (run,), run.ranks) as ranks:
        while not ranks.join():
            pass
    found: dict[str, list[dict[str, Any]]] = {}
    for turn, way in enumerate(run.turns):
        of_turn = [
            json.loads((folder / f"{turn}-{rank}.json").read_text()) for rank in range(run.ranks)
        ]
        before = found.get(way)
        found[way] = (
            of_turn
            if before is None
            else [joined_turns(*both) for both in zip(before, of_turn, strict=True)]
        )
    return found


def joined_turns(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """What a rank saw in two turns of one way."""
    steps = {name: seen + after[name] for name, seen in before.items() if name != "gib"}
    return {**steps, "gib": max(before["gib"], after["gib"])}


def seconds_of(ranks: list[dict[str, Any]]) -> list[float]:
    """Of each step, by the slowest rank."""
    return [max(step) for step in zip(*(r["seconds"] for r in ranks), strict=True)]


def lines_saved(means: dict[int, dict[str, float]]) -> list[str]:
    """What frozen layers save.

    Args:
        means: seconds of a step, by frozen layers and way.
    """
    return [
        f"{n_frozen} frozen, {way}: saves {means[0][way] - seconds:.3f} s of {means[0][way]:.3f}"
        for n_frozen, of_ways in means.items()
        if n_frozen and 0 in means
        for way, seconds in of_ways.items()
    ]


def rows_of(run: Run, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Of the table."""
    seconds = {way: seconds_of(ranks) for way, ranks in found.items()}
    rows = []
    for way, ranks in found.items():
        losses = [sum(step) for step in zip(*(r["losses"] for r in ranks), strict=True)]
        mine, against = np.array(seconds[way]), ""
        if "plain" in found:
            plain = np.array(seconds["plain"])
            rooms = plain / (plain - np.array(found["plain"][0]["over"]))
            against = f"{np.mean(plain / mine):.3f}x of {np.mean(rooms):.3f}x"
        home, planned = np.mean([r["imbalance"] for r in ranks], axis=(0, 1))
        rows.append(
            [
                run.name,
                way,
                " ".join(f"{s:.2f}" for s in mine),
                f"{2 * run.tokens * run.ranks * len(mine) / mine.sum():,.0f}",
                against,
                f"{home:.2f} / {planned:.2f}",
                f"{max(r['gib'] for r in ranks):.1f}",
                " ".join(f"{loss:.5f}" for loss in losses),
                f"{np.max([r['edge_waits'] for r in ranks]):.3f}",
            ]
        )
    return rows


def main(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}; commas between.")] = (
        "gpt-oss-20b,gemma-3-12b"
    ),
    ranks: Annotated[int, typer.Option(min=2, help="GPUs.")] = 2,
    tokens: Annotated[int, typer.Option(min=2, help="Of a nano-batch; a rank has two.")] = 65536,
    steps: Annotated[int, typer.Option(min=1, help="After two to warm up.")] = 3,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    distribution: Annotated[str, typer.Option(help="Of document lengths.")] = "pretrain",
    layers: Annotated[int, typer.Option(min=0, help="Of the model; 0: as it is set here.")] = 0,
    frozen: Annotated[str, typer.Option(help="Lowest layers; commas between.")] = "0",
    spanning: Annotated[
        bool, typer.Option("--over-ranks", help="Documents of up to a step's tokens.")
    ] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Where figures go.")] = None,
) -> None:
    """Trains served and with plain packing; on two H100s about four minutes a model."""
    table = Table(
        "model", "way", "s a step", "tokens/s", "over plain, of headroom",
        "imbalance at home / planned", "peak GiB", "losses", "edge waits, s",
    )  # fmt: skip
    figures: dict[str, Any] = {}
    saved: list[str] = []
    for name in model.split(","):
        if name not in MODELS:
            raise typer.BadParameter(
                f"{name!r} is none of {', '.join(MODELS)}", param_hint="--model"
            )
        means: dict[int, dict[str, float]] = {}
        for n_frozen in map(int, frozen.split(",")):
            with tempfile.TemporaryDirectory() as place, Supervisor() as supervisor:
                folder = Path(place)
                start_control_plane(supervisor, folder)
                run = Run(
                    model=name,
                    ranks=ranks,
                    tokens=tokens,
                    steps=steps,
                    device=device,
                    distribution=distribution,
                    control_plane=str(folder / "control-plane.address"),
                    layers=layers,
                    frozen=n_frozen,
                    over_ranks=spanning,
                )
                found = measure(run, supervisor, folder)
            figures[run.name] = {
                "run": asdict(run),
                "ways": found,
            }
            means[n_frozen] = {way: float(np.mean(seconds_of(each))) for way, each in found.items()}
            for row in rows_of(run, found):
                table.add_row(*row)
            if json_file is not None:
                json_file.write_text(json.dumps(figures))
        saved += [f"{name}, {line}" for line in lines_saved(means)]
    console = Console(width=200)
    console.print(table)
    for line in saved:
        console.print(line)


if __name__ == "__main__":
    typer.run(main)
