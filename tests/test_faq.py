"""What users of TRL, verl and VLM-R1 keep asking: each answer is a test. docs/faq.py makes the page of them."""

import math

import pytest
import torch

from minivlmrl.advantages import combine, group_advantages, group_std
from minivlmrl.batch import pack
from minivlmrl.data.boxes import Box, iou
from minivlmrl.data.video import Video
from minivlmrl.generate import SamplingConfig, chooser
from minivlmrl.image import smart_resize
from minivlmrl.logprobs import per_token_logps
from minivlmrl.losses import Counts, PolicyLoss, correct_kl, grpo_loss, kl_term
from minivlmrl.rope import get_rope_index
from minivlmrl.rows import random_numbers
from minivlmrl.run.config import load_config, recipes_folder
from minivlmrl.scale.checkpoint import random_model
from minivlmrl.tasks.shapes import Shapes, tokenizer

from earnings import earnings

RECIPES = recipes_folder()


def test_zero_loss():
    """Why is my loss 0?

    Advantages of a group add up to 0 and the ratio is 1 until the first update, so the value is 0 whatever the model
    does. Its gradient is not: every token gets minus its advantage over the divisor. Read the rewards and `grad_norm`
    instead. Asked in TRL #2703, #3452, open-r1 #239, unsloth #2291.
    """
    logps = torch.tensor([[0.9], [0.2], [0.4], [0.1]]).log().requires_grad_()
    advantages = group_advantages(torch.tensor([1.0, 1.0, 0.0, 0.0]), 4)
    loss, _ = grpo_loss(logps, advantages, torch.ones(4, 1))
    loss.backward()
    assert loss == 0
    assert torch.equal(logps.grad[:, 0], -advantages / 4)  # -0.2165, -0.2165, 0.2165, 0.2165


def test_negative_loss():
    """Why is my loss negative, or why does it rise?

    With a token mean (`dapo`) a long completion has more terms than a short one, so the value says which was longer:
    the good one (negative) or the bad one (positive). With `grpo` rows weigh the same, and it is 0 again. A KL or a
    second pass adds to it. Asked in ms-swift #3579, open-r1 #239.
    """
    advantages = group_advantages(torch.tensor([1.0, 0.0]), 2)  # 0.707, -0.707
    long_good, long_bad = torch.tensor([[1.0, 1, 1], [1, 0, 0]]), torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    losses = {}
    for loss_type in ("dapo", "grpo"):
        masks = (long_good, long_bad)
        losses[loss_type] = [grpo_loss(torch.zeros(2, 3), advantages, m, PolicyLoss(loss_type))[0] for m in masks]
    assert losses["dapo"] == pytest.approx([-0.3535, 0.3535], abs=1e-4)  # -(3 * 0.707 - 0.707) / 4
    assert losses["grpo"] == pytest.approx([0, 0], abs=1e-6)


def test_divide_by_the_std():
    """Divide by the standard deviation, or not?

    Dividing gives each group the same total weight, G - 1 = 7 in the test: one right answer of eight as much as four,
    and also rewards that differ by a thousandth. Without, a group weighs by the spread of its rewards
    ([bias](bias.md#rewards)). Divide when rare right answers must count, not when small differences of a reward are
    noise (IoU, a judge).
    """
    rare, even = torch.tensor([1.0] + [0.0] * 7), torch.tensor([1.0] * 4 + [0.0] * 4)
    groups = {"1 of 8": rare, "4 of 8": even, "0.500 or 0.501": 0.5 + 0.001 * even}
    for scale, expected in {"group": (7, 7, 5), "none": (0.875, 2, 2e-6)}.items():
        weights = [group_advantages(rewards, 8, scale).square().sum().item() for rewards in groups.values()]
        assert weights == pytest.approx(expected, rel=0.01)


