"""Check docs/from_the_articles.md: its functions equal those of the package, and the names in its tables exist."""

import re
from pathlib import Path

import pytest
import torch
from links import ROOT, missing

from minivlmrl.config.loading import load_config
from minivlmrl.config.parsing import options_of
from minivlmrl.data.boxes import Box, iou
from minivlmrl.data.image import smart_resize
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.losses.advantages import group_advantages
from minivlmrl.losses.grpo import grpo_loss, importance_ratio
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from minivlmrl.losses.preference import dpo_loss
from minivlmrl.losses.sft import sft_loss
from minivlmrl.rewards.text import tag_format
from minivlmrl.trainers.base import loss_arguments

PAGE = (ROOT / "docs" / "from_the_articles.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
B, G, T = 12, 4, 7


@pytest.fixture(scope="module")
def page():
    """A function that takes a name and returns the function with this name on the page."""
    space = {}
    for block in BLOCKS:
        exec(block, space)
    return space.__getitem__


@pytest.fixture
def random():
    """A function that returns float64 standard normal numbers of a shape, which are equal in every run."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, scale=1.0):
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return draw


@pytest.fixture
def completions(random):
    """Values of B completions with 1 to T tokens: log-probabilities of three models, advantages and mask.

    The models are the policy, an older policy and a reference.
    """
    lengths = torch.arange(B) % T + 1
    mask = (torch.arange(T) < lengths[:, None]).double()
    logps = -random(B, T).abs()
    return logps, logps + random(B, T, scale=0.3), logps + random(B, T, scale=0.3), random(B), mask


def same(found, expected):
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-12, atol=1e-12)


def same_with_gradient(function, expected, logps):
    """Assert that two functions of log-probabilities have the same value and the same gradient."""
    results = []
    for loss in (function, expected):
        leaf = logps.clone().requires_grad_()
        value = loss(leaf)
        [gradient] = torch.autograd.grad(value, leaf)
        results.append((value.detach(), gradient))
    same(results[0][0], results[1][0])
    same(results[0][1], results[1][1])


def test_log_probabilities(page, random):
    states, head = random(T, 5), random(9, 5)
    ids = torch.arange(T) % 9
    found = page("token_logps")((states @ head.T)[None], ids[None])
    same(found[0], linear_log_softmax(states[:-1], head, ids[1:])[0])


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages(page, random, scale_rewards):
    rewards = random(B)
    rewards[:G] = 1.0  # a group of equal rewards
    same(page("advantages")(rewards, G, scale_rewards), group_advantages(rewards, G, scale_rewards))


def test_the_loss_of_vlm_r1(page, completions):
    logps, old, ref, advantages, mask = completions
    options = {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}
    assert ((logps - old).exp() - 1).abs().max() > 0.2  # some ratios are clipped
    same_with_gradient(
        lambda x: page("vlm_r1_loss")(x, old, ref, advantages, mask),
        lambda x: grpo_loss(x, advantages, mask, **options, old_per_token_logps=old, ref_per_token_logps=ref)[0],
        logps,
    )


def test_the_loss_of_r1_v(page, completions):
    """The loss equals grpo_loss without an old policy, and VLM-R1's loss with the current policy as the old one."""
    logps, _, ref, advantages, mask = completions
    options = {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False}
    same_with_gradient(
        lambda x: page("r1_v_loss")(x, ref, advantages, mask),
        lambda x: grpo_loss(x, advantages, mask, **options, ref_per_token_logps=ref)[0],
        logps,
    )
    same_with_gradient(
        lambda x: page("r1_v_loss")(x, ref, advantages, mask),
        lambda x: page("vlm_r1_loss")(x, x.detach(), ref, advantages, mask),
        logps,
    )


@pytest.mark.parametrize("source, name", [
    ("vlm_r1_loss", "rec_qwen2_5_vl_3b"), ("vlm_r1_loss", "rec_qwen2_5_vl_3b_one_card"),
    ("vlm_r1_loss", "rec_qwen3_vl_4b_one_card"), ("r1_v_loss", "cls_qwen2_vl_2b"),
])  # fmt: skip
def test_recipes_have_the_loss_of_their_source(page, completions, source, name):
    """The loss that a recipe configures equals its source's, and AdamW has the rates of transformers' Trainer."""
    logps, old, ref, advantages, mask = completions
    config = load_config(f"{name}.yaml").grpo
    options = loss_arguments(config, grpo_loss)
    assert (config.adam_beta2, config.lr_scheduler_type) == (0.999, "linear")
    if source == "vlm_r1_loss":
        same_with_gradient(
            lambda x: page(source)(x, old, ref, advantages, mask),
            lambda x: grpo_loss(x, advantages, mask, **options, old_per_token_logps=old, ref_per_token_logps=ref)[0],
            logps,
        )
    same_with_gradient(
        lambda x: page("r1_v_loss")(x, ref, advantages, mask),
        lambda x: grpo_loss(x, advantages, mask, **options, ref_per_token_logps=ref)[0],
        logps,
    )


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_the_loss_of_trl(page, completions, beta):
    logps, old, ref, advantages, mask = completions
    options = {"beta": beta}
    same_with_gradient(
        lambda x: page("trl_loss")(x, old, ref, advantages, mask, beta),
        lambda x: grpo_loss(x, advantages, mask, **options, old_per_token_logps=old, ref_per_token_logps=ref)[0],
        logps,
    )


def test_the_ratio_of_a_row(page, completions):
    logps, old, _, _, mask = completions
    same(page("sequence_ratio")(logps, old, mask), importance_ratio(logps - old, mask, "sequence"))


@pytest.mark.parametrize("reference_free", [False, True])
def test_the_loss_of_dpo(page, completions, reference_free):
    logps, _, ref, _, mask = (x.unflatten(0, (-1, 2)) for x in completions)
    ref = torch.zeros_like(ref) if reference_free else ref
    ref_sums = (ref * mask).sum(-1).unbind(1)

    def of_page(x):
        sums = (x * mask).sum(-1).unbind(1)
        if reference_free:
            return page("dpo_reference_free")(*sums, beta=0.3)
        return page("dpo_sigmoid")(*sums, *ref_sums, beta=0.3)

    options = {"beta": 0.3}
    same_with_gradient(of_page, lambda x: dpo_loss(x, mask, **options, ref_per_token_logps=ref)[0], logps)


def test_the_loss_of_mpo(page, completions):
    logps, _, ref, _, mask = (x.unflatten(0, (-1, 2)) for x in completions)
    options = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}
    same_with_gradient(
        lambda x: page("mpo")(x, ref, mask), lambda x: dpo_loss(x, mask, **options, ref_per_token_logps=ref)[0], logps
    )


