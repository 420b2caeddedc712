"""Direct preference optimization and its family (arXiv 2305.18290): MPO, IPO and the others are its loss types."""

from dataclasses import dataclass

from minivlmrl.algorithms.preference_losses import DPOLoss


@dataclass
class DPOConfig(DPOLoss):
    """Options of DPO: those of its loss, and when the reference is asked."""

    precompute_ref_log_probs: bool = False  # score all rows before the first step; then no reference stays in memory
