"""KTO: learn from single answers with a label, good or bad (arXiv 2402.01306)."""

from dataclasses import dataclass

from minivlmrl.algorithms.preference_losses import KTOLoss


@dataclass
class KTOConfig(KTOLoss):
    """Options of KTO: those of its loss."""
