"""Test trajectories of several turns: gradients, context windows, random numbers and rewards."""

import itertools
import re
from dataclasses import replace
from itertools import chain

import PIL.Image
import pytest
import torch

from minivlmrl.config.options import SamplingOptions
from minivlmrl.data.chat_template import ChatTemplate
from minivlmrl.data.image import ImageProcessor
from minivlmrl.data.processor import Processor
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import train_tokenizer
from minivlmrl.extras.agents import tool_sampler
from minivlmrl.extras.agents.environment import environment_reward
from minivlmrl.generation import sampler as sampler_file
from minivlmrl.generation.environments import make_sampler, packed_length, samples_trajectories
from minivlmrl.losses.advantages import leave_one_out
from minivlmrl.losses.grpo import LossNormalizer, grpo_loss
from minivlmrl.model.logprobs import per_token_logps
from minivlmrl.model.packing import pack_turns
from tests.extras.agents import test_tool_sampler as eye
from tests.extras.agents.scripted import model_of, sample_script
from tests.helpers.runs import metrics, summary
from tests.helpers.stages import ONE
from tests.helpers.talk import CHATML, IMAGE_PART, text, user

SHOWN = f"{__name__}:Shown"  # an environment as recipes name it
CLICKS = ["<click>red</click>", "<click>blue</click>"]


def tokenizer():
    trained = train_tokenizer(["click red or blue, well"] * 3, 290)
    trained.backend.add_tokens(CLICKS)
    return trained


PROCESSOR = Processor(tokenizer(), ImageProcessor(min_pixels=28 * 28))
RED, BLUE = (PROCESSOR.tokenizer.backend.token_to_id(call) for call in CLICKS)
[WELL] = PROCESSOR.tokenizer.encode("l")
END = PROCESSOR.tokenizer.special_tokens["<|im_end|>"]


def picture(shade, columns=2):
    return PIL.Image.new("RGB", (28 * columns, 28), (shade, 99, 255 - shade))


class Site:
    """An environment with one page per click; the second click wins if its color is the goal."""

    declare_tools = False

    def reset(self, goal="red", **columns):
        self.goal, self.clicks, self.done, self.earned = goal, [], False, []

    def click(self, color: str) -> list:
        self.clicks.append(color)
        won = len(self.clicks) == 2 and color == self.goal
        self.done = won or len(self.clicks) == 3
        self.earned.append(1.0 if won else 0.25 * (self.clicks == ["red", "blue", "red"]))
        return [f"page {len(self.clicks)}", picture(60 * len(self.clicks), 1 + len(self.clicks))]

    def get_reward(self) -> list:
        return self.earned


class Shown(Site):
    """An environment that shows only the last page and the number of clicks, and returns one number as reward."""

    def get_reward(self):
        return sum(self.earned)

    def observe(self, rounds):
        message, parts = rounds[-1]
        return [user([*parts[1:], text(f"{len(rounds)} {message}")])]


def row(**columns):
    return Row([user([IMAGE_PART, text("Press red.")])], [picture(9)], {"goal": "red"} | columns, where="rows:1")


def play(monkeypatch, scripts, environment="Site", model=None, rows=None, processor=PROCESSOR, **options):
    """Sample with a policy that writes the scripts; return groups, prompts and model."""
    model = model or model_of(processor, dtype=torch.float64)
    where = environment if ":" in environment else f"{__name__}:{environment}"
    options = {"max_new_tokens": 60, "environment": where} | options
    return *sample_script(monkeypatch, scripts, rows or [row()], processor, model, **options), model


# a turn is a click, or a token and a click; a trajectory has up to three turns
TURNS = [(RED,), (WELL, RED), (WELL, BLUE)]
KEPT = {(): (RED, WELL), (WELL,): (RED, BLUE)}  # {ids of a turn so far: ids that the policy may sample next}


