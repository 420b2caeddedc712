"""Test `minivlmrl parity my_loss.py:my_loss` without --only: right losses pass, and wrong ones are named."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, logsigmoid, softplus

from minivlmrl.extras.parity import command, judge
from minivlmrl.extras.parity.binding import load_method
from tests.extras.parity.test_loss import k3, margins, row_mean, row_means


def dapo(batch, options, low=None, kl=lambda d: k3(-d), divisor=None, cap=torch.inf):
    """Compute DAPO as in its paper, with changes; kl=None leaves out the reference."""
    ratio, A = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp(), batch["advantages"][:, None]
    low, A = 1 - options["epsilon_low"] if low is None else low, A.clamp(-cap, cap)
    terms = -torch.min(ratio * A, ratio.clamp(low, 1 + options["epsilon_high"]) * A)
    if kl:
        terms = terms + options["beta"] * kl(batch["per_token_logps"] - batch["ref_per_token_logps"])
    return (terms * batch["mask"]).sum() / (divisor or options["tokens"])


def local(batch, options):
    return dapo(batch, options, divisor=batch["mask"].sum().clamp(min=1))


def dapo_local(batch, options):
    return local(batch, options)


def gspo(batch, options, mean=row_means):
    ratio = mean(batch["per_token_logps"] - batch["old_per_token_logps"], batch["mask"]).exp()
    A = batch["advantages"][:, None]
    terms = -torch.min(ratio * A, ratio.clamp(1 - options["epsilon_low"], 1 + options["epsilon_high"]) * A)
    return row_mean(terms + 0 * batch["mask"], batch["mask"])


def gspo_by_token(batch, options):
    return gspo(batch, options, lambda x, mask: x)


def robust(batch, options):
    z, e = options["beta"] * margins(batch), options["label_smoothing"]
    return ((1 - e) * softplus(-z) - e * softplus(z)).mean() / (1 - 2 * e)


def namespace(batch, options):
    return dapo(batch, vars(SimpleNamespace(**options)))


def keywords(batch, **options):
    return dapo(batch, options)


def of_recipe(logps, advantages, mask, *, old_per_token_logps, **options):
    batch = {
        "per_token_logps": logps,
        "advantages": advantages,
        "mask": mask,
        "old_per_token_logps": old_per_token_logps,
    }
    return dapo(batch, options | {"tokens": options["normalizer"].tokens}, kl=None), {}


def sapo(batch, options, taus=None):
    A = batch["advantages"][:, None]
    taus = taus or (options["sapo_temperature_pos"], options["sapo_temperature_neg"])
    tau = torch.where(A > 0, *taus)
    ratio = (batch["per_token_logps"] - batch["old_per_token_logps"]).exp()
    return row_mean(-4 / tau * (tau * (ratio - 1)).sigmoid() * A, batch["mask"])


def nll(batch, _):
    return -(batch["per_token_logps"] * batch["mask"]).sum() / batch["mask"].sum()


def ipo(batch, options, side=lambda x: x):
    log_ratio = batch["per_token_logps"] - batch["ref_per_token_logps"]
    means = (log_ratio * batch["mask"]).sum(-1) / batch["mask"].sum(-1)
    return side(1 / (2 * options["beta"]) - (means[:, 0] - means[:, 1])).square().mean()


def reference_averaged(batch, options):
    mask = batch["mask"]
    ref = (batch["ref_per_token_logps"] * mask).sum(-1) / mask.sum(-1)
    s = (batch["per_token_logps"] * mask).sum(-1) - ref
    return -logsigmoid(options["beta"] * (s[:, 0] - s[:, 1])).mean()


RIGHT = {
    "DAPO": (dapo, "loss_type=dapo"),
    "DAPO without a KL": (partial(dapo, kl=None), "no KL: neither beta nor the reference changes the loss"),
    "own bounds": (lambda b, o: dapo(b, o | {"epsilon_low": 0.2, "epsilon_high": 0.2}, kl=None),
                   "not read: epsilon_high, epsilon_low; the loss was tested only with its own"),
    "SAPO": (sapo, "loss_type=sapo"),
    "own temperatures": (partial(sapo, taus=(1.0, 1.05)), "not read: sapo_temperature_neg, sapo_temperature_pos"),
    "arguments of a recipe": (of_recipe, "no KL: neither beta nor the reference changes the loss"),
    "keywords": (keywords, "loss_type=dapo"),
    "GSPO without a KL": (gspo, "importance_sampling_level=sequence"),
    "options that become attributes": (namespace, "loss_type=dapo"),
    "a mean of each micro-batch": (local, "note: micro-batches change the gradient"),
    "robust DPO": (robust, "loss_type=robust"),
    "IPO": (ipo, "loss_type=ipo"),
    "SFT": (nll, "loss_type=nll"),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loss_passes(name):
    loss, says = RIGHT[name]
    verdict = judge(loss)
    assert verdict.agrees and says in str(verdict), str(verdict)


WRONG = {
    "a DAPO that is BNPO": (
        dapo_local,
        "mistake: the loss is averaged over the tokens of each micro-batch, as in bnpo",
    ),
    "a GSPO that is GRPO": (gspo_by_token, "mistake: each token has its own ratio"),
    "a lower bound of 0.8": (partial(dapo, low=0.8), "mistake: epsilon_low is 0.2"),
    "an upper bound of 1.28": (
        lambda b, o: dapo(b, o | {"epsilon_high": 0.28}, kl=None),
        "more\nmistake: epsilon_high is 0.28\n",
    ),
    "advantages up to 5": (partial(dapo, cap=5.0), "mistake: an advantage is clamped to -5 and 5"),
    "a KL without a gradient": (partial(dapo, kl=lambda d: k3(-d).detach()), "mistake: the KL is detached"),
    "a KL that never acts": (
        partial(dapo, kl=lambda d: 0 * d),
        "mistake: the KL never acts: beta is read, but changes",
    ),
    "a fixed weight of the KL": (lambda b, o: dapo(b, o | {"beta": 0.04}), "mistake: beta is 0.04"),
    "k1": (partial(dapo, kl=lambda d: d), "broken law: the KL's expected gradient is 0"),
    "IPO on one side": (partial(ipo, side=torch.relu), "broken law: the loss does not pull the margin back"),
    "a fixed beta": (lambda batch, _: softplus(-0.3 * margins(batch)).mean(), "mistake: beta is 0.3"),
    "one mean": (reference_averaged, "mistake: only the reference's log-probability is averaged over tokens"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loss_fails_with_its_mistake(name):
    loss, says = WRONG[name]
    verdict = judge(loss)
    assert not verdict.passes and says in str(verdict), str(verdict)


def test_a_loss_per_token_is_not_averaged():
    def loss(batch, options):
        return batch["per_token_logps"] * batch["advantages"][:, None]

    with pytest.raises(ValueError, match=r"the loss is not averaged: my_loss returned a tensor of shape \(16, 6\)"):
        judge(loss)


# losses as other projects write them


def compute_policy_loss(old_log_prob, log_prob, advantages, response_mask, cliprange_low, cliprange_high, dual=3.0):
    """Compute verl's loss: clipped log-ratios, and a dual clip."""
    ratio = (log_prob - old_log_prob).clamp(-20, 20).exp()
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange_low, 1 + cliprange_high))
    loss = loss.minimum(-advantages * dual).where(advantages < 0, loss)
    return (loss * response_mask).sum() / response_mask.sum(), 0.0


