"""The end-to-end benchmark: layouts of a batch, and that all ways train the same model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer

from benchmarks.gpu.training import batches, methods, trace
from benchmarks.gpu.training.batches import Batch, draw_batch
from benchmarks.gpu.training.stack import ModelShape
from core_attention.manifest import RankManifest
from tests import ROOT
from tests.support.errors import refused
from tests.support.programs import ran

RANKS, TOKENS = 4, 32768


@pytest.fixture(scope="module")
def batch() -> Batch:
    return draw_batch(2, RANKS, TOKENS, "pretrain")


def work(manifest: RankManifest) -> int:
    """Query-key pairs of a rank's rows."""
    segments = [segment for nano in manifest.nano_batches for segment in nano]
    return sum(
        sum(range(segment.offset + 1, segment.offset + segment.length + 1)) for segment in segments
    )


def test_stretched_documents_are_longer_and_fill_all_ranks(batch: Batch) -> None:
    stretched = draw_batch(2, RANKS, 2 * TOKENS, "pretrain", stretch=2)
    for lengths, drawn in zip(stretched.ranks, batch.ranks, strict=True):
        assert lengths.tolist() == (2 * drawn).tolist()
    with refused():
        draw_batch(2, RANKS, TOKENS + 1, "pretrain", stretch=2)


def test_zigzag_of_one_document_is_the_layout_of_pytorchs_load_balancer() -> None:
    one_document = draw_batch(2, RANKS, TOKENS, batches.ONE_DOCUMENT)
    balancer = _HeadTailLoadBalancer(RANKS * TOKENS, RANKS, torch.device("cpu"))
    order = balancer._generate_indices().reshape(RANKS, TOKENS)
    for rank, manifest in enumerate(batches.zigzag(one_document)):
        found = batches.tokens_of(
            one_document.seed, manifest.nano_batches[0], 97, torch.device("cpu")
        )
        assert torch.equal(found.position_ids[0], order[rank])


def test_zigzag_spreads_the_work_of_every_document(batch: Batch) -> None:
    done = [work(manifest) for manifest in batches.zigzag(batch)]
    # Pieces are whole tokens: a document of a few tokens cannot be spread evenly.
    assert max(done) / np.mean(done) < 1.01


def test_repacking_keeps_memory_equal_and_lightens_the_busiest_rank(batch: Batch) -> None:
    plain, repacked = batches.packed(batch), batches.repacked(batch)
    assert [manifest.tokens(0) for manifest in repacked] == [TOKENS] * RANKS
    held: Counter[int] = Counter()
    for manifest in repacked:
        for segment in manifest.nano_batches[0]:
            held[segment.document_id] += segment.length
    assert [held[document] for document in range(len(batch.lengths))] == batch.lengths.tolist()
    assert max(map(work, repacked)) <= max(map(work, plain))


def test_operations_count_weights_and_attention_once() -> None:
    shape = ModelShape(layers=2)
    # 218,103,808 weights in the matrices of a Llama-3-8B layer, 525,336,576 in its head.
    assert shape.matrix_weights == 2 * 218_103_808 + 525_336_576
    linear = 6 * shape.matrix_weights * 1000
    # Scores and their product with V forward, twice that backward: 12 operations a pair, head, dim.
    attention = 2 * 12 * 32 * 128 * 5000
    assert shape.step_flops(1000, 5000) == pytest.approx(linear + attention, rel=1e-9)


def test_trace_counts_overlapping_kernels_once_and_finds_gaps() -> None:
    found = trace.summarise(
        [(0.0, 1.0, "nvjet_gemm"), (0.5, 1.5, "flash_fwd"), (2.0, 2.5, "ncclAllGather")]
    )
    assert found["seconds"] == 2.5
    assert found["busy_seconds"] == 2.0
    assert found["by_category"] == {"matrix products": 1.0, "attention": 1.0, "nccl": 0.5}
    assert found["longest_gaps"][0][:2] == (0.5, 1.5)


WAYS = ("plain", "repacked", "context-parallel", "disaggregated", "single-stream", "pool")


