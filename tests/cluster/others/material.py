"""A model, a tokenizer and data of a few kilobytes, in folders, as scripts of others load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.tiny_models import TINY_LLAMA

VOCABULARY: int = TINY_LLAMA["vocab_size"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ' ' + message['content'] + ' <eos> ' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


def write_material(folder: Path) -> None:
    """Writes ``model`` and, one folder each, data sets: ``text``, ``preference`` and ``prompt``."""
    torch.manual_seed(0)
    fields = {**TINY_LLAMA, "use_cache": True, "bos_token_id": None, "eos_token_id": 1}
    config = AutoConfig.for_model("llama", **fields, pad_token_id=0, max_position_embeddings=512)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    generator = torch.Generator().manual_seed(1)
    n = [torch.randint(1, longest, (48,), generator=generator).tolist() for longest in (9, 50, 30)]
    names = ("prompt", "chosen", "rejected")
    pairs = [
        {name: words(length, generator) for name, length in zip(names, lengths, strict=True)}
        for lengths in zip(*n, strict=True)
    ]
    _write(folder / "preference", pairs)
    _write(folder / "prompt", [{"prompt": pair["prompt"]} for pair in pairs])
    _write(folder / "text", [{"text": pair["chosen"]} for pair in pairs])


def reward(completions: list[str], **_: Any) -> list[float]:
    """Number of different words: what is cheap and differs."""
    return [float(len(set(completion.split()))) for completion in completions]


def words(n: int, generator: torch.Generator) -> str:
    ids = torch.randint(4, VOCABULARY, (n,), generator=generator).tolist()
    return " ".join(f"t{each}" for each in ids)


def _write(folder: Path, rows: list[dict[str, str]]) -> None:
    folder.mkdir()
    for name, part in (("train", rows[:-8]), ("test", rows[-8:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))


def tokenizer() -> Any:
    known = {"<pad>": 0, "<eos>": 1, "<unk>": 2, "assistant": 3}
    known |= {f"t{each}": each for each in range(4, VOCABULARY)}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    untyped: Any = PreTrainedTokenizerFast
    return untyped(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=TEMPLATE,
    )
