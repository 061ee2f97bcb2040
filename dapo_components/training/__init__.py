"""Pieces of a training loop: model access, distribution, checkpoints, configuration.

Import from the module that holds a piece: ``from dapo_components.training.checkpoint import CheckpointStore``.
"""
