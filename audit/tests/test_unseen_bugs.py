"""Fifteen bugs that were written without looking at the audit's causes: no wrong cause may be printed first.

The audit names thirteen of them, and finds the stage and the wrong numbers of the other two.
"""

import bugs
import pytest
import torch
from bugs import (
    CLIPS,
    DELTA,
    KL,
    KL_TERM,
    MEANS,
    OFF,
    SUM,
    InTRL,
    around,
    change_own_gradients,
    change_param_groups,
    dpo,
    loss,
    score,
)

pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
import trl_fixtures

from minivlmrl_audit.audit import audit, report

DIVIDED = "advantages / (std_rewards + 1e-4)"
LOG_RATIO = "log_ratio = per_token_logps - old_per_token_logps"
SMALLER = "-torch.min(per_token_loss1, per_token_loss2)"


def first_picture(images):
    return images[:1].expand_as(images)


def lose_head(model):
    model.lm_head.weight.grad = None


def clip_each(clip, model):
    """Clip each parameter by its own norm, and return the norm of all."""
    parameters = [p for p in model.parameters() if p.grad is not None]
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters])
    for p in parameters:
        torch.nn.utils.clip_grad_norm_([p], CLIPS["max_grad_norm"])
    return total


def higher_beta1(trainer, groups):
    for group in groups:
        group["betas"] = (0.95, group["betas"][1])


# The second argument is a part of the first printed cause, or "" if no cause may be printed.
BUGS = {
    "half of the mean is subtracted": score(
        "advantages", "the baseline is halved", MEANS, f"{MEANS} / 2",
    ),
    "1 is added to the deviation": score(
        "advantages", "instead of 1e-4 is 1", DIVIDED, DIVIDED.replace("1e-4", "1.0"),
    ),
    # all rewards of a group determine its advantages, so that "rewards" and "advantages" are both right
    "advantages of the next group": score("advantages", "next group", DIVIDED, f"({DIVIDED}).roll(-4, 0)"),
    "absolute KL": loss(
        "", KL_TERM, "per_token_loss + self.beta * (ref_per_token_logps - per_token_logps).abs()",
        KL | {"use_bias_correction_kl": False}, at=1,
    ),
    "first tokens left out": loss("first tokens", SUM, SUM.replace("* mask", "* mask * (mask.cumsum(1) > 1)")),
    "old log-probabilities of the next row": loss("next row", LOG_RATIO, f"{LOG_RATIO}.roll(-1, 0)", OFF, at=1),
    # with a positive advantage, a ratio is only clipped above
    "no clipping for negative advantages": loss(
        "not clipped below", SMALLER, f"torch.where(advantages > 0, {SMALLER}, -per_token_loss1)",
        {**OFF, "learning_rate": 2e-2}, at=1,
    ),
    "no rows with negative advantages": loss("never below 0", SUM, SUM.replace("* mask", "* mask * (advantages > 0)")),
    "first image for all rows": InTRL("logps", "images of the first row", bugs.of_images(first_picture)),
    "dark images": InTRL("logps", "", bugs.of_images(lambda images: images * 0.8)),
    "head not trained": InTRL(
        "gradients", "do not get any gradient", change_own_gradients(lose_head), late=True,
    ),
    "parameters clipped one by one": InTRL(
        "clip", "each parameter is clipped by its own norm", around(None, "_clip_grad_norm", clip_each), CLIPS,
        late=True,
    ),
    "other beta1": InTRL("update", "beta1 is 0.95", change_param_groups(higher_beta1), late=True, at=1),
    "no reference": dpo(
        "the reference is left out", DELTA, f"{DELTA} + (ref_chosen_logps - ref_rejected_logps)",
    ),
    "bits": dpo(
        "bits instead of nats", "-F.logsigmoid(self.beta * delta_score)",
        "-F.logsigmoid(self.beta * delta_score) / 0.6931471805599453",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return trl_fixtures.write_model(tmp_path_factory.mktemp("model"))


@pytest.mark.slow
@pytest.mark.parametrize("name", BUGS)
def test_no_wrong_cause(name, folder, tmp_path, monkeypatch):
    bug = BUGS[name]
    step = trl_fixtures.step_with([bug], folder, tmp_path, monkeypatch.setattr)
    findings = audit(step)
    wrong = [finding for finding in findings if not finding.ok]
    printed = report(findings, step)
    assert wrong[0].stage == bug.stage, printed
    first = [str(cause.says) for cause in wrong[0].explained[:1]]
    assert bool(first) == bool(bug.cause), printed
    assert bug.cause in "".join(first), printed
