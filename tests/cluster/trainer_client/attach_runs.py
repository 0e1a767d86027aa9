"""Loops of users around an unchanged Llama of transformers, attached; run by torchrun.

``python -m torch.distributed.run ... attach_runs.py LOOP ...``: every rank runs the named loops,
or all, with core attention served and, on the same weights, with sdpa on each document alone; it
fails where a gradient differs.
"""

from __future__ import annotations

import copy
import gc
import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from transformers import AutoConfig, AutoModelForCausalLM

import distca
from distca.contract.timeouts import default_seconds
from tests.support.gradients import assert_gradients, gradients_of
from tests.support.tiny_models import TINY_LLAMA

TOLERANCE = 1e-5
"""Of the largest element of each gradient: a few hundred roundings of float32."""

Documents = list[torch.Tensor]
Loop = Callable[["Run"], None]

LOOPS: dict[str, Loop] = {}


def loop(function: Loop) -> Loop:
    LOOPS[function.__name__] = function
    return function


class Run:
    """A rank's model, attached, and the same one with sdpa."""

    def __init__(self, *, attach: bool = True, **config: Any) -> None:
        auto: Any = AutoModelForCausalLM
        fields = {**TINY_LLAMA, "num_hidden_layers": 3, **config}
        torch.manual_seed(0)
        # Each with a config of its own: a model writes its implementation there.
        self.local, self.model = (
            auto.from_config(AutoConfig.for_model("llama", **fields), attn_implementation=each)
            for each in ("sdpa", "distca")
        )
        self.model.load_state_dict(self.local.state_dict())
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self._drawn = 0
        self.attached = distca.attach(self.model, **SETTINGS) if attach else None

    @property
    def steps_begun(self) -> int:
        assert self.attached is not None
        assert self.attached.session is not None
        return self.attached.session.next_step

    def swap(self, model: nn.Module, local: nn.Module) -> None:
        """Other models take the place of these."""
        assert self.attached is not None
        self.attached.close()
        self.model, self.local = model, local
        self.attached = distca.attach(model, **SETTINGS)

    def draw(
        self, n: int = 4, longest: int = 40, lengths: Sequence[int] | None = None
    ) -> Documents:
        """Documents of this rank, each time others."""
        self._drawn += 1
        generator = torch.Generator().manual_seed(1000 * self._drawn + self.rank)
        drawn = torch.randint(2, longest, (n,), generator=generator).tolist()
        return [torch.randint(4, 64, (n,), generator=generator) for n in lengths or drawn]

    def loss(self, documents: Documents, layout: str = "position_ids", model: Any = None) -> Any:
        """Of the served model, called as loops call it."""
        if layout == "own":
            ends = torch.tensor([0, *map(len, documents)]).cumsum(0).int()
            rows = self.model(torch.cat(documents), ends).split([len(each) for each in documents])
            return sum(map(loss_of, rows), torch.zeros(()))
        if layout == "own rows":
            documents[:] = [document[:2] for document in documents]
            return sum(map(loss_of, self.model(torch.stack(documents))), torch.zeros(()))
        called = self.model if model is None else model
        logits = called(**batch_of(documents, layout)).logits
        return sum(map(loss_of, rows_of(logits, documents, layout)), torch.zeros(()))

    def local_loss(self, documents: Documents) -> Any:
        """Of each document alone, with sdpa."""
        if isinstance(self.local, OwnModel):
            return sum((loss_of(self.local(document)) for document in documents), torch.zeros(()))
        logits = [self.local(input_ids=document[None]).logits[0] for document in documents]
        return sum(map(loss_of, logits), torch.zeros(()))

    def compare(self, *, is_mean: bool = False, tolerance: float = TOLERANCE) -> None:
        """Every gradient of the two models; ``is_mean``: of the ranks' mean."""
        expected = gradients_of(self.local)
        if is_mean:
            for gradient in expected.values():
                dist.all_reduce(gradient)
                gradient /= dist.get_world_size()
        if expected:
            assert_gradients(self.model, expected, tolerance)
        else:
            assert not gradients_of(self.model)
        self.model.zero_grad()
        self.local.zero_grad()

    def step(
        self,
        layout: str = "position_ids",
        model: Any = None,
        lengths: Sequence[int] | None = None,
    ) -> None:
        """A plain step, to be compared."""
        documents = self.draw(lengths=lengths)
        self.loss(documents, layout, model).backward()
        self.local_loss(documents).backward()