def all_trajectories(monkeypatch, goal, history, model):
    """Return each possible trajectory once, for a policy that may sample only some tokens."""
    scripts = [tuple(chain(*turns)) for turns in itertools.product(TURNS, repeat=3)]
    [group], [prompt], _ = play(monkeypatch, scripts, history=history, model=model, rows=[row(goal=goal)])
    found = {}
    for trajectory in group:
        for turn in trajectory.turns:
            ids = turn.ids.tolist()
            kept = [KEPT[tuple(ids[:i])] for i in range(len(ids))]
            turn.sampling_mask = torch.tensor([2] * len(ids)), torch.tensor(kept).flatten()
        found.setdefault(tuple(trajectory.ids.tolist()), trajectory)
    return prompt, list(found.values())


def expected_loss(logps, mask, rewards, probabilities):
    """Return the mean of the loss over all groups of two trajectories, weighted by their probabilities."""

    def loss(pair):
        advantages = leave_one_out(rewards[pair], 2)
        normalizer = LossNormalizer(2, 1, 1)
        return grpo_loss(logps[pair], advantages, mask[pair], loss_type="dr_grpo", normalizer=normalizer)[0]

    pairs = torch.cartesian_prod(*[torch.arange(len(rewards))] * 2)
    return probabilities[pairs].prod(1) @ torch.vmap(loss)(pairs)


def gradient_of(model, scalar):
    gradients = torch.autograd.grad(scalar, list(model.parameters()), retain_graph=True, allow_unused=True)
    return torch.cat([g.flatten() for g in gradients if g is not None])


@pytest.mark.parametrize("history", [1, 2, 3])
def test_the_expected_gradient_is_that_of_the_expected_reward(monkeypatch, history):
    model, truth, loss = model_of(PROCESSOR, dtype=torch.float64), 0.0, 0.0
    for goal in ("red", "blue"):
        prompt, group = all_trajectories(monkeypatch, goal, history, model)
        assert {len(trajectory.turns) for trajectory in group} == {2, 3}
        batch = pack_turns([prompt], [group], model.config)
        logps = batch.pad(per_token_logps(model, batch)[0])
        mask = batch.completion_mask
        assert torch.equal(mask.sum(1).long(), torch.tensor([len(one.ids) for one in group]))
        likely = (logps * mask).sum(1).exp()
        assert abs(likely.sum().item() - 1) < 1e-12
        environments = [one.tool_use.environment for one in group]
        rewards = environment_reward(environments, [["?"] * len(one.turns) for one in group])
        rewards = torch.tensor(rewards, dtype=torch.float64)
        truth = truth + (likely * rewards).sum()
        loss = loss - expected_loss(logps, mask, rewards, likely.detach())
    exact = gradient_of(model, truth)
    assert exact.norm() > 0 and (gradient_of(model, loss) - exact).norm() < 1e-9 * exact.norm()


@pytest.mark.parametrize("name", ["site", "tools"])
@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_windows_of_all_rounds_compute_what_a_growing_completion_does(monkeypatch, name, model_type):
    task = TASKS[name]()
    model = model_of(task["processor"], model_type, torch.float64)
    found = []
    for history in (None, 99):
        groups, prompts, _ = play(monkeypatch, **task, history=history, model=model, max_new_tokens=400)
        batch = pack_turns(prompts, groups, model.config)
        logps, mask = batch.pad(per_token_logps(model, batch)[0]), batch.completion_mask
        drawn = [logps[i][mask[i] > 0] for i in range(len(mask))]
        sampled = [c.logps[c.policy_mask] for c in chain(*groups)]
        assert all((a - b).abs().max() < 1e-5 for a, b in zip(drawn, sampled, strict=True))
        generator = torch.Generator().manual_seed(0)
        noise = [0.2 * torch.randn(len(x), generator=generator, dtype=torch.float64) for x in drawn]
        old = torch.zeros_like(logps).masked_scatter(mask > 0, torch.cat(noise)) + logps.detach()
        advantages = torch.linspace(-1, 1, len(mask), dtype=torch.float64)
        losses = []
        for average, level in itertools.product(("grpo", "dapo", "dr_grpo"), ("token", "sequence")):
            options = {"loss_type": average, "importance_sampling_level": level}
            options |= {"old_per_token_logps": old, "normalizer": LossNormalizer(len(mask), mask.sum(), 40)}
            losses.append(grpo_loss(logps, advantages, mask, **options)[0])
        found.append((torch.stack(losses), gradient_of(model, sum(losses)), [c.turns for c in chain(*groups)], mask))
    (growing, gradient, _, grown_mask), (losses, gradients, turns, mask) = found
    assert len({len(some) for some in turns}) > 1
    assert torch.equal(mask.sum(1), grown_mask.sum(1))  # the loss counts each written token once
    assert (losses - growing).abs().max() < 1e-12 and (gradients - gradient).abs().max() < 1e-12 * gradient.abs().max()


