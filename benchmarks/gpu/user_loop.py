"""A user's own training loop: a Llama of transformers as it is, DDP, activation checkpoints.

Every way trains on the same documents, without a barrier on the host, in processes of its own:

* plain: FlashAttention-4 on each rank's packed row (``benchmarks.gpu.end_to_end``'s plain packing);
* attached: ``distca.attach``, with servers inside the trainers;
* in-place: the same with ``turns=2``, and documents cut where halves meet;
* beside: likewise, a pool with an attention node's process on each trainer's GPU;
* beside-mps: the same under an MPS daemon of its own.

    python -m benchmarks.gpu.user_loop --ways plain,attached,in-place --tokens-per-rank 131072
    python -m benchmarks.gpu.user_loop --device cpu --tiny --tokens-per-rank 4096 --layers 2

*Headroom* is how much faster plain packing's step would be if its attention were spread evenly.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

import distca
import trainer_client.models.transformers
from benchmarks.gpu.end_to_end import headroom, start_control_plane, start_nodes
from benchmarks.gpu.training import attention, batches, methods
from benchmarks.gpu.training.batches import Batch, draw_batch
from benchmarks.gpu.training.layers import LanguageModel
from benchmarks.gpu.training.loss import IGNORED_LABEL
from benchmarks.gpu.training.stack import InTurn, ModelShape
from benchmarks.gpu.training.stopwatch import Stopwatch
from benchmarks.rank_group import RankGroup, begin_rank
from core_attention.kernels.select import select_kernel
from core_attention.manifest import RankManifest
from distca.apps.local.supervisor import Supervisor
from trainer_client import Placement

MPS = "nvidia-cuda-mps-control"
DRIVER_FOLDERS = "/usr/local/nvidia/bin:/usr/local/cuda/bin"
"""Where containers may have it, beside PATH."""

MPS_SECONDS = 30.0
COMPILE_SECONDS = 600.0
COMPILE = (
    "from control_plane.planner.planners import PLANNERS, prepare; prepare(PLANNERS['balanced'])"
)


@dataclass(frozen=True)
class Way:
    """How a loop's core attention is served.

    Attributes:
        placement: None: not at all.
        turns: nano-batches of a step.
        nodes: whether a node runs on each rank's device.
        mps: whether all of them share the GPUs by MPS.
    """

    placement: Placement | None
    turns: int = 1
    nodes: bool = False
    mps: bool = False


WAYS = {
    "plain": Way(None),
    "attached": Way(Placement.IN_PLACE),
    "in-place": Way(Placement.IN_PLACE, turns=2),
    "beside": Way(Placement.POOL, turns=2, nodes=True),
    "beside-mps": Way(Placement.POOL, turns=2, nodes=True, mps=True),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What every rank runs.

    Attributes:
        way: one of WAYS.
        shape: fields of the model's.
        tokens_per_rank, ranks: of a step.
        warm_ups: steps on the first batches, before all.
        batches: measured, seeds from 0.
        lengths: distribution of documents' lengths.
        device: cuda or cpu.
        control_plane: its address; empty for plain packing.
        folder: of profiles and of the ranks' findings.
    """

    way: str
    shape: dict[str, Any]
    tokens_per_rank: int
    ranks: int
    warm_ups: int
    batches: int
    lengths: str
    device: str
    control_plane: str
    folder: str

    def drawn(self) -> list[Batch]:
        """The batch of each step."""
        seeds = [step % self.batches for step in range(self.warm_ups)] + [*range(self.batches)]
        return [draw_batch(seed, self.ranks, self.tokens_per_rank, self.lengths) for seed in seeds]


