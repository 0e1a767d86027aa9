"""A rank: ``torchrun --nproc-per-node 2 -m examples.grpo_tree``, as ``make demo-rl`` runs it.

Two models with equal weights see the same completions in every step. One computes them as a tree,
whose attention DistCA serves; the other one computes each prompt and completion as a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoConfig, AutoModelForCausalLM

import distca

STEPS, GROUP, PROMPT, COMPLETION = 8, 8, 384, 64
END = 1
"""The token that ends a completion."""

Batch = tuple[torch.Tensor, torch.Tensor]


def policy(attention: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model("llama", **sizes, **heads, eos_token_id=END, pad_token_id=0)
    auto: Any = AutoModelForCausalLM
    return auto.from_config(config, attn_implementation=attention)


def sampled(model: Any) -> Batch:
    """A prompt with completions behind it, ``[GROUP, tokens]``, and the mask of what is no padding,
    which is on the right."""
    prompt = torch.randint(2, 64, (1, PROMPT)).expand(GROUP, -1)
    ids = model.generate(prompt, do_sample=True, max_new_tokens=COMPLETION)
    mask = torch.ones_like(ids)
    mask[:, PROMPT:] = (ids[:, PROMPT:] == END).cumsum(1).roll(1, 1).clamp(max=1) ^ 1
    mask[:, PROMPT] = 1
    return ids * mask, mask


def reward(ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``[GROUP]``: the share of tokens below 32 in each completion."""
    return ((ids < 32) * mask)[:, PROMPT:].sum(1) / mask[:, PROMPT:].sum(1)


def loss_of(
    log_probs: torch.Tensor, old: torch.Tensor, rewards: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """GRPO's loss of log-probabilities ``[GROUP, completion]``."""
    advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
    ratio, scored = (log_probs - old).exp(), mask[:, PROMPT:]
    gain = torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return -((gain * scored).sum(1) / scored.sum(1)).mean()


def of_tree(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Log-probabilities ``[GROUP, completion]``, and rows that were computed."""
    tree, padded = distca.pack_padded_tree(ids, mask, ids.shape[1] - PROMPT)
    logits = model(**tree.inputs, logits_to_keep=tree.logits_to_keep).logits
    return padded(tree.log_probs(logits)), tree.n_rows


def of_rows(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, int]:
    """The same of separate rows."""
    logs = model(input_ids=ids, attention_mask=mask).logits[:, PROMPT - 1 : -1].log_softmax(-1)
    return logs.gather(2, ids[:, PROMPT:, None])[..., 0], int(mask.sum())


def updated(way: Any, model: Any, optimizer: Any, batch: Batch) -> tuple[float, float, int]:
    """The loss and the gradients' norm of the second of two updates, and the rows of each."""
    old, rewards = None, reward(*batch)
    for _ in range(2):
        log_probs, n_rows = way(model, *batch)
        old = log_probs.detach() if old is None else old
        loss = loss_of(log_probs, old, rewards, batch[1])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), norm.item(), n_rows


def main() -> None:
    dist.init_process_group("gloo")
    models = {of_tree: policy("distca"), of_rows: policy("sdpa")}
    distca.attach(models[of_tree])
    parallel = {way: DistributedDataParallel(model) for way, model in models.items()}
    optimizers = {way: torch.optim.AdamW(each.parameters(), 1e-3) for way, each in models.items()}
    torch.manual_seed(1 + dist.get_rank())
    for step in range(STEPS):
        batch = sampled(models[of_rows])
        tree, rows = (updated(way, parallel[way], optimizers[way], batch) for way in models)
        if dist.get_rank() == 0:
            print(
                f"step {step}  reward {reward(*batch).mean():.2f}  "
                f"loss {tree[0]:+.6f}, of rows {rows[0]:+.6f}  "
                f"gradients {tree[1]:.5f}, of rows {rows[1]:.5f}  "
                f"{tree[2]:,} rows for {rows[2]:,} tokens",
                flush=True,
            )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