def test_dapo_or_dr_grpo():
    """dapo or dr_grpo, and what is grpo?

    They differ in the divisor. `grpo` divides each row by its own length, so a token of a long completion weighs less
    ([length bias](bias.md#rewards)); `dapo` by the tokens of the step, so a step of short completions has larger
    gradients; `dr_grpo` by a constant, rows times `max_new_tokens`.
    """
    mask, counts = torch.tensor([[1.0, 0, 0], [1, 1, 1]]), Counts(2, 4, max_completion_length=10)
    weights = {}
    for loss_type in ("grpo", "dapo", "dr_grpo"):
        logps = torch.zeros(2, 3, requires_grad=True)
        grpo_loss(logps, torch.ones(2), mask, PolicyLoss(loss_type), counts=counts)[0].backward()
        weights[loss_type] = [-logps.grad[0, 0].item(), -logps.grad[1, 0].item()]  # a token of the short, of the long
    assert weights["grpo"] == pytest.approx([1 / 2, 1 / 6])  # 2 rows, then 1 or 3 tokens
    assert weights["dapo"] == pytest.approx([1 / 4, 1 / 4])  # 4 tokens
    assert weights["dr_grpo"] == pytest.approx([1 / 20, 1 / 20])  # 2 rows of 10


def test_old_or_reference():
    """pi_old or pi_ref?

    `pi_old` is the policy that sampled this rollout: it is in the ratio, and changes with every rollout. `pi_ref` is
    the policy before training: it is in the KL alone, does not move (but with `sync_ref_model`), and with `beta: 0`
    there is none.
    """
    policy, old, ref = (torch.tensor([[p]]).log() for p in (0.6, 0.3, 0.5))
    options = PolicyLoss("grpo", beta=0.1, use_bias_correction_kl=False)
    given = {"old_per_token_logps": old, "ref_per_token_logps": ref}
    loss, metrics = grpo_loss(policy, torch.ones(1), torch.ones(1, 1), options, **given)
    k3 = 0.5 / 0.6 - math.log(0.5 / 0.6) - 1
    assert metrics["clip_ratio/high_mean"] == 1 and metrics["kl"] == pytest.approx(k3, rel=1e-5)
    assert loss == pytest.approx(-1.2 + 0.1 * k3)


def test_always_one():
    """Why is the ratio always 1 and clip_ratio always 0? Where did the importance weights go?

    With one pass over a rollout (`num_iterations: 1`) the policy that is updated is the one that sampled: the ratio is
    exactly 1, with the gradient of REINFORCE. It moves from the second pass on, or when one rollout serves several
    steps. Asked in TRL #3120, #3757, GRPO-Zero #4, minimind #775.
    """
    logps = torch.tensor([[0.5, 0.2]]).log().requires_grad_()
    loss, metrics = grpo_loss(logps, torch.tensor([0.8]), torch.ones(1, 2))
    reinforce = -(0.8 * logps).mean()
    assert metrics["clip_ratio/region_mean"] == 0 and loss != reinforce
    assert torch.equal(torch.autograd.grad(loss, logps)[0], torch.autograd.grad(reinforce, logps)[0])
    later = torch.tensor([[0.7, 0.2]]).log()  # the second pass: 0.7 / 0.5 = 1.4 is over 1.2
    _, metrics = grpo_loss(later, torch.tensor([0.8]), torch.ones(1, 2), old_per_token_logps=logps.detach())
    assert metrics["clip_ratio/high_mean"] == 0.5


