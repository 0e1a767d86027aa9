"""A rank: ``torchrun --nproc-per-node 2 -m examples.grpo_tree``, as ``make demo-rl`` runs it.

Two models with equal weights see the same completions in every step. One computes them as a tree,
whose attention DistCA serves; the other one computes each prompt and completion as a row.

``--model FOLDER --data FILE --output FOLDER`` trains a checkpoint of Hugging Face's and saves it,
``--trees-only`` without the other model. Lines of the file are ``{"prompt": ..., "answer": ...}``,
and completions that contain the answer have the reward 1.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import distca

PROMPT = 384
"""Tokens of the prompts that are drawn where there are no data."""

END = 1
"""The token that ends a completion of the model that is made where there is none."""

Reward = Callable[[torch.Tensor], float]
Figures = tuple[float, float, int]


class Batch(NamedTuple):
    """A prompt with completions behind it, ``[group, tokens]``, and the mask of what is no padding,
    which is on the right."""

    ids: torch.Tensor
    mask: torch.Tensor
    n_prompt: int
    rewards: torch.Tensor


def policy(folder: str | None, attention: str, device: torch.device) -> Any:
    auto: Any = AutoModelForCausalLM
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    given = {"attn_implementation": attention, "dtype": dtype}
    if folder is not None:
        return auto.from_pretrained(folder, **given).to(device)
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads, eos_token_id=END, pad_token_id=0)
    return auto.from_config(config, **given).to(device)


def drawn() -> Iterator[tuple[torch.Tensor, Reward]]:
    """Random prompts, and the share of tokens below 32 in what follows."""
    while True:
        yield torch.randint(2, 64, (PROMPT,)), lambda ids: float((ids < 32).float().mean())


def read(path: Path, tokenizer: Any) -> Iterator[tuple[torch.Tensor, Reward]]:
    """This rank's lines, again and again."""
    lines = path.read_text().splitlines()
    index = dist.get_rank()
    while True:
        line = json.loads(lines[index % len(lines)])
        prompt = tokenizer(line["prompt"], return_tensors="pt").input_ids[0]
        yield prompt, partial(contains, tokenizer, line["answer"])
        index += dist.get_world_size()


def contains(tokenizer: Any, answer: str, ids: torch.Tensor) -> float:
    return float(answer in tokenizer.decode(ids))


def sampled(model: Any, prompt: torch.Tensor, reward: Reward, chosen: Any) -> Batch:
    given, n = prompt.to(model.device).expand(chosen.group, -1), len(prompt)
    # Padding is found by the end before it, whatever token it is.
    ends = torch.tensor(model.generation_config.eos_token_id, device=model.device)
    ids = model.generate(
        given,
        attention_mask=torch.ones_like(given),
        do_sample=True,
        max_new_tokens=chosen.completion,
        pad_token_id=int(ends.flatten()[0]),
    )
    mask = torch.ones_like(ids)
    mask[:, n + 1 :] = torch.isin(ids[:, n:-1], ends).cumsum(1) == 0
    rewards = [reward(row[n:][kept[n:] > 0]) for row, kept in zip(ids, mask, strict=True)]
    return Batch(ids * mask, mask, n, torch.tensor(rewards, device=ids.device))


def loss_of(log_probs: torch.Tensor, old: torch.Tensor, batch: Batch) -> torch.Tensor:
    """GRPO's loss of log-probabilities ``[group, completion]``."""
    rewards, scored = batch.rewards, batch.mask[:, batch.n_prompt :]
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    ratio = (log_probs - old).exp()
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((gain * scored).sum(1) / scored.sum(1)).mean()


def of_tree(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """Log-probabilities ``[group, completion]``, and rows that were computed."""
    n_scored = batch.ids.shape[1] - batch.n_prompt
    tree, padded = distca.pack_padded_tree(batch.ids, batch.mask, n_scored)
    logits = model(**tree.inputs, logits_to_keep=tree.logits_to_keep).logits
    return padded(tree.log_probs(logits)), tree.n_rows


def of_rows(model: Any, batch: Batch) -> tuple[torch.Tensor, int]:
    """The same of separate rows."""
    ids, n = batch.ids, batch.n_prompt
    logs = model(input_ids=ids, attention_mask=batch.mask).logits[:, n - 1 : -1].log_softmax(-1)
    return logs.gather(2, ids[:, n:, None])[..., 0], int(batch.mask.sum())


def updated(way: Any, model: Any, optimizer: Any, batch: Batch) -> Figures:
    """The loss and the gradients' norm of the second of two updates, and the rows of each."""
    old = None
    for _ in range(2):
        log_probs, n_rows = way(model, batch)
        old = log_probs.detach() if old is None else old
        loss = loss_of(log_probs, old, batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), norm.item(), n_rows


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", help="folder of a checkpoint and its tokenizer")
    parser.add_argument("--data", type=Path, help="file of JSON lines: prompt, answer")
    parser.add_argument("--output", help="folder of the trained checkpoint")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--group", type=int, default=8, help="completions of a prompt")
    parser.add_argument("--completion", type=int, default=64, help="tokens of one at most")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--trees-only", action="store_true", help="no rows to compare with")
    chosen = parser.parse_args()
    if (chosen.model is None) != (chosen.data is None):
        parser.error("--model and --data belong together")
    return chosen


def main() -> None:
    chosen = options()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    models = {of_tree: policy(chosen.model, "distca", device)}
    if not chosen.trees_only:
        models[of_rows] = policy(chosen.model, "sdpa", device)
    distca.attach(models[of_tree])
    parallel = {way: DistributedDataParallel(model) for way, model in models.items()}
    rate = chosen.learning_rate
    optimizers = {way: torch.optim.AdamW(each.parameters(), rate) for way, each in models.items()}
    torch.manual_seed(1 + dist.get_rank())
    auto: Any = AutoTokenizer
    tokenizer = auto.from_pretrained(chosen.model) if chosen.model else None
    tasks = read(chosen.data, tokenizer) if chosen.data else drawn()
    for step, (prompt, reward) in zip(range(chosen.steps), tasks, strict=False):
        batch = sampled(models.get(of_rows, models[of_tree]), prompt, reward, chosen)
        found = [updated(way, parallel[way], optimizers[way], batch) for way in models]
        if dist.get_rank() == 0:
            show(step, batch, *found)
    if chosen.output and dist.get_rank() == 0:
        models[of_tree].save_pretrained(chosen.output)
        if tokenizer is not None:
            tokenizer.save_pretrained(chosen.output)
    dist.destroy_process_group()


def show(step: int, batch: Batch, tree: Figures, rows: Figures | None = None) -> None:
    print(f"step {step}  reward {batch.rewards.mean():.2f}  loss {tree[0]:+.6f}", end="")
    if rows is None:
        print(f"  gradients {tree[1]:.5f}  {tree[2]:,} rows for {int(batch.mask.sum()):,} tokens")
        return
    print(
        f", of rows {rows[0]:+.6f}  gradients {tree[1]:.5f}, of rows {rows[1]:.5f}  "
        f"{tree[2]:,} rows for {rows[2]:,} tokens",
        flush=True,
    )


if __name__ == "__main__":
    main()
