"""Check docs/coming_from.md: functions exist, and losses, boxes and formats of the sources are as the page says."""

import re
from pathlib import Path

import pytest
import torch
from links import ROOT, missing

from minivlmrl.config.loading import load_config
from minivlmrl.config.parsing import options_of
from minivlmrl.data.boxes import Box, iou
from minivlmrl.losses.grpo import grpo_loss
from minivlmrl.rewards.text import tag_format
from minivlmrl.trainers.base import loss_arguments

PAGE = (ROOT / "docs" / "coming_from.md").read_text()
B, T = 12, 7


def vlm_r1_loss(logps, old_logps, ref_logps, advantages, mask):
    """Return VLM-R1's loss: clipped ratios, 0.04 times k3, and the mean over each completion and then over all."""
    ratio = (logps - old_logps).exp()
    gain = (ratio * advantages[:, None]).minimum(ratio.clamp(0.8, 1.2) * advantages[:, None])
    difference = ref_logps - logps
    terms = 0.04 * (difference.exp() - difference - 1) - gain
    return ((terms * mask).sum(1) / mask.sum(1)).mean()


def r1_v_loss(logps, ref_logps, advantages, mask):
    """Return R1-V's loss, whose ratio is 1 with a gradient because a rollout serves one update."""
    ratio = (logps - logps.detach()).exp()
    difference = ref_logps - logps
    terms = 0.04 * (difference.exp() - difference - 1) - ratio * advantages[:, None]
    return ((terms * mask).sum(1) / mask.sum(1)).mean()


@pytest.fixture
def completions():
    """Log-probabilities of policy, older policy and reference, advantages, and mask of B completions."""
    generator = torch.Generator().manual_seed(0)
    logps, old, ref = torch.randn(3, B, T, generator=generator, dtype=torch.float64)
    logps = -logps.abs()
    advantages = torch.randn(B, generator=generator, dtype=torch.float64)
    mask = (torch.arange(T) < (torch.arange(B) % T + 1)[:, None]).double()
    return logps, logps + 0.3 * old, logps + 0.3 * ref, advantages, mask


def same_with_gradient(function, expected, logps):
    """Assert that two functions of log-probabilities have the same value and the same gradient."""
    results = []
    for loss in (function, expected):
        leaf = logps.clone().requires_grad_()
        value = loss(leaf)
        results.append((value.detach(), *torch.autograd.grad(value, leaf)))
    for found, target in zip(*results, strict=True):
        torch.testing.assert_close(found, target, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("source, name", [
    ("vlm_r1", "rec_qwen2_5_vl_3b"), ("vlm_r1", "rec_qwen2_5_vl_3b_one_card"),
    ("vlm_r1", "rec_qwen3_vl_4b_one_card"), ("r1_v", "cls_qwen2_vl_2b"),
])  # fmt: skip
def test_recipes_have_the_loss_of_their_source(completions, source, name):
    """The loss that a recipe configures equals its source's, and AdamW has the rates of transformers' Trainer."""
    logps, old, ref, advantages, mask = completions
    config = load_config(f"{name}.yaml").grpo
    options = {**loss_arguments(config, grpo_loss), "ref_per_token_logps": ref}
    assert (config.adam_beta2, config.lr_scheduler_type) == (0.999, "linear")
    assert ((logps - old).exp() - 1).abs().max() > 0.2  # some ratios are clipped
    if source == "vlm_r1":
        same_with_gradient(
            lambda x: vlm_r1_loss(x, old, ref, advantages, mask),
            lambda x: grpo_loss(x, advantages, mask, **options, old_per_token_logps=old)[0],
            logps,
        )
    same_with_gradient(
        lambda x: r1_v_loss(x, ref, advantages, mask), lambda x: grpo_loss(x, advantages, mask, **options)[0], logps
    )
    same_with_gradient(
        lambda x: r1_v_loss(x, ref, advantages, mask),
        lambda x: vlm_r1_loss(x, x.detach(), ref, advantages, mask),
        logps,
    )


def test_boxes():
    """Our IoU is overlap over union, also of boxes that overlap by at most one pixel, where VLM-R1's is 0."""
    for numbers in (torch.rand(300, 8, generator=torch.Generator().manual_seed(0)).double() * 20).tolist():
        a, b = ((x, y, x + width, y + height) for x, y, width, height in (numbers[:4], numbers[4:]))
        width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
        overlap = width * height if min(width, height) > 0 else 0.0
        areas = [(x2 - x1) * (y2 - y1) for x1, y1, x2, y2 in (a, b)]
        assert iou(Box(*a, (50, 50)), Box(*b, (50, 50))) == pytest.approx(overlap / (sum(areas) - overlap), rel=1e-12)
    scales = (640 / 50, 480 / 50) * 2
    assert Box(*a, (50, 50)).to((640, 480)).numbers == pytest.approx([x * s for x, s in zip(a, scales, strict=True)])


def test_the_format_reward():
    """The format reward of VLM-R1 and R1-V also accepts empty and repeated tags."""
    for text, theirs, ours in (
        ("<think>a</think><answer>b</answer>", 1, 1),
        ("<think>a</think> <answer>b</answer>", 1, 1),
        ("<think>a</think><answer>b</answer> c", 0, 0),
        ("<think></think><answer></answer>", 1, 0),
        ("<think>a</think><answer>b</answer><answer>c</answer>", 1, 0),
        ("<think>a<think>b</think><answer>c</answer>", 1, 0),
    ):
        assert bool(re.fullmatch(r"<think>.*</think>\s*<answer>.*</answer>", text, re.DOTALL)) == theirs, text
        assert tag_format([text]) == [ours], text


def test_options_and_functions_exist():
    """Names such as `section.option` are options, and a link with code as its text leads to a definition."""
    known = {option.path for option in options_of(type(load_config("shapes.yaml")))}
    sections = {path.partition(".")[0] for path in known if "." in path}
    tinker = PAGE.split("## From Tinker\n")[1].split("\n## ")[0]  # this section names modules and calls
    named = set(re.findall(r"`(\w+\.\w+)`", PAGE.replace(tinker, "")))
    ours = {name for name in named if name.partition(".")[0] in sections}
    assert len(ours) > 60 and ours <= known
    assert missing(ROOT / "docs" / "coming_from.md") == []


def test_functions_of_trl_are_trls():
    """The functions in the column of TRL exist in the installed TRL, except in the row of an older release."""
    trl = pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
    source = "\n".join(path.read_text() for path in Path(trl.__file__).parent.rglob("*.py"))
    table = PAGE.split("## Functions of their source\n")[1].split("\n\n")[0]
    cells = [line.split("|")[3] for line in table.splitlines() if line.startswith("| ") and "of 1.12" not in line]
    names = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) > 12 and {name for name in names if name not in source} == set()