def test_which_kl():
    """Which KL estimator, and why is it negative?

    `k3` with the correction, the default: it is never negative, and its gradient is that of each token's KL. `k1` is
    negative wherever the policy made a token less likely; in the loss it has no gradient on average. If its mean over
    thousands of tokens is negative, they were not drawn by what scores them. [Bias](bias.md#kl-to-the-reference) has
    all of them.
    """
    logits = torch.tensor([1.0, 0.0, -1.0], dtype=torch.float64, requires_grad=True)
    logps, ref = logits.log_softmax(-1), torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    ratio = (logps - logps.detach()).exp()

    def gradient(kl):  # expected over the three tokens that may be drawn
        return torch.autograd.grad((logps.exp().detach() * kl).sum(), logits, retain_graph=True)[0]

    true = torch.autograd.grad((logps.exp() * (logps - ref)).sum(), logits, retain_graph=True)[0]
    k1, k2, k3 = (kl_term(logps, ref, name) for name in ("k1", "k2", "k3"))
    assert k1.min() < 0 < k3.min() and torch.allclose((logps.exp() * k1).sum(), (logps.exp() * k3).sum())  # the KL
    assert gradient(k1).abs().max() < 1e-15 and torch.allclose(gradient(k2), true)
    assert torch.allclose(gradient(correct_kl(k3, ratio, PolicyLoss())), true)
    assert (gradient(k3) - true).abs().max() > 0.2


def test_zero_std():
    """What is a group with zero std, and how many are there?

    All its completions earned the same, so every advantage is 0. With 0 and 1 as rewards and a share p of right
    answers, p^G + (1 - p)^G of the groups are such: `frac_reward_zero_std`. More completions, other prompts or
    `max_num_gen_batches` help. Asked in TRL #4764, #3857.
    """
    rewards = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0])
    assert group_std(rewards, 4)[0] == 0 and group_std(rewards, 4)[1] > 0
    assert group_advantages(rewards, 4)[:4].tolist() == [0, 0, 0, 0]
    shares = {}
    for G in (2, 8):  # 1000 groups with p = 0.18
        drawn = torch.from_numpy(random_numbers("zero std").random((1000, G)) < 0.18).float()
        shares[G] = (group_std(drawn.flatten(), G) == 0).float().mean().item()
    assert shares == {2: pytest.approx(0.18**2 + 0.82**2, abs=0.03), 8: pytest.approx(0.18**8 + 0.82**8, abs=0.03)}


def test_batch_size():
    """What does batch size mean here?

    `prompts_per_step` counts prompts, and each gets `num_generations` completions: 16 prompts times 8 are 128 rows in
    an update. In TRL these 128 are `per_device_train_batch_size` times devices times accumulation steps.
    `micro_batch_size`, in prompts, is about memory alone. Asked in TRL #3020, #3061, #3204, unsloth #1796.
    """
    grpo = load_config(RECIPES / "shapes.yaml").grpo
    assert (grpo.prompts_per_step, grpo.num_generations, grpo.micro_batch_size) == (16, 8, 16)
    assert grpo.prompts_per_step * grpo.num_generations == 128


def test_gradient_accumulation():
    """Does the micro-batch size, or gradient accumulation, change the result?

    Not here: each micro-batch divides by the counts of the whole step, so their gradients add up to it. A trainer that
    averages micro-batches lets the token of a short one weigh more, in the test twice as much. Asked in TRL #3021,
    ms-swift #10117.
    """
    advantages, mask = torch.tensor([1.0, -1.0]), torch.tensor([[1.0, 0, 0], [1, 1, 1]])

    def gradient(rows, counts):
        logps = torch.zeros(len(rows), 3, requires_grad=True)
        grpo_loss(logps, advantages[rows], mask[rows], PolicyLoss("dapo"), counts=counts)[0].backward()
        return logps.grad

    whole, step = gradient([0, 1], None), Counts(sequences=2, tokens=4)
    assert torch.equal(torch.cat([gradient([0], step), gradient([1], step)]), whole)  # -1/4 | 1/4 1/4 1/4
    averaged = torch.cat([gradient([0], None), gradient([1], None)]) / 2
    assert averaged[0, 0] == -1 / 2 and averaged[1, 0] == pytest.approx(1 / 6)