class Loop:
    """One rank's model, optimiser and batches.

    Args:
        settings: of the loop.
        rank: this one.
        device: of the rank, made current.
    """

    def __init__(self, settings: Settings, rank: int, device: torch.device) -> None:
        self._settings, self._rank, self._device = settings, rank, device
        self._way = WAYS[settings.way]
        self._shape = ModelShape(**settings.shape)
        self._drawn = settings.drawn()
        served = self._way.placement is not None
        torch.manual_seed(0)
        auto: Any = AutoModelForCausalLM
        implementation = trainer_client.models.transformers.IMPLEMENTATION
        with device:
            self._model = auto.from_config(
                self._shape.config(settings.tokens_per_rank),
                attn_implementation=implementation if served else attention.IMPLEMENTATION,
                dtype=getattr(torch, self._shape.dtype),
            )
        self._model.train()
        self._model.gradient_checkpointing_enable({"use_reentrant": False})
        language = LanguageModel(self._model)
        self._ddp = DistributedDataParallel(InTurn(language))
        fused = device.type == "cuda"
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=1e-4, fused=fused)
        self._watch = Stopwatch(device)
        self._found: list[dict[str, Any]] = []

    def run(self) -> None:
        """All steps; what is found is written after each."""
        with ExitStack() as stack:
            if self._way.placement is not None:
                stack.enter_context(distca.attach(self._model, **self._options()))
            began = time.perf_counter()
            for nano_batches in self._steps():
                labels = self._labels(nano_batches)
                dist.all_reduce(labels)
                losses = self._ddp(
                    [
                        {name: tensor.to(self._device) for name, tensor in each.items()}
                        for each in nano_batches
                    ]
                )
                loss = torch.stack(losses).sum() * self._settings.ranks / labels
                loss.backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
                value = loss.item()
                ended = time.perf_counter()
                self._keep(ended - began, value)
                began = time.perf_counter()

    def _labels(self, nano_batches: Sequence[dict[str, torch.Tensor]]) -> torch.Tensor:
        counts = [(each["labels"] != IGNORED_LABEL).sum() for each in nano_batches]
        return torch.stack(counts).sum().to(self._device)

    def _options(self) -> dict[str, Any]:
        return {
            "control_plane": self._settings.control_plane,
            "job": self._settings.way,
            "placement": self._way.placement,
            "turns": self._way.turns,
            "cut_documents": self._way.turns == 2,
            "data_host": "127.0.0.1",
            "one_host": True,
            "profile_dir": Path(self._settings.folder),
        }

    def _steps(self) -> Iterator[list[dict[str, Any]]]:
        """The packed row of each step."""
        kernel = None
        if self._way.placement is None:
            kernel = select_kernel(self._device)
            kernel.warm_up(self._shape.attention)
        for batch in self._drawn:
            mine = batches.packed(batch)[self._rank]
            if kernel is not None:
                attention.use(attention.WholeDocuments(kernel, mine, self._device, self._watch))
            yield self._tensors(batch, mine)

    def _tensors(self, batch: Batch, mine: RankManifest) -> list[dict[str, Any]]:
        """On the host, where a loader leaves them."""
        vocabulary = self._shape.vocabulary
        return [
            vars(batches.tokens_of(batch.seed, segments, vocabulary, torch.device("cpu")))
            for segments in mine.nano_batches
        ]

    def _keep(self, seconds: float, loss: float) -> None:
        found: dict[str, Any] = {"seconds": seconds, "loss": loss}
        if self._way.placement is None:
            found["attention_seconds"] = sum(self._watch.read().values())
        if self._device.type == "cuda":
            found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
        self._found.append(found)
        partial = Path(self._settings.folder, f"{self._settings.way}-{self._rank}.partial")
        partial.write_text(json.dumps(self._found))
        partial.replace(partial.with_suffix(".json"))


def run_rank(settings: Settings) -> None:
    """A rank's process."""
    begin_rank()
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    if settings.device == "cuda":
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
        if rank == 0:
            methods.ship_profile(
                Path(settings.folder), device, ModelShape(**settings.shape).attention
            )
    dist.init_process_group()
    Loop(settings, rank, device).run()
    dist.destroy_process_group()


