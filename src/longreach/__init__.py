"""Longreach: reinforcement learning and fine-tuning of language models on very long contexts, on one GPU."""

__version__ = "0.1.0"
