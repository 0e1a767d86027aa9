"""Fine-tuning as a job of Ray's."""
