"""Pieces of a training loop: model access, distribution, checkpoints, configuration."""
