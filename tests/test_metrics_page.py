"""docs/metrics.md explains every metric that a run writes."""

import re
from pathlib import Path

from runs import metrics

PAGE = (Path(__file__).parents[1] / "docs" / "metrics.md").read_text()


def explained(name):
    """Whether the page has a name, or what follows its group; a reward's is under NAME."""
    name = re.sub(r"^rewards/(format|accuracy)/", "rewards/NAME/", name)
    return f"`{name}`" in PAGE or f"`{name.partition('/')[2]}`" in PAGE


def test_every_metric_is_explained(run, plain):
    folder = run("--stages=[sft, dpo, kto, reward_model, grpo, ppo]", "--grpo.beta=0.1", "--ppo.kl_coef=0.1")
    names = {name for line in metrics(folder) for name in line} - {"stage", "step"}
    names -= {f"completions/{of}_terminated_length" for of in ("min", "max")}  # `min_...`, `max_...`
    assert len(names) > 30 and {name for name in names if not explained(name)} == set()