def test_temperature():
    """Why must log-probabilities be taken at the temperature of the draws?

    Sampling at temperature 0.7 draws from softmax(logits / 0.7), the policy which is trained. Scored at 1, the ratio is
    not 1 before any update, and the clip cuts good tokens. All scores here use `sampling.temperature`. Asked in TRL
    #3169; missing there until #3029.
    """
    logits, rows = torch.tensor([[2.0, 1.0, 0.0]]), torch.arange(1)
    likeliest = lambda probs, rows, step: probs.argmax(-1)  # noqa: E731
    ids, drawn, _ = chooser(SamplingConfig(temperature=0.7), stop=[], draw=likeliest)(logits, rows, 0)
    ratios = {T: ((logits / T).log_softmax(-1)[rows, ids] - drawn).exp().item() for T in (0.7, 1.0)}
    assert ratios == {0.7: pytest.approx(1.0), 1.0: pytest.approx(0.8629, abs=1e-4)}


def test_the_end_token():
    """Which tokens are trained on? Is the end of turn one of them?

    Those that the model drew, with the `<|im_end|>` that ended them: without it a model never learns to stop. What
    counts is where a completion ends, not what an id is, so an end token that is also the padding token is not lost.
    Asked in TRL #6357, unsloth-zoo #832.
    """
    model, processor = random_model(RECIPES / "shapes_model.json", tokenizer(), seed=0)
    prompt = Shapes(1, "faq")[0].prompt(processor)
    ended = torch.tensor([*processor.tokenizer.encode("red square"), processor.tokenizer.special_tokens["<|im_end|>"]])
    batch = pack([prompt], [[ended, ended[:1]]], model.config)
    assert batch.completion_ids.tolist() == [*ended.tolist(), ended[0].item()]
    assert batch.completion_mask.tolist() == [[1] * len(ended), [1] + [0] * (len(ended) - 1)]


def test_image_tokens():
    """What does "image features and image tokens do not match" mean?

    A prompt has one `<|image_pad|>` for each 2 x 2 patches, and a maximum prompt length cut some of them away. Nothing
    is cut here, and a prompt that lacks tokens is refused. Make images smaller instead (`max_pixels`). Asked in
    verl #3469, EasyR1 #267, TRL #5285.
    """
    model, processor = random_model(RECIPES / "shapes_model.json", tokenizer(), seed=0)
    prompt = Shapes(1, "faq")[0].prompt(processor)
    (t, h, w), pads = prompt.image_grid_thw[0].tolist(), prompt.input_ids == model.config.image_token_id
    assert pads.sum() == t * h * w // 4 == 16  # 56 x 56 pixels are 8 x 8 of this model's patches
    cut = prompt.input_ids[pads.nonzero()[1, 0] :]  # what keeping the last tokens leaves
    with pytest.raises(ValueError, match="input_ids lack the 16 image or video tokens"):
        get_rope_index(cut, prompt.image_grid_thw, model.config)


def test_shifted_boxes():
    """Why do boxes come out shifted?

    Qwen2.5-VL writes pixels of the image as it was resized for it, your file is in pixels of the original. In the
    test a model that is exactly right gets an IoU of 0.08 when nobody converts. `data.box_space` says which space
    an answer has, and rewards convert it; convert in your own evaluation too. Asked in VLM-R1 #198, #226, #254,
    #320.
    """
    height, width = smart_resize(1200, 1600, factor=28, min_pixels=56 * 56, max_pixels=1003520)
    truth = Box(800, 600, 1400, 1100, extent=(1600, 1200))
    said = truth.to((width, height))  # what the model writes: 574, 420, 1004.5, 770
    unconverted = Box(said.x1, said.y1, said.x2, said.y2, extent=truth.extent)
    assert (width, height) == (1148, 840) and iou(said.to(truth.extent), truth) == pytest.approx(1)
    assert iou(unconverted, truth) == pytest.approx(0.084, abs=0.001)


