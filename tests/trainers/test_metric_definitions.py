"""Compare a step's metrics with TRL's definitions by hand, for several splits of the step into micro-batches."""

import pytest
import torch

from minivlmrl.model.logprobs import per_token_logps
from tests.helpers.links import ROOT
from tests.helpers.stages import Stage
from tests.trainers.test_invariance import Ragged

pytestmark = pytest.mark.usefixtures("varied_rollouts")

KTO = f"{ROOT}/recipes/kto.py:KTO"
CHOSEN, REJECTED, GOOD, BAD = slice(0, None, 2), slice(1, None, 2), "good", "bad"


def answers(run, where=slice(None)):
    """Return, for each selected answer of the step, its tokens' (policy - reference, log-probability, entropy)."""
    found = []
    for batch in run.step.micro_batches:
        with torch.no_grad():
            logps, entropies = per_token_logps(run.model, batch.group)
        ref = torch.zeros_like(batch.loss_mask) if run.trainer.reference is None else batch.ref_per_token_logps
        padded, mask = batch.group.pad(logps), batch.loss_mask.bool()
        columns = torch.stack([padded - ref, padded, batch.group.pad(entropies)], -1)
        where_here = batch.labels == (where == GOOD) if where in (GOOD, BAD) else where
        found += [columns[row][mask[row]] for row in torch.arange(len(mask))[where_here]]
    return found


def entropy(run):
    """Mean over all tokens of the step that are trained on, not a mean of the answers' means."""
    return torch.cat(answers(run))[:, 2].mean()


def reward(where):
    """Mean of 0.1 times the log-ratio of an answer, over the selected answers."""
    return lambda run: 0.1 * torch.stack([answer[:, 0].sum() for answer in answers(run, where)]).mean()


def logp(where):
    return lambda run: torch.stack([answer[:, 1].sum() for answer in answers(run, where)]).mean()


def k3(run):
    """Mean over the tokens of pi_ref / pi - log(pi_ref / pi) - 1; in the first step of a rollout, the ratio is 1."""
    d = -torch.cat(answers(run))[:, 0]
    return (d.expm1() - d).mean()


METRICS = [
    ("sft", "entropy", entropy), ("dpo", "entropy", entropy), (KTO, "entropy", entropy), ("grpo", "entropy", entropy),
    ("dpo", "rewards/chosen", reward(CHOSEN)), ("dpo", "rewards/rejected", reward(REJECTED)),
    ("dpo", "rewards/margins", lambda run: reward(CHOSEN)(run) - reward(REJECTED)(run)),
    ("dpo", "logps/chosen", logp(CHOSEN)), ("dpo", "logps/rejected", logp(REJECTED)),
    (KTO, "rewards/chosen", reward(GOOD)), (KTO, "rewards/rejected", reward(BAD)),
    ("grpo", "kl", k3),
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("stage", ["sft", "dpo", KTO, "grpo"])
def test_metrics_are_those_of_trl_however_the_step_is_split(folder, stage, size):
    """In the second step, policy and reference differ."""
    name = "kto" if stage == KTO else stage
    size = max(size, 2) if stage == KTO else size  # the KL needs an answer from another row
    options = {"micro_batch_size": size, "max_steps": 2, "learning_rate": 0.01}
    options |= {"beta": 0.1} if stage == "grpo" else {}
    run = Stage(folder, stage, *(f"--{name}.{key}={value}" for key, value in options.items()), rows=Ragged(8, "rows"))
    run.go()
    run.next()
    defined = {metric: definition(run).item() for owner, metric, definition in METRICS if owner == stage}
    assert all(abs(value) > 1e-6 for value in defined.values())
    line = run.update()
    assert {metric: line[metric] for metric in defined} == pytest.approx(defined, rel=1e-6)