def test_the_loss_of_sft(page, completions):
    logps, _, _, _, mask = completions
    same_with_gradient(lambda x: page("nll")(x, mask), lambda x: sft_loss(x, mask), logps)


def test_ppo(page, completions, random):
    logps, old, ref, _, mask = completions
    scores, old_values = random(B), random(B, T) * mask
    rewards = page("ppo_rewards")(scores, old, ref, mask)
    same(rewards, token_rewards(scores, old, ref, mask))
    for gamma, lam in ((1.0, 0.95), (0.9, 0.5)):
        advantages, returns = page("gae_by_definition")(rewards, old_values, gamma, lam)
        for found, expected in zip((advantages, returns), gae(rewards, old_values, gamma, lam), strict=True):
            same(found * mask, expected * mask)
    white = page("whitened")(advantages, mask)
    same(white, whiten([advantages], [mask])[0])
    values = old_values + random(B, T, scale=0.3)
    fixed = {"old_per_token_logps": old, "old_values": old_values, "advantages": white, "returns": returns}
    for moved, loss_of in (
        (logps, lambda loss: lambda x: loss(x, values)),
        (values, lambda loss: lambda x: loss(logps, x)),
    ):
        same_with_gradient(
            loss_of(lambda p, v: page("ppo")(p, old, v, old_values, white, returns, mask)),
            loss_of(lambda p, v: ppo_loss(p, v, mask, **fixed)[0]),
            moved,
        )