def test_reward_and_accuracy():
    """Why did the reward rise and accuracy not?

    The reward is a weighted sum, and the easiest part rises first, mostly the form. Read `rewards/NAME/mean` of each.
    If each rises and held-out accuracy does not, read completions: the reward pays for something else.
    """
    right, wrong = (f"<think>I see it</think><answer>{label}</answer>" for label in ("red square", "blue square"))
    before, after = [right] * 2 + [wrong] * 2 + ["a square"] * 4, [right] + [wrong] * 7
    means = [
        earnings(["format", "accuracy"], said, {"solution": ["red square"] * 8}).mean(0) for said in (before, after)
    ]
    assert means[0].tolist() == [0.5, 0.25] and means[1].tolist() == [1.0, 0.125]
    rewards = [combine(mean[None], torch.tensor([0.5, 1.0])).item() for mean in means]
    assert rewards == [0.5, 0.625]


def test_the_form():
    """Why does my model stop writing the form, or the thought?

    Because nothing pays for it. With `answer: whole` a bare right answer earns what a thoughtful one does; with
    `tags` it earns nothing, and with the reward `format` less. The other cause is a low `max_new_tokens`, see below.
    Asked in ms-swift #6515, R1-V #19, VLM-R1 #280.
    """
    texts = ["<think>I see red</think><answer>red square</answer>", "red square"]

    def gap(where, weights):
        rewards = earnings(["format", "accuracy"], texts, {"solution": ["red square"] * 2}, where)
        with_form, without = combine(rewards, torch.tensor(weights)).tolist()
        return with_form - without

    assert gap("whole", [0.0, 1.0]) == 0
    assert gap("whole", [0.5, 1.0]) == 0.5 and gap("tags", [0.0, 1.0]) == 1 and gap("tags", [0.5, 1.0]) == 1.5


def test_cut_completions():
    """Why is the reward 0, and every completion as long as allowed?

    They are cut before the answer. A text without its closing tag has neither form nor answer, so all rewards are 0 and
    nothing is learned. Raise `max_new_tokens` until `completions/clipped_ratio` is below 0.1, or begin with SFT on
    short thoughts. Asked in TRL #5697.
    """
    answer = "<think>It has four sides and it is red</think><answer>red square</answer>"
    cut = [answer[:length] for length in (20, 40, 60, 69)]  # 69 of 73 characters
    rewards = earnings(["format", "accuracy"], [*cut, answer], {"solution": ["red square"] * 5})
    assert rewards.tolist() == [[0, 0]] * 4 + [[1, 1]]
    assert group_advantages(rewards[:4].sum(1), 4).tolist() == [0, 0, 0, 0]


def test_what_trl_lacks():
    """What is here that TRL lacks?

    GRPO on videos: TRL 1.16 reads the columns `image` and `images` alone (TRL #4144, #5373). And packing without
    padding for rows with pictures, which it refuses (TRL #4339). Here a prompt with a video and one with a picture lie
    end to end in one run.
    """
    model, processor = random_model(RECIPES / "shapes_model.json", tokenizer(), seed=0)
    model.double()
    film = Video([image for row in range(4) for image in Shapes(4, "film")[row].images], fps=2.0)
    asked = [{"role": "user", "content": [{"type": "video"}, {"type": "text", "text": "What is it?"}]}]
    prompts = [processor(asked, videos=[film]), Shapes(1, "faq")[0].prompt(processor)]
    answers = [[torch.tensor([5, 6, 7]), torch.tensor([8])], [torch.tensor([9, 10])] * 2]
    packed = pack(prompts, answers, model.config)
    assert packed.input_ids.numel() == sum(len(p.input_ids) for p in prompts) + 3 + 1 + 2 + 2 - 4  # last ones: no input
    alone = [per_token_logps(model, pack([p], [a], model.config))[0] for p, a in zip(prompts, answers, strict=True)]
    assert torch.allclose(per_token_logps(model, packed)[0], torch.cat(alone), rtol=0, atol=1e-12)
