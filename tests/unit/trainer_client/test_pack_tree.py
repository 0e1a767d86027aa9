"""Samples packed as trees, against each sample alone."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from tests.support.errors import refused
from tests.support.gradients import assert_gradients
from tests.support.tiny_models import TINY_LLAMA, tiny_config
from tests.support.tree_attention import REFERENCE, paths
from trainer_client.loops import token_scores
from trainer_client.loops.tree import Tree, pack_tree
from trainer_client.loops.tree_batches import pack_nested_tree, pack_padded_tree

Samples = list[list[int]]


def grown(depth: int, n_children: int, seed: int = 0) -> Samples:
    """Samples of a tree whose nodes have 1 to 9 tokens and, but for the leaves, ``n_children``."""
    generator = np.random.default_rng(seed)

    def below(prefix: list[int], levels: int) -> Samples:
        node = prefix + generator.integers(0, 64, generator.integers(1, 10)).tolist()
        if not levels:
            return [node]
        return [each for _ in range(n_children) for each in below(node, levels - 1)]

    return below([], depth - 1)


CASES = {
    "one sample": [[5, 6, 7, 8]],
    "one token": [[5], [5], [6], [6, 7]],
    "duplicates": [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 5], [1, 2, 5]],
    "prefixes, shorter first": [[1, 2], [1, 2, 3, 4], [1], [1, 2, 3, 4, 5], [1, 2, 3, 9]],
    "prefixes, longer first": [[1, 2, 3, 4, 5], [1, 2, 3], [1, 2, 3, 9], [1, 2]],
    "unlike prompts": [[1, 2, 3], [4, 2, 3], [1, 2, 9], [4, 2, 8, 8], [7]],
    "100 children": grown(2, 100),
    **{f"depth {depth}": grown(depth, 3 if depth < 5 else 2, depth) for depth in range(1, 6)},
}


def model_of(family: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = tiny_config(family, **TINY_LLAMA)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation="sdpa", dtype=dtype)


def alone(model: Any, samples: Samples) -> list[torch.Tensor]:
    """Log-probabilities of each sample's tokens 1 to n - 1, as a model of one row gives them."""
    found = []
    for sample in samples:
        logs = model(input_ids=torch.tensor([sample])).logits[0].log_softmax(-1)
        found.append(logs[:-1].gather(1, torch.tensor(sample[1:])[:, None])[:, 0])
    return found


def weighed(log_probs: list[torch.Tensor]) -> torch.Tensor:
    """A loss with a weight of its own for each token of each sample."""
    found = torch.cat(log_probs)
    weights = torch.linspace(-1, 2, len(found), dtype=found.dtype)
    return (found.exp() * weights + weights.cos() * found).sum() / len(found)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("name", CASES)