def loss_of(logits: torch.Tensor) -> torch.Tensor:
    weights = torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)
    return (logits * weights.sin()).sum() / 100


def batch_of(documents: Documents, layout: str) -> dict[str, torch.Tensor]:
    if layout in ("position_ids", "cu_seq_lens", "packed mask"):
        ids = torch.cat(documents)[None]
        positions = torch.cat([torch.arange(len(document)) for document in documents])[None]
        ends = torch.tensor([0, *map(len, documents)]).cumsum(0).int()
        told = {"position_ids": positions}
        if layout == "cu_seq_lens":
            longest = max(map(len, documents))
            told |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends}
            told |= {"max_length_q": torch.tensor(longest), "max_length_k": torch.tensor(longest)}
            index = torch.arange(len(documents)).repeat_interleave(ends.diff())
            told["seq_idx"] = index[None].int()
        if layout == "packed mask":
            told["attention_mask"] = torch.ones_like(ids)
        return {"input_ids": ids, **told}
    width = max(map(len, documents)) + 3
    ids, mask = torch.zeros(2, len(documents), width, dtype=torch.int64)
    for row, document in enumerate(documents):
        begin = begin_of(layout, width, len(document))
        ids[row, begin : begin + len(document)] = document
        mask[row, begin : begin + len(document)] = 1
    return {"input_ids": ids, "attention_mask": mask}


