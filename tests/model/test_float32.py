"""Compare the float32 operations listed in docs/memory.md with a GRPO step in bfloat16."""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PAGE = Path(__file__).resolve().parents[2] / "docs" / "memory.md"
WIDE = {torch.float32, torch.float64}


class Results(TorchDispatchMode):
    """Record each operation's result dtypes."""

    def __init__(self):
        super().__init__()
        self.dtypes = defaultdict(set)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        found = {x.dtype for x in tree_leaves(result) if isinstance(x, torch.Tensor) and x.is_floating_point()}
        self.dtypes[function._opname] |= found
        return result


def rows():
    """Return (dtype, operations) for each table row that names operations."""
    section = PAGE.read_text().partition("\n## What stays in float32\n")[2].partition("\n## ")[0]
    cells = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")]
    return [(row[1].strip(), re.findall(r"`(\w+)`", row[2])) for row in cells if "`" in row[2]]


def test_the_table_of_float32_operations(stage):
    run = stage("grpo", "--grpo.beta=0.1", dtype=torch.bfloat16)
    with Results() as results:
        [metrics] = run.go(1)
    checked = set()
    for dtype, operations in rows():
        for name in operations:
            assert name in results.dtypes, f"{name} does not run"
            assert results.dtypes[name] <= (WIDE if dtype == "float32" else {torch.bfloat16}), name
            checked.add(name)
    assert len(checked) >= 8
    assert 0 < metrics["rollout/logp_mismatch"] < 0.2  # nats


@pytest.mark.parametrize("name", ["sft", "dpo", "reward_model", "ppo"])
def test_losses_are_float32(stage, name):
    run = stage(name, dtype=torch.bfloat16)
    loss, _ = run.trainer.loss(run.next()[0])
    assert loss.dtype == torch.float32