def test_log_probs_and_gradients_are_those_of_each_sample_alone(name: str, family: str) -> None:
    samples = CASES[name]
    separate = model_of(family, torch.float32)
    packed = copy.deepcopy(separate)
    packed.set_attn_implementation(REFERENCE)
    right = alone(separate, samples)
    tree = pack_tree(samples)
    mine = tree.log_probs(packed(**tree.inputs).logits)
    for one, other in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    if any(map(len, right)):
        weighed(right).backward()
        weighed(mine).backward()
        assert_gradients(packed, separate, 1e-5, name)


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("kept", [False, True])
def test_every_way_to_the_logits_gives_the_same(
    kept: bool, in_chunks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows or those that are kept, logits or hidden states and the head: with a temperature,
    entropies and prompts that are not scored. transformers computes norms in float32."""
    monkeypatch.setattr(token_scores, "CHUNK_ROWS", 7)
    samples, temperature = CASES["depth 4"], 0.7
    prompts = [0, 1, 2, *(len(sample) for sample in samples[3:6]), *[5] * (len(samples) - 6)]
    separate = model_of("llama", torch.float64)
    packed = copy.deepcopy(separate)
    packed.set_attn_implementation(REFERENCE)
    right, spread = [], []
    for sample, prompt in zip(samples, prompts, strict=True):
        logits = separate(input_ids=torch.tensor([sample])).logits[0, :-1] / temperature
        drawn = torch.distributions.Categorical(
            logits=logits[max(prompt, 1) - 1 :], validate_args=False
        )
        right.append(drawn.log_prob(torch.tensor(sample[max(prompt, 1) :])))
        spread.append(drawn.entropy())
    tree = pack_tree(samples, prompt_lengths=prompts)
    assert len(tree.logits_to_keep) < tree.n_rows < tree.n_tokens
    rows = tree.logits_to_keep if kept else slice(None)
    if in_chunks:
        hidden = packed.model(**tree.inputs).last_hidden_state[:, rows]
        found = tree.log_probs_and_entropies(hidden, packed.lm_head, temperature=temperature)
    else:
        logits = packed(**tree.inputs, logits_to_keep=rows if kept else 0).logits
        found = tree.log_probs_and_entropies(logits, temperature=temperature)
    for one, other in zip(found[0] + found[1], right + spread, strict=True):
        torch.testing.assert_close(one, other)
    (weighed(right) + weighed(spread)).backward()
    (weighed(found[0]) + weighed(found[1])).backward()
    assert_gradients(packed, separate, 1e-6)


def documents(trees: list[Tree]) -> tuple[list[list[int]], Any]:
    """Lengths, parents and offsets of the documents of all ranks in a row, and their tokens."""
    columns: dict[str, list[int]] = {}
    firsts = np.cumsum([0, *(len(tree.inputs["document_lengths"]) for tree in trees)])
    for tree in trees:
        for name in ("lengths", "parents", "offsets"):
            columns.setdefault(name, []).extend(tree.inputs[f"document_{name}"].tolist())
    ranks = [
        rank
        for tree in trees
        for rank in tree.inputs.get("document_parent_ranks", tree.inputs["document_parents"] * 0)
    ]
    parents = zip(columns["parents"], ranks, strict=True)
    columns["parents"] = [-1 if at < 0 else at + int(firsts[rank]) for at, rank in parents]
    tokens = torch.cat([tree.inputs["input_ids"][0] for tree in trees])
    return [columns[name] for name in ("lengths", "parents", "offsets")], tokens


def sample_lists() -> st.SearchStrategy[Samples]:
    return st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=9), min_size=1, max_size=12)


@given(samples=sample_lists(), world_size=st.integers(1, 4))
def test_ranks_share_a_forest_without_a_row_too_many(samples: Samples, world_size: int) -> None:
    trees = [pack_tree(samples, rank=rank, world_size=world_size) for rank in range(world_size)]
    prefixes = {tuple(sample[:end]) for sample in samples for end in range(1, len(sample) + 1)}
    sizes = [tree.n_rows for tree in trees]
    assert sum(sizes) == len(prefixes)
    assert max(sizes) - min(sizes) <= 1
    columns, tokens = documents(trees)
    of_paths = paths(*columns)
    assert {
        tuple(tokens[path[:end]].tolist()) for path in of_paths for end in range(1, len(path) + 1)
    } == prefixes
    for column, path, offset in zip(columns[0], of_paths, columns[2], strict=True):
        assert column == len(path) - offset >= 1
    position_ids = torch.cat([tree.inputs["position_ids"][0] for tree in trees])
    assert position_ids.tolist() == [
        offset + i for n, _, offset in zip(*columns, strict=True) for i in range(n)
    ]
    # Each rank scores what its rows predict: together all tokens, once.
    logits = torch.randn(1, len(tokens), 3, dtype=torch.float64)
    whole = pack_tree(samples).log_probs(logits)
    for sample, right in enumerate(whole):
        parts: list[tuple[int, float]] = []
        for tree, of_rank in zip(trees, logits.split(sizes, dim=1), strict=True):
            places = tree.part([torch.arange(len(each)) for each in samples])[sample]
            parts += zip(places.tolist(), tree.log_probs(of_rank)[sample].tolist(), strict=True)
        assert sorted(parts) == list(enumerate(right.tolist(), start=1))


@given(samples=sample_lists())
def test_what_goes_with_tokens_is_packed_as_they_are(samples: Samples) -> None:
    tree = pack_tree(samples)
    tokens = [torch.tensor(sample) for sample in samples]
    assert torch.equal(tree.pack(tokens), tree.inputs["input_ids"])
    assert tree.pack([each[:, None].float() for each in tokens]).shape == (1, tree.n_rows, 1)
    # A sample that is the beginning of another needs no document.
    leaves = len(set(map(tuple, samples)) - {tuple(s[:n]) for s in samples for n in range(len(s))})
    assert len(tree.inputs["document_lengths"]) == leaves


def test_a_batch_of_trls_gives_what_its_fused_head_gives() -> None:
    """Two prompts with three completions each, padded by TRL on the left and on the right; the
    trainer scores completions alone, with a temperature."""
    from trl.trainer.utils import add_fused_lm_head, pad

    generator = torch.Generator().manual_seed(0)

    def drawn(length: int) -> torch.Tensor:
        return torch.randint(64, (length,), generator=generator)

    prompts = [prompt for prompt in (drawn(9), drawn(4)) for _ in range(3)]
    completions = [drawn(length) for length in (5, 1, 7, 2, 7, 3)]
    completions[2] = completions[0]
    parts = (prompts, "left"), (completions, "right")
    ids = torch.cat([pad(part, padding_side=side, padding_value=0) for part, side in parts], 1)
    ones = [([torch.ones_like(each) for each in part], side) for part, side in parts]
    mask = torch.cat([pad(part, padding_side=side, padding_value=0) for part, side in ones], 1)
    separate = model_of("llama", torch.float32)
    packed = copy.deepcopy(separate)
    packed.set_attn_implementation(REFERENCE)
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-7] = -100
    add_fused_lm_head(separate, temperature=0.9, outputs=("log_probs", "entropy"))
    right = separate(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
    tree, padded = pack_padded_tree(ids, mask, 7)
    logits = packed(**tree.inputs, logits_to_keep=tree.logits_to_keep).logits
    scores = tree.log_probs_and_entropies(logits, temperature=0.9)
    mine, entropies = (padded(each) for each in scores)
    scored = mask[:, -7:].bool()
    assert not mine[~scored].any()
    torch.testing.assert_close(mine[scored], right.log_probs[:, -7:][scored], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies[scored], right.entropy[:, -7:][scored])
    weighed([right.log_probs[:, -7:][scored]]).backward()
    weighed([mine[scored]]).backward()
    assert_gradients(packed, separate, 1e-5)


@pytest.mark.parametrize("prompts", [None, [2, 2, 1]])
def test_a_batch_of_verls_has_log_probs_where_its_loss_looks(prompts: list[int] | None) -> None:
    samples = [[1, 2, 3, 4], [1, 2, 5], [6, 7]]
    nested: Any = torch.nested.as_nested_tensor(
        list(map(torch.tensor, samples)), layout=torch.jagged
    )
    tree, restored = pack_nested_tree(nested, prompts)
    logits = torch.randn(1, tree.n_rows, 8)
    found: Any = restored(tree.log_probs(logits))
    right = pack_tree(samples).log_probs(logits)
    assert found.offsets().tolist() == nested.offsets().tolist()
    for one, other, first in zip(found.unbind(), right, prompts or [1] * 3, strict=True):
        # As no_padding_2_padding of verl cuts a response of n tokens: [-1 - n : -1].
        assert one[first - 1 : -1].tolist() == other[first - 1 :].tolist()
        assert not one[: first - 1].any()
        assert not one[-1]


@pytest.mark.parametrize(
    "given",
    [
        {"samples": []},
        {"samples": [[1], []]},
        {"samples": [torch.ones(2, 2, dtype=torch.int64)]},
        {"samples": [[0.5]]},
        {"samples": [[1, 2]], "prompt_lengths": [3]},
        {"samples": [[1, 2]], "prompt_lengths": []},
        {"samples": [[1]], "rank": 1},
    ],
)
def test_wrong_input_is_refused(given: dict[str, Any]) -> None:
    with refused():
        pack_tree(**given)


def test_rows_that_are_not_the_trees_are_refused() -> None:
    tree = pack_tree([[1, 2, 3]])
    with refused():
        tree.log_probs(torch.zeros(1, 5, 7))
    with refused():
        tree.pack([torch.zeros(2)])