def begin_of(layout: str, width: int, length: int) -> int:
    return {"left": width - length, "right": 0, "both": (width - length) // 2}[layout]


def rows_of(logits: torch.Tensor, documents: Documents, layout: str) -> Sequence[torch.Tensor]:
    if logits.shape[0] == 1:
        return list(logits[0].tensor_split(torch.tensor([*map(len, documents)]).cumsum(0)[:-1]))
    begins = [begin_of(layout, logits.shape[1], len(document)) for document in documents]
    return [
        row[begin : begin + len(document)]
        for row, begin, document in zip(logits, begins, documents, strict=True)
    ]


@loop
def plain(run: Run) -> None:
    """Also: the global random state is untouched."""
    before = torch.get_rng_state()
    for layout in ("position_ids", "cu_seq_lens", "packed mask", "left", "right", "both"):
        run.step(layout)
        run.compare()
    assert torch.equal(torch.get_rng_state(), before)


ODD_LENGTHS = ((40, 1, 90, 7), (200,), (1,), (2,), (3, 3, 3))
"""Where halves are of unlike sizes, of one row or none, or equal documents."""


@loop
def odd_lengths(run: Run) -> None:
    for lengths in ODD_LENGTHS:
        run.step(lengths=lengths)
    # Together: gradients of the queries of documents of one token are nothing but roundings.
    run.compare()


@loop
def accumulation(run: Run) -> None:
    wrapped = DistributedDataParallel(run.model)
    for _ in range(2):
        for _ in range(2):
            with wrapped.no_sync():
                run.step(model=wrapped)
        run.step(model=wrapped)
        run.compare(is_mean=True)


@loop
def uneven_accumulation(run: Run) -> None:
    """Two and three forwards before DDP reduces gradients, and one and four."""
    wrapped = DistributedDataParallel(run.model)
    for few, many in ((2, 3), (2, 3), (1, 4)):
        n = many if (run.rank + few) % 2 else few
        for _ in range(n - 1):
            with wrapped.no_sync():
                run.step(model=wrapped)
        run.step(model=wrapped)
        run.compare(is_mean=True)


@loop
def uneven_pairs(run: Run) -> None:
    """Two forwards before each backward, as of preferences; one pair and two."""
    wrapped = DistributedDataParallel(run.model)
    for turn in range(3):
        n = 1 + (run.rank + turn) % 2
        for pair in range(n):
            documents = run.draw(), run.draw()
            with wrapped.no_sync() if pair < n - 1 else nullcontext():
                losses = [run.loss(each, model=wrapped) for each in documents]
                (losses[0] * losses[1]).backward()
            (run.local_loss(documents[0]) * run.local_loss(documents[1])).backward()
        run.compare(is_mean=True)


@loop
def own_all_reduce(run: Run) -> None:
    """Nobody knows which forward is the last: extra ones go alone after a while."""
    for turn in range(3):
        for _ in range(1 + (run.rank + turn) % 3):
            run.step()
        for parameter in run.model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        run.compare(is_mean=True)


@loop
def no_first_forward(run: Run) -> None:
    """One rank has no forward in the first rounds, whose collective is the loop's own."""
    for turn in range(4):
        if run.rank != 1 or turn > 1:
            run.step()
        dist.barrier()
        run.compare()


@loop
def no_forward_at_all(run: Run) -> None:
    """One rank never comes to the job."""
    for _ in range(3):
        if run.rank != 1:
            run.step()
        dist.barrier()
        run.compare()


@loop
def late_rank(run: Run) -> None:
    """One rank comes late each time, with two steps open; others go on without it."""
    for _ in range(5):
        documents = run.draw(), run.draw()
        losses = []
        for each in documents:
            if run.rank == 1:
                time.sleep(0.2)
            losses.append(run.loss(each))
        for loss, each in zip(losses, documents, strict=True):
            loss.backward()
            run.local_loss(each).backward()
        run.compare()


@loop
def without_rows(run: Run) -> None:
    """Ranks without a token in some forwards, and in all of a round."""
    wrapped = DistributedDataParallel(run.model)
    nothing = {name: torch.zeros(1, 0, dtype=torch.int64) for name in ("input_ids", "position_ids")}
    for turn in range(4):
        for forward in range(2):
            with wrapped.no_sync() if forward == 0 else nullcontext():
                if run.rank == turn % 2 and (forward == 1 or turn > 1):
                    logits = wrapped(**nothing).logits
                    assert logits.shape[1] == 0
                    logits.sum().backward()
                    nothing_of(run.local).backward()
                else:
                    run.step(model=wrapped)
        run.compare(is_mean=True)


def nothing_of(model: nn.Module) -> torch.Tensor:
    return sum((0 * each.sum() for each in model.parameters()), torch.zeros(()))


@loop
def hinted(run: Run) -> None:
    """Batches in one buffer; some are left out on one rank, used twice or run in another order; an
    evaluation between; the last round has more of them on one rank."""
    is_spread = dist.is_initialized()
    wrapped = DistributedDataParallel(run.model) if is_spread else run.model
    batches = [run.draw() for _ in range(9 + run.rank % 2)]
    buffer = torch.zeros(4, 40, dtype=torch.int64)

    def loader() -> Iterator[tuple[Documents, torch.Tensor]]:
        for documents in batches:
            for row, document in zip(buffer, documents, strict=True):
                row[: len(document)] = document
            yield documents, buffer

    def train(documents: Documents, rows: torch.Tensor, *, is_last: bool) -> None:
        given = [row[: len(each)].clone() for row, each in zip(rows, documents, strict=True)]
        with nullcontext() if is_last or not is_spread else wrapped.no_sync():
            run.loss(given, model=wrapped).backward()
        run.local_loss(documents).backward()

    fetched = distca.ahead(loader(), lengths=lambda batch: [len(each) for each in batch[0]])
    for number, (documents, rows) in enumerate(fetched):
        if number == 3 and run.rank == 0:
            continue
        if number == 4:
            with torch.no_grad():
                run.loss(documents, model=wrapped)
            train(batches[0], buffer_of(batches[0]), is_last=False)
        if number == 6:
            train(documents, rows, is_last=False)
        is_last = number % 2 == 1 and number != 7 if number < 8 else number == len(batches) - 1
        if number == 3:
            is_last = False
        train(documents, rows, is_last=is_last)
        if is_last:
            run.compare(is_mean=is_spread)


def buffer_of(documents: Documents) -> torch.Tensor:
    rows = torch.zeros(4, 40, dtype=torch.int64)
    for row, document in zip(rows, documents, strict=True):
        row[: len(document)] = document
    return rows


@loop
def hinted_rows(run: Run) -> None:
    """Batches whose documents are read from their tensors, fetched several at a time."""
    batches = [run.draw() for _ in range(6)]
    fetched = distca.ahead(batch_of(each, "both") for each in batches)
    for begin in (0, 3):
        taken = [next(fetched) for _ in range(3)]
        order = (0, 1, 2) if begin else (0, 2, 1)
        for index in order:
            documents = batches[begin + index]
            logits = run.model(**taken[index]).logits
            sum(map(loss_of, rows_of(logits, documents, "both")), torch.zeros(())).backward()
            run.local_loss(documents).backward()
            run.compare()


@loop
def one_backward_of_two(run: Run) -> None:
    documents = run.draw(), run.draw()
    (run.loss(documents[0]) * run.loss(documents[1])).backward()
    (run.local_loss(documents[0]) * run.local_loss(documents[1])).backward()
    run.compare()


@loop
def interleaved(run: Run) -> None:
    """F0 F1 B0 B1, and with a no_grad forward between, four open, in any order."""
    for order in ((0, 1), (1, 0), (2, 0, 3, 1)):
        documents = [run.draw() for _ in order]
        losses = [run.loss(each) for each in documents]
        with torch.no_grad():
            mine, theirs = (of(documents[0]) for of in (run.loss, run.local_loss))
        assert abs(mine - theirs) <= TOLERANCE * abs(theirs) + TOLERANCE
        for index in order:
            losses[index].backward()
        for each in documents:
            run.local_loss(each).backward()
        run.compare()


@loop
def dropped(run: Run) -> None:
    """Graphs that get no backward pass, and one that is held beyond its time."""
    for _ in range(6):
        run.loss(run.draw())
    run.step()
    run.compare()
    documents = run.draw()
    kept = run.loss(documents)
    for _ in range(5):
        run.step()
        run.compare()
    kept.backward()
    run.local_loss(documents).backward()
    run.compare()
    kept = run.loss(run.draw())
    later = [run.draw() for _ in range(4)]
    losses = [run.loss(each) for each in later]
    try:
        kept.backward()
    except RuntimeError:
        run.model.zero_grad()
    else:
        raise AssertionError("a step that was given up went on")
    for loss, each in zip(losses, later, strict=True):
        loss.backward()
        run.local_loss(each).backward()
    run.compare()


@loop
def forward_fails(run: Run) -> None:
    """A forward that fails in the middle, on all ranks, and is tried again."""

    def fail(*_: Any) -> None:
        raise MemoryError("no memory")

    run.step()
    handle = run.model.model.layers[1].mlp.register_forward_pre_hook(fail)
    try:
        run.loss(run.draw())
    except MemoryError:
        handle.remove()
    gc.collect()
    run.step()
    run.compare()


@loop
def checkpoints(run: Run) -> None:
    """Also: the global random state is untouched."""
    before = torch.get_rng_state()
    run.model.gradient_checkpointing_enable({"use_reentrant": False})
    run.model.train()
    run.step()
    run.step("both")
    run.compare()
    assert torch.equal(torch.get_rng_state(), before)


@loop
def compiled_model(run: Run) -> None:
    """Attention and masks stay outside of the graphs."""
    compiled: Any = torch.compile(run.model, backend="aot_eager")
    run.step(model=compiled)
    run.step(model=compiled)
    run.compare()


@loop
def lower_layers(run: Run) -> None:
    """Losses of a middle layer: beside the last one's, and alone with the layers above tied in."""

    def loss(output: Any, rows: Sequence[torch.Tensor], *, is_tied: bool) -> torch.Tensor:
        middle = sum(map(loss_of, rows), torch.zeros(()))
        total: torch.Tensor = middle + (0 if is_tied else 1) * output.logits.square().sum() / 100
        return total

    for is_tied in (False, True):
        documents = run.draw()
        batch = batch_of(documents, "position_ids")
        output = run.model(**batch, output_hidden_states=True)
        rows = rows_of(output.hidden_states[1], documents, "position_ids")
        loss(output, rows, is_tied=is_tied).backward()
        for document in documents:
            output = run.local(input_ids=document[None], output_hidden_states=True)
            loss(output, [output.hidden_states[1][0]], is_tied=is_tied).backward()
        run.compare()


@loop
def lora(run: Run) -> None:
    """Weights of lower layers frozen, as adapters leave them."""
    for model in (run.model, run.local):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("layers.1" in name and "q_proj" in name)
    run.step()
    run.compare()


@loop
def all_frozen(run: Run) -> None:
    run.model.requires_grad_(False)
    for _ in range(5):
        run.loss(run.draw())
    run.model.requires_grad_(True)
    run.step()
    run.compare()


@loop
def served_forwards(run: Run) -> None:
    for _ in range(5):
        documents = run.draw()
        with torch.no_grad(), distca.served_forward():
            mine = run.loss(documents, "left")
        with torch.no_grad():
            theirs = run.local_loss(documents)
        assert abs(mine - theirs) <= TOLERANCE * abs(theirs) + TOLERANCE
    # Ranks that are slow to come join later steps.
    assert run.steps_begun >= 5
    run.step()
    run.compare()


@loop
def reused_buffers(run: Run) -> None:
    """A loader that gives the same tensors each time, filled with the next batch meanwhile."""
    buffers: dict[str, torch.Tensor] = {}
    for _ in range(6):
        # Equally many rows, split otherwise.
        documents = run.draw(2, longest=30)
        documents = list(torch.cat([*documents, torch.full((60,), 9)])[:60].split([20, 40]))
        cut = run._drawn * 5
        documents = list(torch.cat(documents).split([cut, 60 - cut]))
        for name, value in batch_of(documents, "position_ids").items():
            buffers.setdefault(name, value.clone()).copy_(value)
        parts = rows_of(run.model(**buffers).logits, documents, "position_ids")
        sum(map(loss_of, parts), torch.zeros(())).backward()
        run.local_loss(documents).backward()
        run.compare()


@loop
def sleeps(run: Run) -> None:
    run.step()
    assert run.attached is not None
    run.attached.sleep()
    dist.barrier()
    run.attached.wake()
    run.step()
    run.compare()


@loop
def autocast(run: Run) -> None:
    """Weights in float32, attention in bfloat16: about as far from sdpa's as that from float32."""
    documents = run.draw()
    for loss in (run.loss, run.local_loss):
        with torch.autocast("cpu", torch.bfloat16):
            loss(documents).backward()
    run.compare(tolerance=0.05)


def of_layers(model: Any, **options: Any) -> None:
    for layer in model.model.layers:
        fully_shard(layer, **options)


def with_root(model: Any) -> None:
    """The root is resharded too, as verl has it."""
    of_layers(model)
    fully_shard(model, reshard_after_forward=True)


def root_alone(model: Any) -> None:
    fully_shard(model, reshard_after_forward=True)


def kept_gathered(model: Any) -> None:
    of_layers(model, reshard_after_forward=False)
    fully_shard(model)


def units_of_all_kinds(model: Any) -> None:
    """The embedding, layers and a group of what comes after them."""
    fully_shard(model.model.embed_tokens)
    of_layers(model)
    fully_shard([model.model.norm, model.lm_head])
    fully_shard(model)


def recomputed(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    with_root(model.train())


def of_graphs(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    with_root(model)


SHARDED = (with_root, root_alone, kept_gathered, units_of_all_kinds, recomputed, of_graphs)
"""Ways to shard a model."""


@loop
def fsdp2(run: Run) -> None:
    for shard in SHARDED if "TURNS" in os.environ else (with_root,):
        one = Run()
        shard(one.model)
        for _ in range(2):
            one.step()
            one.compare(is_mean=True)
            # Nothing is left gathered.
            assert all(isinstance(each, DTensor) for each in one.model.parameters())
            with torch.no_grad():
                one.loss(one.draw())
        assert one.attached is not None
        one.attached.close()


@loop
def own_model(run: Run) -> None:
    """A model that is none of transformers', by flash-attn's signatures."""
    run.swap(OwnModel(distca.flash_attn_varlen_func, distca.flash_attn_func), OwnModel(None, None))
    for _ in range(3):
        run.step("own")
        run.compare()
    run.step("own rows")
    run.compare()
    assert run.steps_begun >= 3


@loop
def lost_node(run: Run) -> None:
    """A node is killed while two steps are open, and three on another rank."""
    if not NODES:
        return
    run.step()
    documents = [run.draw() for _ in range(2 + run.rank)]
    losses = [run.loss(each) for each in documents]
    dist.barrier()
    if run.rank == 0:
        os.kill(NODES.pop(), signal.SIGKILL)
    for loss in losses:
        loss.backward()
    for each in documents:
        run.local_loss(each).backward()
    run.step()
    run.compare()


@loop
def stopped_control_plane(run: Run) -> None:
    """Ranks run unlike numbers of steps while it is stopped, beside one that is open."""
    if not CONTROL_PLANE:
        return
    run.step()
    documents = run.draw()
    loss = run.loss(documents)
    dist.barrier()
    if run.rank == 0:
        os.kill(CONTROL_PLANE, signal.SIGSTOP)
    dist.barrier()
    try:
        for _ in range(2 + run.rank):
            run.step()
        dist.barrier()
    finally:
        os.kill(CONTROL_PLANE, signal.SIGCONT)
    loss.backward()
    run.local_loss(documents).backward()
    for _ in range(3):
        run.step()
    run.compare()


@loop
def one_rank_at_home(run: Run) -> None:
    """One rank has run its round at home when the control plane is back, and sits in a collective:
    the other one is planned without it at once."""
    if not CONTROL_PLANE:
        return
    # Its second forward rebuilds buckets, by a collective, and those after it have none.
    wrapped = DistributedDataParallel(run.model, forward_sync_buffers=False)
    for _ in range(2):
        run.step(model=wrapped)
        run.compare(is_mean=True)
    documents = run.draw()
    if run.rank == 0:
        os.kill(CONTROL_PLANE, signal.SIGSTOP)
        try:
            loss = run.loss(documents, model=wrapped)
        finally:
            os.kill(CONTROL_PLANE, signal.SIGCONT)
    dist.barrier()
    began = time.monotonic()
    if run.rank == 1:
        loss = run.loss(documents, model=wrapped)
        assert time.monotonic() - began < default_seconds("round_join_seconds")
    loss.backward()
    run.local_loss(documents).backward()
    run.compare(is_mean=True)


class OwnModel(nn.Module):
    """Two layers of attention, with an activation checkpoint around the second one."""

    def __init__(self, varlen: Any, rows: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(64, 64)
        self.qkv = nn.ModuleList(nn.Linear(64, 128) for _ in range(2))
        self.out = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self._varlen, self._rows = varlen, rows

    def forward(self, ids: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """``ids`` ``[rows]`` with ``ends``, or ``[batch, tokens]``."""
        x: torch.Tensor = self.embedding(ids)
        x = x + self._layer(0, x, ends)
        later: torch.Tensor = checkpoint(self._layer, 1, x, ends, use_reentrant=False)
        return x + later

    def _layer(self, layer: int, x: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        q, k, v = self.qkv[layer](x).unflatten(-1, (8, 16)).split((4, 2, 2), dim=-2)
        result: torch.Tensor = self.out[layer](self._attend(q, k, v, ends).flatten(-2))
        return result

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: torch.Tensor | None
    ) -> torch.Tensor:
        if self._rows is None:
            q, k, v = (tensor.transpose(-3, -2) for tensor in (q, k, v))
            o = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            return o.transpose(-3, -2)
        of_rows: torch.Tensor = (
            self._rows(q, k, v, causal=True)
            if ends is None
            else self._varlen(q, k, v, ends, ends, 99, 99, causal=True)
        )
        return of_rows.contiguous()


@loop
def cut_documents(run: Run) -> None:
    """Halves of equally many rows, whatever document lies in their middle."""
    SETTINGS["cut_documents"] = SETTINGS["turns"] == 2
    run.swap(run.model, run.local)
    del SETTINGS["cut_documents"]
    odd_lengths(run)


@loop
def trees(run: Run) -> None:
    """Documents that share prefixes, also with one of the other rank, against paths alone; with
    documents cut between halves; and without gradients, at home and served. DDP has ranks come to
    steps together."""
    wrapped = DistributedDataParallel(run.model)
    lengths, parents, offsets = [21, 12, 9, 1, 14], [-1, 0, 1, 0, 0], [0, 21, 30, 17, 8]
    n_ranks = dist.get_world_size()
    for turn in range(4):
        if turn == 2 and SETTINGS["turns"] == 2:
            SETTINGS["cut_documents"] = True
            run.swap(run.model, run.local)
            wrapped = DistributedDataParallel(run.model)
            del SETTINGS["cut_documents"]
        generator = torch.Generator().manual_seed(turn)
        drawn = [
            [torch.randint(4, 64, (n,), generator=generator) for n in lengths]
            for _ in range(n_ranks)
        ]
        holders = [run.rank] * len(lengths)
        if turn % 2:
            holders[-1] = (run.rank + 1) % n_ranks
        paths = [drawn[run.rank][0]]
        for document in range(1, len(lengths)):
            holder, parent = holders[document], parents[document]
            above = paths[parent] if holder == run.rank else drawn[holder][parent]
            paths.append(torch.cat([above[: offsets[document]], drawn[run.rank][document]]))
        own = drawn[run.rank]
        positions = [
            torch.arange(offset, offset + n) for n, offset in zip(lengths, offsets, strict=True)
        ]
        given: dict[str, Any] = {
            "input_ids": torch.cat(own)[None],
            "position_ids": torch.cat(positions)[None],
            "document_lengths": torch.tensor(lengths),
            "document_offsets": offsets,
            "document_parents": torch.tensor(parents),
        }
        if turn % 2:
            given["document_parent_ranks"] = torch.tensor(holders)
        logits = wrapped(**given).logits
        sum(map(loss_of, rows_of(logits, own, "")), torch.zeros(())).backward()
        for path, n in zip(paths, lengths, strict=True):
            loss_of(run.local(input_ids=path[None]).logits[0, -n:]).backward()
        # A parent's rank has gradients of the children elsewhere.
        run.compare(is_mean=True)
        for forward in () if turn % 2 else (distca.served_forward, nullcontext):
            with torch.no_grad(), forward():
                found = run.model(**given).logits
            assert (found - logits).abs().max() <= TOLERANCE * logits.abs().max()


@loop
def decoder_alone(run: Run) -> None:
    """A head of one's own around the decoder, which nothing else calls before."""
    for _ in range(2):
        documents = run.draw()
        hidden = run.model.model(**batch_of(documents, "position_ids")).last_hidden_state
        rows = rows_of(hidden, documents, "position_ids")
        sum(map(loss_of, rows), torch.zeros(())).backward()
        for document in documents:
            loss_of(run.local.model(input_ids=document[None]).last_hidden_state[0]).backward()
        run.compare()


@loop
def averaged(run: Run) -> None:
    """Copies, as averages of weights are, run with weights of their own while it trains."""
    run.step()
    run.compare()
    copies = [copy.deepcopy(run.model), pickle.loads(pickle.dumps(run.model))]
    documents = run.draw()
    with torch.no_grad():
        expected = run.local_loss(documents)
        for parameter in run.model.parameters():
            parameter.zero_()
        for each in copies:
            found = run.loss(documents, model=each)
            assert abs(found - expected) <= TOLERANCE * abs(expected) + TOLERANCE


SETTINGS: dict[str, Any] = {"turns": 1}
IN_TURNS = {
    *("plain", "odd_lengths", "accumulation", "interleaved", "fsdp2", "cut_documents", "trees"),
}
"""Loops that are run by halves too, where the environment has TURNS."""
CONTROL_PLANE = int(os.environ.get("CONTROL_PLANE", "0"))
NODES = [int(pid) for pid in os.environ.get("NODES", "").split()]


def main() -> None:
    dist.init_process_group("gloo")
    SETTINGS["head_groups"] = int(os.environ.get("HEAD_GROUPS", "1"))
    names = sys.argv[1:] or list(LOOPS)
    for name in names:
        for turns in (1, 2) if "TURNS" in os.environ and name in IN_TURNS else (1,):
            SETTINGS["turns"] = turns
            run = Run()
            LOOPS[name](run)
            assert run.attached is not None
            run.attached.close()
            dist.barrier()
            if dist.get_rank() == 0:
                print(name, "holds in turns of", turns, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