@contextmanager
def mps_daemon() -> Iterator[dict[str, str]]:
    """An MPS daemon with pipes of its own; what its clients need in their environment."""
    folder = tempfile.mkdtemp(prefix="mps-", dir="/tmp")
    clients = {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
    environ = {**os.environ, **clients}
    subprocess.run([MPS, "-d"], env=environ, check=True, timeout=MPS_SECONDS)
    try:
        yield clients
    finally:
        try:
            subprocess.run([MPS], env=environ, input=b"quit\n", check=True, timeout=MPS_SECONDS)
        except (subprocess.SubprocessError, OSError) as error:
            print(f"the MPS daemon did not quit: {error}", flush=True)
            for file in Path(folder).glob("*.pid"):
                os.kill(int(file.read_text()), signal.SIGKILL)
        print(
            "".join(log.read_text()[-600:] for log in Path(folder).glob("server.log")), flush=True
        )
        shutil.rmtree(folder, ignore_errors=True)


class DeviceMemory:
    """The most memory in use on any GPU while the block runs, as nvidia-smi sees it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> DeviceMemory:
        self._popen: subprocess.Popen[bytes] | None = None
        if shutil.which("nvidia-smi"):
            query = ["--query-gpu=memory.used", "--format=csv,noheader,nounits", "-lms", "200"]
            with self._file.open("wb") as output:
                self._popen = subprocess.Popen(["nvidia-smi", *query], stdout=output)
        return self

    def __exit__(self, *_: object) -> None:
        if self._popen is not None:
            self._popen.kill()
            self._popen.wait()

    @property
    def gib(self) -> float:
        if self._popen is None:
            return 0.0
        return (
            max((int(n) for n in self._file.read_text().split() if n.isdigit()), default=0) / 1024
        )


def measure(settings: Settings, limit_seconds: float) -> dict[str, Any]:
    """Runs a way in processes of its own; returns what was found, of one that did not end what
    there is."""
    way, folder = WAYS[settings.way], Path(settings.folder)
    if way.mps and shutil.which(MPS) is None:
        return {"way": settings.way, "steps": [], "outcome": f"there is no {MPS} on this machine"}
    with ExitStack() as stack:
        memory = stack.enter_context(DeviceMemory(folder / f"{settings.way}.memory"))
        clients = stack.enter_context(mps_daemon()) if way.mps else {}
        if way.nodes:
            devices = [
                f"cuda:{rank}" if settings.device == "cuda" else "cpu"
                for rank in range(settings.ranks)
            ]
            nodes = folder / settings.way
            nodes.mkdir()
            start_nodes(
                stack.enter_context(Supervisor()),
                nodes,
                settings.control_plane,
                ModelShape(**settings.shape).attention,
                devices,
                profiles=folder,
                environ={**os.environ, **clients},
            )
        command = [sys.executable, "-m", "benchmarks.gpu.user_loop", json.dumps(asdict(settings))]
        group = RankGroup(
            command,
            settings.ranks,
            folder / settings.way,
            limit_seconds=limit_seconds,
            environ={**os.environ, **clients},
        )
        codes = group.wait()
        outcome = ""
        if any(codes):
            logs = sorted((folder / settings.way).glob("node-*.log"))
            told = [f"{log.name}:\n{log.read_text()[-1500:]}" for log in logs]
            outcome = "\n".join(["did not end rightly:", group.tails(40), *told])
    files = [folder / f"{settings.way}-{rank}.json" for rank in range(settings.ranks)]
    ranks = [json.loads(file.read_text()) for file in files if file.exists()]
    steps = [_of_all_ranks(step) for step in zip(*ranks, strict=False)]
    return {
        "way": settings.way,
        "steps": steps if len(ranks) == settings.ranks else [],
        "outcome": outcome,
        "device_gib": memory.gib,
        "wall_seconds": group.seconds,
    }


def _of_all_ranks(step: Sequence[dict[str, Any]]) -> dict[str, Any]:
    worst = {name: max(rank[name] or 0.0 for rank in step) for name in step[0] if name != "loss"}
    if "attention_seconds" in worst:
        worst["attention_seconds"] = [rank["attention_seconds"] for rank in step]
    # Each rank's loss is its share of the sum, in units of the mean number of labels.
    return worst | {"loss": statistics.mean(rank["loss"] for rank in step)}


def show(settings: Settings, results: Sequence[dict[str, Any]]) -> None:
    """Prints one table."""
    tokens = settings.ranks * settings.tokens_per_rank
    shown = f"{settings.ranks} x {settings.device}, {settings.tokens_per_rank} tokens a rank"
    table = Table(title=f"{shown}, {settings.shape['layers']} layers")
    for column in ("way", "tokens/s", "step s by batch", "device GiB", "reserved GiB", "loss"):
        table.add_column(column, overflow="fold")
    for result in results:
        measured = result["steps"][settings.warm_ups :]
        seconds = [step["seconds"] for step in measured]

        def each(name: str, digits: int, steps: Sequence[dict[str, Any]] = measured) -> str:
            return " ".join(f"{step.get(name) or 0.0:.{digits}f}" for step in steps)

        table.add_row(
            result["way"],
            f"{tokens * len(seconds) / sum(seconds):,.0f}" if seconds else "did not end",
            each("seconds", 3) + (" ..." if result["outcome"] else ""),
            f"{result.get('device_gib', 0.0):.1f}",
            f"{max((step.get('reserved_gib', 0.0) for step in measured), default=0.0):.1f}",
            each("loss", 5),
        )
    Console(width=170).print(table)
    for result in results:
        measured = result["steps"][settings.warm_ups :]
        if result["way"] == "plain" and measured:
            gains = headroom({"steps": measured})
            print(f"headroom by batch: {' '.join(f'{gain:.2f}' for gain in gains)}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ways", default="plain,attached,in-place", help=", ".join(WAYS))
    parser.add_argument("--gpus", type=int, default=2, help="ranks, one a GPU")
    parser.add_argument("--layers", type=int, default=8, help="of the Llama-3-8B shape")
    parser.add_argument("--tokens-per-rank", type=int, default=128 * 1024)
    parser.add_argument("--batches", type=int, default=5, help="measured; seeds from 0")
    parser.add_argument("--warm-ups", type=int, default=2, help="steps before them")
    parser.add_argument("--lengths", default="pretrain", help="pretrain or prolong")
    parser.add_argument("--limit-seconds", type=float, default=150.0, help="of each way")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the program")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if unknown := set(chosen.ways.split(",")) - set(WAYS):
        parser.error(f"--ways has {', '.join(sorted(unknown))}; valid are {', '.join(WAYS)}")
    return chosen


def main() -> None:
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        run_rank(Settings(**json.loads(sys.argv[1])))
        return
    if int(os.environ.get("RANK", 0)):
        return  # under torchrun, too, one process starts all others
    chosen = parse()
    os.environ["PATH"] += f":{DRIVER_FOLDERS}"
    shape = ModelShape(layers=chosen.layers)
    if chosen.tiny:
        shape = ModelShape.tiny(chosen.layers, chosen.device)
    results = []
    # Beside plain packing, which needs no planner.
    compiling = subprocess.Popen([sys.executable, "-c", COMPILE])
    with tempfile.TemporaryDirectory() as name, Supervisor() as supervisor:
        folder, address = Path(name), ""
        for way in chosen.ways.split(","):
            if WAYS[way].placement is not None and not address:
                compiling.wait(COMPILE_SECONDS)
                start_control_plane(supervisor, folder)
                address = methods.await_address(folder / methods.ADDRESS_FILE)
            settings = Settings(
                way=way,
                shape=asdict(shape),
                tokens_per_rank=chosen.tokens_per_rank,
                ranks=chosen.gpus,
                warm_ups=chosen.warm_ups,
                batches=chosen.batches,
                lengths=chosen.lengths,
                device=chosen.device,
                control_plane=address,
                folder=name,
            )
            try:
                result = measure(settings, chosen.limit_seconds)
            except Exception as error:
                result = {"way": way, "steps": [], "outcome": f"{type(error).__name__}: {error}"}
            results.append(result)
            # A way takes minutes: what is found is not lost with those that follow.
            show(settings, [result])
            print(
                f"{way}: {result.get('wall_seconds', 0.0):.0f} s. {result['outcome']}", flush=True
            )
        compiling.wait(COMPILE_SECONDS)
        show(settings, results)
        if chosen.json is not None:
            found = {"settings": asdict(settings), "ways": results}
            chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