def test_boxes(page):
    """VLM-R1's IoU equals ours, unless the overlap is at most one pixel wide or high."""
    generator = torch.Generator().manual_seed(0)
    small = 0
    for numbers in torch.rand(300, 8, generator=generator, dtype=torch.float64).mul(20).tolist():
        pair = []
        for x1, y1, width, height in (numbers[:4], numbers[4:]):
            pair.append((x1, y1, x1 + width, y1 + height))
        a, b = pair
        expected = iou(Box(*a, (50, 50)), Box(*b, (50, 50)))
        assert page("box_iou")(a, b) == pytest.approx(expected, rel=1e-12)
        theirs = page("box_iou")(a, b, smallest_overlap=1)
        assert theirs in (0.0, page("box_iou")(a, b))
        small += theirs == 0 and expected > 0
        scaled = page("to_file_pixels")(a, (50, 50), (640, 480))
        assert scaled == pytest.approx(Box(*a, (50, 50)).to((640, 480)).numbers, rel=1e-12)
    assert small > 5
    assert page("box_iou")((0, 0, 5, 5), (4, 0, 9, 5), smallest_overlap=1) == 0  # the boxes share one column of pixels
    unit = (0.1, 0.1, 0.9, 0.9)
    assert page("box_iou")(unit, unit, smallest_overlap=1) == 0 and page("box_iou")(unit, unit) == 1


def test_the_format_reward(page):
    """Both format rewards of each completion in the table are as the table says."""
    table = PAGE.split("### The format reward")[1].split("\n### ")[0]
    rows = re.findall(r"(?m)^\| `(.+)` \| ([01]) \| ([01]) \|$", table)
    assert len(rows) == 6
    for text, theirs, ours in rows:
        assert page("has_tags")(text) == float(theirs), text
        assert tag_format([text]) == [float(ours)], text
    over_lines = "<think>a\nb</think>\n<answer>\nc</answer>"
    assert page("has_tags")(over_lines) == 1 and tag_format([over_lines]) == [1]
    assert page("has_tags")(" " + over_lines) == 0 and tag_format([" " + over_lines]) == [1]


def test_image_sizes(page):
    generator = torch.Generator().manual_seed(0)
    sizes = [
        *torch.randint(10, 6000, (400, 2), generator=generator).tolist(),
        [1092, 1568],
        [20, 30],
        [28, 28],
        [30, 5900],
    ]
    for height, width in sizes:
        if max(height, width) > 200 * min(height, width):
            continue
        for bounds in ((3136, 12845056), (3136, 1003520), (200704, 401408), (3136, 12544)):
            assert page("resized")(height, width, 28, *bounds) == smart_resize(height, width, 28, *bounds)


def test_every_function_of_the_page_is_tested():
    defined = set(re.findall(r"(?m)^def (\w+)", "\n".join(BLOCKS)))
    assert len(defined) > 15 and defined == set(re.findall(r'page\("(\w+)"\)', Path(__file__).read_text()))


def test_options_and_functions_exist():
    """Names such as `section.option` in a table are options, and a link with code as its text leads to a definition."""
    known = {option.path for option in options_of(type(load_config("shapes.yaml")))}
    sections = {path.partition(".")[0] for path in known if "." in path}
    named = set(re.findall(r"`(\w+\.\w+)`", PAGE)) | set(re.findall(r"`(\w+\.\w+): [^`]+`", PAGE))
    ours = {name for name in named if name.partition(".")[0] in sections}
    assert len(ours) > 25 and ours <= known
    assert missing(ROOT / "docs" / "from_the_articles.md") == []


@pytest.mark.parametrize("title", ["TRL: GRPO", "TRL: DPO and MPO", "TRL: SFT"])
def test_functions_of_trl_are_trls(title):
    """The functions exist in the installed TRL, except in rows that mention older releases."""
    trl = pytest.importorskip("trl", reason="oracle missing: pip install trl==1.16.0 transformers==5.23.0")
    source = "\n".join(path.read_text() for path in Path(trl.__file__).parent.rglob("*.py"))
    table = PAGE.split(f"## {title}\n")[1].split("\n## ")[0]
    firsts = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    names = {name for cell in firsts if "releases" not in cell for name in re.findall(r"`(\w+)`", cell)}
    assert len(names) > 5 and {name for name in names if name not in source} == set()
