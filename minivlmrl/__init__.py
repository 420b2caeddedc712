"""Reinforcement learning for vision-language models, written from scratch in PyTorch.

`__all__` is the public API; see docs/library.md. Names are imported lazily, so `import minivlmrl` is fast and does not
import torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import ModuleType

    from minivlmrl.losses.advantages import group_advantages
    from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
    from minivlmrl.losses.ppo import ppo_loss
    from minivlmrl.losses.preference import dpo_loss
    from minivlmrl.losses.sft import sft_loss
    from minivlmrl.model.logprobs import per_token_logps

    parity: ModuleType

__version__ = "0.6.0"  # package version, read by pyproject.toml
__all__ = [
    "LossNormalizer",
    "__version__",
    "dpo_loss",
    "group_advantages",
    "grpo_loss",
    "parity",
    "per_token_logps",
    "ppo_loss",
    "sft_loss",
]
# {public name: module that defines it}
MODULES = {
    "LossNormalizer": "minivlmrl.losses.grpo",
    "dpo_loss": "minivlmrl.losses.preference",
    "group_advantages": "minivlmrl.losses.advantages",
    "grpo_loss": "minivlmrl.losses.grpo",
    "per_token_logps": "minivlmrl.model.logprobs",
    "ppo_loss": "minivlmrl.losses.ppo",
    "sft_loss": "minivlmrl.losses.sft",
}


def __getattr__(name: str):
    if name == "parity":
        from minivlmrl.load_extra import load_extra

        return load_extra("minivlmrl.extras.parity", "minivlmrl.parity")
    if name not in MODULES:
        raise AttributeError(f"module 'minivlmrl' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
