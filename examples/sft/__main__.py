"""Fine-tunes a checkpoint with TRL's trainer: ``torchrun --nproc-per-node 8 -m examples.sft ...``.

The folder that it saves has config, weights as safetensors and tokenizer, as the one that it loads.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from datasets import load_dataset
from transformers import AutoConfig
from transformers.utils.quantization_config import Mxfp4Config
from trl import SFTConfig, SFTTrainer, TrlParser

import distca


@dataclass
class Folders:
    """Options besides those of ``SFTConfig``."""

    model: str = field(metadata={"help": "Folder of a checkpoint and its tokenizer."})
    data: str = field(
        metadata={
            "help": "File or folder of JSON lines or Parquet, with text, messages, or prompt and "
            "completion."
        }
    )
    output: str = field(metadata={"help": "Folder of the trained checkpoint."})
    attention: str = field(
        default="distca", metadata={"help": "Implementation; sdpa or eager trains without DistCA."}
    )


def train(arguments: Sequence[str]) -> Any:
    """Trains and saves; returns the trainer."""
    folders, config = TrlParser((Folders, SFTConfig)).parse_args_and_config(arguments)
    config.output_dir = folders.output
    config.model_init_kwargs = {
        "attn_implementation": folders.attention,
        "device_map": None,
        **stored_in_four_bits(folders.model),
        **(config.model_init_kwargs or {}),
    }
    trainer = SFTTrainer(folders.model, config, train_dataset=documents(Path(folders.data)))
    if folders.attention == "distca":
        distca.attach(trainer.model)
        distca.log_scalars(trainer)
    trainer.train(resume_from_checkpoint=config.resume_from_checkpoint)
    # The trainer has turned it off; whoever loads the folder generates with one.
    trainer.model.config.use_cache = True
    trainer.save_model()
    return trainer


def stored_in_four_bits(model: str) -> dict[str, Any]:
    """gpt-oss is published with experts in MXFP4; such weights are trained as any others."""
    auto: Any = AutoConfig
    stored = auto.from_pretrained(model).to_dict().get("quantization_config") or {}
    mxfp4 = stored.get("quant_method") == "mxfp4"
    return {"quantization_config": Mxfp4Config(dequantize=True)} if mxfp4 else {}


def documents(path: Path) -> Any:
    """The documents of a file, or of all files in a folder."""
    folder, files = (path, None) if path.is_dir() else (path.parent, path.name)
    return load_dataset(str(folder), data_files=files, split="train")


if __name__ == "__main__":
    train(sys.argv[1:]).end()
