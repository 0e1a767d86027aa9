"""Fine-tuning of checkpoints of Hugging Face's format, with served core attention."""
