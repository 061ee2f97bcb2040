"""Composable PyTorch / TensorDict blocks for DAPO (arXiv:2503.14476) and its family.

Importing this package needs only torch and tensordict. Blocks are imported from their module, for example
``from dapo_components.losses import DAPOLoss``.
"""

__version__ = "0.1.0"

__all__ = ["__version__"]