def site():
    scripts = [(WELL, RED, BLUE, WELL, RED), (RED, RED), (RED, BLUE, RED), (BLUE, WELL, RED)]
    return {"scripts": scripts, "environment": "Site", "rows": [row(), row()], "processor": PROCESSOR}


def tools():
    """Return scripts with tool calls whose results are images, texts, both, or errors."""
    scripts = [[*eye.PROCESSOR.tokenizer.encode(words), eye.END] for words in (*eye.TEXTS, "<look>two</look>so")]
    return {"scripts": scripts, "environment": eye.EYE, "rows": [eye.row(problem="P")], "processor": eye.PROCESSOR}


TASKS = {"site": site, "tools": tools}


def shown(prompt):
    text = PROCESSOR.tokenizer.decode(prompt.input_ids.tolist())
    text = re.sub(r"(<\|image_pad\|>)+", lambda found: str(len(found[0]) // 13), text)
    return text.replace("<|vision_start|>", "(").replace("<|vision_end|>", ")")


def test_what_windows_show(monkeypatch):
    """With `history`, a window shows all texts, but only the images of the newest rounds."""
    pad = PROCESSOR.tokenizer.special_tokens["<|image_pad|>"]
    for history, pictures in ((1, [["(2)"], ["(3)"]]), (2, [["(2)", "(2)"], ["(2)", "(3)"]])):
        [[trajectory]], _, _ = play(monkeypatch, [[RED, pad, WELL, BLUE, RED]], history=history)
        windows = [shown(turn.prompt) for turn in trajectory.turns[1:]]
        assert [re.findall(r"\(\d+\)", window) for window in windows] == pictures
        assert all("Press red." in window for window in windows) and "page 1" in windows[1]
        assert trajectory.turns[2].prompt.image_grid_thw.tolist() == [[1, 2, 2 * int(x[1])] for x in pictures[1]]
    assert f"{CLICKS[0]}" in windows[1] and f"l{CLICKS[1]}" in windows[1] and pad in trajectory.ids
    [[trajectory]], _, _ = play(monkeypatch, [[RED, WELL, BLUE, RED]], "Shown")
    expected = [user([IMAGE_PART, text(f"2 l{CLICKS[1]}")])], [picture(120, 3)]
    last = trajectory.turns[2].prompt
    ours = PROCESSOR(*expected)
    assert torch.equal(last.input_ids, ours.input_ids) and torch.equal(last.pixel_values, ours.pixel_values)
    assert trajectory.turns[0].prompt is None and len(trajectory.pictures) == 2
    assert trajectory.tool_use.environment.clicks == ["red", "blue", "red"]
    assert trajectory.tool_use.counts == (3, 0, False)


@pytest.fixture
def eager(monkeypatch):
    monkeypatch.setattr(tool_sampler, "find_calls", lambda text, *_: [("click", "red")] if len(text) > 2 else [])
    monkeypatch.setattr(tool_sampler.ToolEpisode, "closes_a_call", lambda *_: True)


@pytest.mark.parametrize("environment", ["Site", "Shown"])
def test_turns_are_drawn_by_the_key_of_row_completion_and_turn(eager, environment):
    model = model_of(PROCESSOR)
    prompts = [row().prompt(PROCESSOR), row(goal="blue").prompt(PROCESSOR)]
    history = 1 if environment == "Site" else None
    options = {"environment": f"{__name__}:{environment}", "history": history, "max_new_tokens": 6}

    def drawn(prompts, keys, **more):
        sampler = make_sampler(model, PROCESSOR, SamplingOptions(**options | more), ONE)
        return [[one.ids.tolist() for one in group] for group in sampler(prompts, 3, keys)]

    together = drawn(prompts, "ab")
    assert drawn(prompts[1:], "b") == together[1:]
    assert drawn(prompts, "ab", max_batch_tokens=60) == together
    assert len({tuple(ids) for group in together for ids in group}) == 6
    sampler = make_sampler(model, PROCESSOR, SamplingOptions(**options, top_k=5, repetition_penalty=1.1), ONE)
    groups = sampler(prompts, 3, "ab")
    assert {len(one.turns) for group in groups for one in group} <= {2, 3}
    batch = pack_turns(prompts, groups, model.config)
    logps = batch.pad(per_token_logps(model, batch)[0])
    sampled = torch.nn.utils.rnn.pad_sequence([one.logps for group in groups for one in group], batch_first=True)
    assert (logps - sampled).abs().max() < 1e-4
    own = sum(packed_length(one) - len(one.turns) for group in groups for one in group)  # last tokens predict nothing
    assert own == batch.layout.num_tokens - sum(len(prompt.input_ids) for prompt in prompts)


@pytest.mark.parametrize("history", [1, None])
def test_every_turn_has_its_own_key(monkeypatch, eager, history):
    """Two turns never share random numbers, because a key names prompt, completion and turn."""
    environment = "Site" if history else "Shown"
    options = SamplingOptions(environment=f"{__name__}:{environment}", history=history, max_new_tokens=30)
    sampler = make_sampler(model_of(PROCESSOR), PROCESSOR, options, ONE)
    keys = []
    inner = sampler_file.Sampler.token_sampler

    def recorded(self, prompts, num_generations, given):
        keys.append(list(given))
        return inner(self, prompts, num_generations, given)

    monkeypatch.setattr(sampler_file.Sampler, "token_sampler", recorded)
    [group] = sampler([row(goal="blue").prompt(PROCESSOR)], 3, ["a"])
    first, *later = keys
    assert first == ["a"]
    turns = [f"a/{i}/{turn}" for i, one in enumerate(group) for turn in range(1, len(one.turns))]
    assert turns and max(len(one.turns) for one in group) > 2
    assert sorted(key for some in later for key in some) == sorted(turns)


def test_a_trajectory_stopped_if_its_last_turn_did(monkeypatch):
    [group], *_ = play(monkeypatch, [[RED, END], [RED] + [WELL] * 9], history=1, max_new_tokens=4)
    assert [[turn.stopped for turn in one.turns] for one in group] == [[True, True], [True, False]]
    assert [one.stopped for one in group] == [True, False]


def test_control_tokens_that_the_policy_writes_are_text_in_its_next_window(monkeypatch):
    template = ChatTemplate(CHATML, "a.jinja")
    pad, start = (PROCESSOR.tokenizer.special_tokens[name] for name in ("<|image_pad|>", "<|im_start|>"))
    script = [pad, start, *PROCESSOR.tokenizer.encode("<|im_ end|>"), RED, WELL, BLUE, RED]
    [[trajectory]], _, _ = play(monkeypatch, [script], "Shown", processor=replace(PROCESSOR, template=template))
    windows = [turn.prompt.input_ids.tolist() for turn in trajectory.turns[1:]]
    assert contains(windows[0], PROCESSOR.tokenizer.encode(f"1 <|image_pad|><|im_start|><|im_ end|>{CLICKS[0]}"))
    assert windows[0].count(start) == windows[1].count(start) == 2 and windows[0].count(pad) == 2


def contains(ids, part):
    return any(ids[i : i + len(part)] == part for i in range(len(ids)))


BAD = {
    "turn 1: the result of observe is None, but it must be a list of messages": lambda self, rounds: None,
    r"turn 1: the result of observe is \[\], but it must be a list of messages": lambda self, rounds: [],
    "turn 1: message 0 must have a role": lambda self, rounds: ["look"],
    "turn 1: an image part from observe is None, but it must be a PIL image": lambda self, rounds: [user([IMAGE_PART])],
    r"turn 1: the context window has 10[0-9] tokens, .* exceeds the model's max_position_embeddings \(128\)": (
        lambda self, rounds: [user([IMAGE_PART | {"image": picture(0, 50)}])]
    ),
}


@pytest.mark.parametrize("error", BAD)
def test_a_window_that_cannot_be_shown_names_row_and_turn(monkeypatch, error):
    model = model_of(PROCESSOR, dtype=torch.float64)
    model.config = replace(model.config, max_position_embeddings=128)
    monkeypatch.setattr(Shown, "observe", BAD[error])
    with pytest.raises(ValueError, match=f"^rows:1: {error}"):
        play(monkeypatch, [[RED, RED]], "Shown", model=model)


def test_rewards_of_turns(monkeypatch):
    """get_reward returns a number for each turn, except for a last turn without a call."""
    [[trajectory]], *_ = play(monkeypatch, [[RED, BLUE, WELL, END]], history=1)
    site, texts = trajectory.tool_use.environment, ["<click>", "<click>", "l"]
    assert len(trajectory.turns) == len(texts) == len(site.earned) + 1
    site.earned = [1.0, 0.5]
    assert environment_reward([site], [texts]) == [1.5]
    assert environment_reward([site, None], [["a", "b"], ["c"]]) == [1.5, None]
    for turns in (["a"], ["a", "b", "c", "d"]):
        error = rf"^reward environment: the result of get_reward is .*one number for each of {len(turns)} turns?"
        with pytest.raises(ValueError, match=error):
            environment_reward([site], [turns])


def test_history_is_refused_for_an_environment_that_chooses_its_windows():
    with pytest.raises(ValueError, match=r"^sampling.history and the method observe of tests\S+:Shown both define"):
        samples_trajectories(SamplingOptions(environment=SHOWN, history=2))


def test_a_run_says_its_turns(run, quick, eager, capsys):
    options = ["--stages=[grpo]", f"--sampling.environment={SHOWN}", "--rewards={environment: 1}"]
    folder = run(*options, "--log_completions=1", "--grpo.max_steps=2")
    assert summary(folder)["start"].keys() == {"eval/environment_sampled", "eval/environment_greedy"}
    for line in metrics(folder):
        assert 1 < line["mean_turns"] <= 3 and line["rollout/logp_mismatch"] < 1e-4
        lengths = line["completions/mean_length"], line["completions/mean_turn_length"] * line["mean_turns"]
        assert lengths[0] == pytest.approx(lengths[1])
    completions = [one for line in metrics(folder, "completions.jsonl") for one in line["completions"]]
    assert {len(one["turns"]) for one in completions} == {2}
    for one in completions:
        assert len(one["tokens"]) == sum(turn["tokens"] for turn in one["turns"])
        assert [turn["shown"] for turn in one["turns"]] == [False] + [True] * (len(one["turns"]) - 1)
        assert len(one.get("pictures", ())) == len(one["turns"]) - 1
        assert all((folder / path).is_file() for path in one.get("pictures", ()))