class PolicyLoss(torch.nn.Module):
    """OpenRLHF's class."""

    def __init__(self, clip_eps_low=0.2, clip_eps_high=0.2):
        super().__init__()
        self.bounds = 1 - clip_eps_low, 1 + clip_eps_high

    def forward(self, log_probs, old_log_probs, advantages, action_mask):
        ratio = (log_probs - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(*self.bounds) * advantages)
        return (loss * action_mask).sum() / action_mask.sum()


class Trainer:
    """A trainer whose constructor needs a model."""

    def __init__(self, model):
        self.model = model

    def policy_loss(self, batch, options):
        return dapo(batch, options)

    def dpo_loss(self, policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps):
        margin = policy_chosen_logps - policy_rejected_logps - reference_chosen_logps + reference_rejected_logps
        return -logsigmoid(self.args.beta * margin).mean(), 0, 0


def absolute_bounds(logps, old_logps, advantages, mask, clip_min=0.8, clip_max=1.2):
    ratio = (logps - old_logps).exp()
    return (-torch.min(ratio * advantages, ratio.clamp(clip_min, clip_max) * advantages) * mask).sum() / mask.sum()


def compute_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs.logits[:, :-1], labels[:, 1:]
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


def fused(_input, lin_weight, selected_token_ids, attention_mask, advantages, old_per_token_logps):
    """Compute a loss of hidden states, with the arguments of Liger-Kernel."""
    logps = (_input @ lin_weight.T).log_softmax(-1).gather(2, selected_token_ids[..., None])[..., 0]
    return absolute_bounds(logps, old_per_token_logps, advantages[:, None], attention_mask)


def of_tokens(chosen_logps, rejected_logps, ref_chosen_logps, ref_rejected_logps, chosen_mask, rejected_mask, beta):
    chosen = ((chosen_logps - ref_chosen_logps) * chosen_mask).sum(-1)
    return -logsigmoid(beta * (chosen - ((rejected_logps - ref_rejected_logps) * rejected_mask).sum(-1))).mean()


def only_a_batch(batch):
    return dapo(batch, {"epsilon_low": 0.2, "epsilon_high": 0.2}, kl=None, divisor=batch["mask"].sum())


STYLES = [compute_policy_loss, PolicyLoss, load_method(Trainer, "dpo_loss"), absolute_bounds, compute_loss, fused]
STYLES += [load_method(Trainer, "policy_loss")]


@pytest.mark.parametrize(
    "loss", [*STYLES, of_tokens, only_a_batch], ids=lambda loss: getattr(loss, "__name__", str(loss))
)
def test_losses_of_other_projects_need_no_adapter(loss):
    assert judge(loss).passes, str(judge(loss))


def test_an_argument_that_cannot_be_bound_is_named():
    with pytest.raises(ValueError, match="the argument 'gizmo' of my_loss could not be bound, because its name is"):
        judge(lambda log_probs, old_log_probs, advantages, mask, gizmo: log_probs.sum())


def test_the_command_takes_methods_and_passes_designs(tmp_path, capsys):
    (tmp_path / "my_loss.py").write_text(
        "class Mine:\n"
        "    def loss(self, log_probs, old_log_probs, advantages, mask):\n"
        "        ratio = (log_probs - old_log_probs).exp()\n"
        "        clipped = ratio.clamp(1 - self.epsilon, 1 + self.epsilon)\n"
        "        return -((ratio * advantages).minimum(clipped * advantages) * mask).sum() / mask.sum()\n"
    )
    assert command.main([f"{tmp_path}/my_loss.py:Mine.loss"]) == 0
    assert "design: ratios are clipped with epsilon_low on both sides" in capsys.readouterr().out
