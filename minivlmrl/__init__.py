"""Reinforcement learning for vision-language models, written from scratch in PyTorch.

The names of `__all__` are for use as a library (docs/library.md). A name is imported when it is used
for the first time, so that `import minivlmrl` is fast and does not import torch.

This file sets environment variables that torch reads when torch is imported, or later. It does not
change variables that the user has set.
"""

import os
import sys

# `python -m minivlmrl` searches modules in the working folder first, where a folder of unknown origin
# could have a yaml.py or a torch.py. So the working folder is removed from sys.path, and __main__.py
# appends it again for commands that may run code of the user. In a clone that is not installed, the
# working folder is the clone itself. sys.argv[0] is "-m" while Python locates a module.
WORKING_FOLDER = None
if (
    sys.argv[:1] == ["-m"]
    and {"minivlmrl", "-mminivlmrl"} & {*sys.orig_argv}
    and sys.path[0] == os.getcwd() != os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
):
    WORKING_FOLDER = sys.path.pop(0)

import ctypes  # noqa: E402
import importlib  # noqa: E402
from typing import TYPE_CHECKING  # noqa: E402

if TYPE_CHECKING:  # type checkers do not evaluate __getattr__
    from minivlmrl.losses import parity
    from minivlmrl.losses.advantages import group_advantages
    from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
    from minivlmrl.losses.ppo import ppo_loss
    from minivlmrl.losses.preference import dpo_loss
    from minivlmrl.losses.sft import sft_loss
    from minivlmrl.model.logprobs import per_token_logps

__version__ = "0.4.0"  # pyproject.toml reads this line
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
# public name: module that defines it
MODULES = {
    "LossNormalizer": "minivlmrl.losses.grpo",
    "dpo_loss": "minivlmrl.losses.preference",
    "group_advantages": "minivlmrl.losses.advantages",
    "grpo_loss": "minivlmrl.losses.grpo",
    "per_token_logps": "minivlmrl.model.logprobs",
    "ppo_loss": "minivlmrl.losses.ppo",
    "sft_loss": "minivlmrl.losses.sft",
}

# Threads of GNU OpenMP spin while they wait for each other. With the default spin count, training
# took up to fifteen times as long when other processes used the same cores.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")
# Segments of GPU memory may grow, so that rollouts and steps of different lengths do not fragment
# the memory.
if not os.environ.keys() & {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}:
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
# Keep freed memory in the process. Otherwise glibc returns this memory to the kernel, which must
# clear the pages again for the next step. This took 1 to 4 % of the time of a step.
if os.name == "posix":
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(-1, 2**30)  # M_TRIM_THRESHOLD: bytes of free memory to keep
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are returned at once


def __getattr__(name: str):
    """Import a public name when it is used for the first time."""
    if name == "parity":
        return importlib.import_module("minivlmrl.losses.parity")
    if name not in MODULES:
        raise AttributeError(f"module 'minivlmrl' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
