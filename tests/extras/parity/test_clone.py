"""Test that the losses in a folder of code are found, bound by their names, and judged, without an import."""

import pytest

from minivlmrl.extras.parity.clone import TENSORS, Case, audit_clone, meaning
from minivlmrl.extras.parity.command import main

HELPERS = """
import a_package_that_does_not_exist as missing

EPS = 1e-8
raise RuntimeError("this file was imported")

def masked_mean(x, mask, dim=None):
    return (x * mask).sum(dim) / (mask.sum(dim) + EPS)

@missing.wrapped
def seq_mean(x: missing.Tensor, mask, default=missing.compute()) -> missing.Tensor:
    return masked_mean(x, mask, 1).mean()
"""
LOSSES = """
from typing import Optional

import torch
import theirs.helpers as H
from .helpers import masked_mean

logger = missing_logging.getLogger(__name__)

def kl(log_probs, ref_log_probs):
    d = ref_log_probs - log_probs
    return d.exp() - d - 1

@register("ppo")
def policy_loss(old_log_prob, log_prob, advantages, response_mask, config: Optional[Config] = None, mode="mean"):
    assert isinstance(config, Config)
    logger.info("losses")
    ratio = torch.exp(log_prob - old_log_prob)
    clipped = ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high)
    terms = -torch.min(ratio * advantages, clipped * advantages)
    return H.seq_mean(terms, response_mask), {"ratio": ratio}

def dual_clip_loss(logprobs, old_logprobs, advantages, mask, average: Literal["token", "row"], cliprange=0.2):
    assert average in ("token", "row")
    if average not in ("token", "row"):
        raise ValueError(average)
    ratio = torch.exp(logprobs - old_logprobs)
    terms = -torch.min(ratio * advantages, ratio.clamp(1 - cliprange, 1 + cliprange) * advantages)
    return masked_mean(torch.where(advantages < 0, torch.min(terms, -3 * advantages), terms), mask)

class GRPOLoss(torch.nn.Module):
    def __init__(self, clip_eps_lo, clip_eps_hi, beta, average="rows"):
        raise RuntimeError("objects are made without their constructor")

    def forward(self, log_probs, experience):
        ratio = (log_probs - experience.log_probs_old).exp()
        A = experience.advantages[:, None]
        terms = -torch.min(ratio * A, ratio.clamp(1 - self.clip_eps_lo, 1 + self.clip_eps_hi) * A)
        d = log_probs - experience.log_probs_ref
        terms = terms + self.beta * (d.exp() - d - 1)
        if self.average != "rows":
            raise ValueError(self.average)
        return self.row_mean(terms, experience.action_mask)

    @torch.no_grad()
    def metrics(self, x):
        return x

    def row_mean(self, terms, mask):
        return ((terms * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()

def dpo(policy_chosen_logps, policy_rejected_logps, reference_chosen_logps, reference_rejected_logps, beta):
    logits = (policy_chosen_logps - policy_rejected_logps) - (reference_chosen_logps - reference_rejected_logps)
    return -torch.nn.functional.logsigmoid(beta * logits).mean()

def no_gradient(log_probs, advantages):
    return (log_probs * advantages).detach().sum()

def reads_a_file(log_probs, advantages):
    return open("secret").read() * log_probs

def without_helper(log_probs, advantages, mask):
    return not_in_the_folder(log_probs * advantages)

def compute_advantages(rewards, values):
    return rewards - values
"""
RESULTS = {
    "policy_loss": "agrees: TRL's loss_type=grpo importance_sampling_level=token beta=0.0",
    "dual_clip_loss": "design: ratios are clipped with epsilon_low on both sides; dual clip: with a negative",
    "GRPOLoss.forward": "mistake: policy and reference are swapped in the KL",
    "dpo": "agrees: TRL's loss_type=sigmoid",
    "no_gradient": "not bound: ",
    "reads_a_file": "not bound: ",
    "without_helper": "not bound: UserError: 'not_in_the_folder is not in the folder'",
}


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clone")
    (folder / "theirs").mkdir()
    (folder / "tests").mkdir()
    (folder / "theirs" / "helpers.py").write_text(HELPERS)
    (folder / "theirs" / "losses.py").write_text(LOSSES)
    (folder / "theirs" / "python2.py").write_text("print 'a file of another Python'\n")
    (folder / "tests" / "test_losses.py").write_text(LOSSES)
    return folder


@pytest.mark.parametrize("name", RESULTS)
def test_a_function_is_judged_alone(clone, name):
    [found] = audit_clone(clone, name.rpartition(".")[2])
    where, _, says = str(found).partition(": ")
    assert where.startswith("theirs/losses.py:") and where.endswith(f" {name}")
    assert says.startswith(RESULTS[name])


def test_only_functions_with_the_arguments_of_a_loss_are_candidates(clone):
    assert {str(found).split(":")[1].split()[1] for found in audit_clone(clone, "kl")} == set()
    assert not [*audit_clone(clone, "compute_advantages")]


@pytest.mark.parametrize(("name", "status", "last"), [
    ("dpo", 0, "1 function: 1 agrees"), ("forward", 1, "1 function: 1 mistake"),
    ("no_gradient", 2, "1 function: 1 not bound"),
])  # fmt: skip
def test_the_status_and_the_last_line_of_the_command(clone, name, status, last, capsys):
    assert main([f"{clone}:{name}"]) == status
    assert capsys.readouterr().out.splitlines()[-1] == f"{clone}: {last}"


def test_a_folder_without_losses_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"is not a recorded step, because .* none of its Python files has a function"):
        main([str(tmp_path)])


def test_names_have_meanings():
    expected = {
        "old_log_probs": "old", "rollout_logprobs": "old", "prev_logp": "old", "logp": "logps", "eos_mask": "mask",
        "per_token_logps": "logps", "ref_log_prob": "ref", "advantages": "advantages", "adv": "advantages",
        "reference_chosen_logps": "ref_chosen", "policy_rejected_logps": "rejected", "adv_estimator": None,
        "teacher_logps": None, "log_policy": None, "logger": None,
    }  # fmt: skip
    assert {name: meaning(name, TENSORS) for name in expected} == expected


def test_settings_have_values():
    expected = {
        "clip_ratio_low": 0.1, "eps_clip_high": 0.3, "cliprange": 0.1, "epsilon": 0.1, "kl_coef": 0.04,
        "clip_ratio_c": 3.0, "loss_agg_mode": "token-mean", "verbose": None,
    }  # fmt: skip
    case = Case({}, {"epsilon_low": 0.1, "epsilon_high": 0.3, "beta": 0.04}, "tokens", False)
    assert {name: case.by_name(name) for name in expected} == expected