def losses(
    device: str,
    ranks: int,
    folder: Path,
    ways: tuple[str, ...] = WAYS,
    pool_nodes: int = 0,
    options: tuple[str, ...] = (),
) -> dict[str, list[float]]:
    """Runs the benchmark with a tiny model."""
    out = folder / "out.json"
    command = [
        *(sys.executable, "-m", "benchmarks.gpu.end_to_end", "--tiny", "--no-compiled"),
        *(f"--device={device}", f"--ranks={ranks}", f"--ways={','.join(ways)}", f"--json={out}"),
        *(
            f"--pool-nodes={pool_nodes}",
            "--layers=2",
            "--tokens-per-rank=512",
            "--batches=2",
            "--warm-ups=0",
        ),
        *options,
    ]
    done = ran(*command, timeout=250)
    assert out.exists(), done.stdout + done.stderr
    found = {
        way["way"]: [step["loss"] for step in way["steps"]]
        for way in json.loads(out.read_text())["ways"]
    }
    assert found.keys() == set(ways), done.stdout + done.stderr
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("everyone", [True, False])
def test_an_interrupted_run_ends_and_keeps_the_steps_before(tmp_path: Path, everyone: bool) -> None:
    """Like Ctrl-C in a terminal, which ranks hear as well, unless they are in a callback of a
    library's that swallows it."""
    out = tmp_path / "out.json"
    running = subprocess.Popen(
        [
            *(sys.executable, "-m", "benchmarks.gpu.end_to_end", "--tiny", "--no-compiled"),
            *("--device=cpu", "--ranks=1", "--layers=1", "--tokens-per-rank=512", "--warm-ups=0"),
            *("--ways=plain", "--batches=1000", f"--json={out}"),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell has what runs in its background ignore it, and so do the children of that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stdout is not None
    try:
        for line in running.stdout:
            if line.startswith("plain step 3:"):
                break
        (os.killpg if everyone else os.kill)(running.pid, signal.SIGINT)
        printed, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    (way,) = json.loads(out.read_text())["ways"]
    assert len(way["steps"]) >= 3
    assert "tokens/s" in printed


@pytest.mark.timeout(300)
def test_all_ways_train_the_same_model(tmp_path: Path) -> None:
    """The second loss is that of updated weights, so gradients agree as well."""
    found = losses("cpu", 2, tmp_path, pool_nodes=1)
    assert found.keys() == set(WAYS)
    for way in WAYS:
        # Repacking cuts a document at most, whose second piece sees less context.
        assert found[way] == pytest.approx(found["plain"], rel=1e-3 if way == "repacked" else 1e-5)


ONE_DOCUMENT_WAYS = ("context-parallel", "disaggregated")
ONE_DOCUMENT = (f"--lengths={batches.ONE_DOCUMENT}",)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("cut", ["--cut-documents", "--no-cut-documents"])
def test_ways_that_can_hold_one_document_train_the_same_model(tmp_path: Path, cut: str) -> None:
    ways = (*ONE_DOCUMENT_WAYS, methods.UNSENT)
    found = losses("cpu", 2, tmp_path, ways, options=(*ONE_DOCUMENT, cut))
    assert found.keys() == set(ways)
    assert found["disaggregated"] == pytest.approx(found["context-parallel"], rel=1e-5)
    # Other keys and partial gradients: of the second step another loss, though no other size of it.
    assert found[methods.UNSENT] != pytest.approx(found["context-parallel"], rel=1e-5)
    assert found[methods.UNSENT] == pytest.approx(found["context-parallel"], rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("ways", "options"), [(WAYS[:-1], ()), ((*ONE_DOCUMENT_WAYS, methods.PYTORCH), ONE_DOCUMENT)]
)
def test_all_ways_train_the_same_model_on_gpus(
    tmp_path: Path, ways: tuple[str, ...], options: tuple[str, ...]
) -> None:
    found = losses("cuda", torch.cuda.device_count(), tmp_path, ways, options=options)
    for way in ways:
        # bfloat16: 2^-9 = 2e-3 a rounding, averaged over hundreds of tokens.
        assert found[way] == pytest.approx(found[ways[0]], rel=2e-3)


def test_compiled_graphs_do_not_name_the_main_module(tmp_path: Path) -> None:
    """They are cached as pickles, which a program with another main module reads as well."""
    program = tmp_path / "program.py"
    program.write_text(
        "import multiprocessing\n"
        "import pickle\n"
        "import torch\n"
        "from benchmarks.gpu.training.layers import compile_layers\n"
        "from transformers.models.llama.modeling_llama import LlamaRMSNorm\n"
        "compile_layers([LlamaRMSNorm(1)])\n"
        "print(pickle.dumps(torch.contiguous_format))\n"
    )
    done = subprocess.run(
        [sys.executable, program],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert "torch.contiguous_format" in done.stdout
    assert "main__" not in done.stdout
