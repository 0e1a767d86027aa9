"""Llama 3 of torchtitan's registry on packed random documents, with served core attention:

    torchrun --nproc-per-node 2 -m torchtitan.train --module examples.torchtitan.llama3 \
        --config debugmodel --distca.control_plane localhost:7700
"""

from __future__ import annotations

from typing import Any

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from examples.torchtitan.random_documents import NoTokenizer, RandomDocuments
from trainer_client.frameworks.torchtitan import served


def debugmodel() -> Any:
    """Six small layers, for a first try."""
    return served(plain("debugmodel", seq_len=2048))


def llama3_8b() -> Any:
    """The whole model, 128K tokens a rank and step."""
    return served(plain("8B", seq_len=131072), job="llama3-8b")


def plain(
    flavor: str,
    *,
    seq_len: int,
    n_layers: int | None = None,
    attn_backend: str = "varlen",
    vocabulary: int | None = None,
) -> Any:
    """torchtitan's own configuration, without DistCA.

    Args:
        flavor: of torchtitan's registry.
        seq_len: tokens of a batch.
        n_layers: the model's first ones alone; None is all.
        attn_backend: of torchtitan; "varlen" is the one that can be served.
        vocabulary: another size of it than the flavor's.
    """
    spec = model_registry(flavor, attn_backend=attn_backend)
    spec.model.layers = spec.model.layers[:n_layers]
    if vocabulary is not None:
        spec.model.vocab_size = vocabulary
        spec.model.tok_embeddings.num_embeddings = vocabulary
        spec.model.lm_head.out_features = vocabulary
    return Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomDocuments.Config(vocabulary=spec.model.vocab_size),
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(
            local_batch_size=1, seq_len=seq_len, steps=20, disable_cuda_graphs=True
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=FullAC.Config(),
    )
