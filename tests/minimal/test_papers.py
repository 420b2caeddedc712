"""Apply the pages of docs/papers to minimal.py, and compare the changed file with TRL, or with the package."""

import copy
import math
import re
from argparse import Namespace
from functools import cache, partial

import PIL.Image
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks import common, papers
from minivlmrl.losses.ppo import gae, ppo_loss, token_rewards, whiten
from tests.helpers.links import ROOT

FOLDER = ROOT / "docs" / "papers"
PAGES = sorted(page.stem for page in FOLDER.glob("*.md") if page.stem != "README")
TOLERANCE = 1e-12
G = 4  # completions of a prompt
BETA = 0.3


@cache
def patched(*pages: str):
    """Import a copy of minimal.py to which pages were applied, as a reader would apply them."""
    return papers.load_patched(list(pages))


def test_pages_and_pictures_show_what_was_measured():
    for name, text in papers.written(common.read(papers.CURVES)).items():
        assert (FOLDER / name).read_text() == text, f"run python benchmarks/papers.py: {name}"


@pytest.fixture
def float64():
    """Let torch.tensor([0.5]) have 64 bits, as for the rewards of a group."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True)


class Step:
    """Groups of completions with 1 to 6 tokens, with rewards, and log-probabilities under three models."""

    def __init__(self, seed: int = 0, far: float = 0.0, longest=(6, 3, 5), size: int = G):
        generator, blind = (torch.Generator().manual_seed(number) for number in (seed, seed + 100))
        normal = partial(torch.randn, generator=generator)
        self.masks, self.rewards = [], []
        self.logps = {"model": [], "old": [], "reference": [], "critic": [], "blind": []}
        for T in longest:
            lengths = torch.randint(1, T + 1, (size,), generator=generator)
            lengths[0] = T
            logps = -normal(size, T).abs() - 0.1
            self.masks.append(torch.arange(T) < lengths[:, None])
            rewards = torch.randint(0, 4, (size,), generator=generator) / 2
            rewards[0] = 2.5  # so that rewards of a group differ
            self.rewards.append(rewards)
            self.logps["model"].append(logps.clone().requires_grad_())
            self.logps["old"].append(logps + far * normal(size, T))
            self.logps["reference"].append(logps + 0.3 * normal(size, T))
            self.logps["critic"].append(normal(size, T).requires_grad_())
            self.logps["blind"].append(logps + 2 * torch.randn(size, T, generator=blind))
        self.sampled_by = []
        self.seen = []  # (prompt, answers) of each forward pass

    def run(self, module, stage="grpo", wanted="model", rows=None, **options) -> tuple[Tensor, Tensor]:
        """Return the loss of a step, and its gradient to the log-probabilities, (completions, tokens)."""

        def sample(model, number, *_):
            self.sampled_by.append(model)
            return number, self.masks[number]

        def log_probabilities(model, number, answers):
            self.seen.append((number, answers))
            return self.logps["blind" if number == "blind" else model][answers]

        given = {"num_generations": G, "max_new_tokens": 8, "beta": BETA, "prompts_per_step": 3} | options
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "make_prompt", lambda model, row: row["number"])
            patch.setattr(module, "sample", sample)
            patch.setattr(module, "decode", lambda *_: range(G))
            patch.setattr(module, "log_probabilities", log_probabilities)
            patch.setattr(module, "blacken", lambda prompt: "blind", raising=False)
            patch.setattr(module, "tokenize_answers", lambda model, texts: (texts[0], self.masks[texts[0]]))
            rows = [self.row(i) for i in range(len(self.masks))] if rows is None else rows
            options = Namespace(old="old", critic="critic", reward=lambda i, rewards: rewards[i].item(), **given)
            losses = [loss for loss, _ in getattr(module, stage)("model", "reference", rows, options)]
        loss = sum(losses)
        leaves = self.logps[wanted]
        gradients = torch.autograd.grad(loss, leaves, retain_graph=True, allow_unused=True)
        found = [torch.zeros_like(leaf) if x is None else x for x, leaf in zip(gradients, leaves, strict=True)]
        return loss.detach(), padded([row for group in found for row in group])

    def row(self, number: int) -> dict:
        return {"number": number, "solution": self.rewards[number], "chosen": number, "rejected": number}

    def batch(self) -> dict[str, Tensor]:
        """Return all completions of the step in one batch."""
        names = {"per_token_logps": "model", "old_per_token_logps": "old", "ref_per_token_logps": "reference"}
        batch = {name: padded([row for group in self.logps[key] for row in group]) for name, key in names.items()}
        batch = {name: value.detach() for name, value in batch.items()}
        return batch | {"mask": padded([row for group in self.masks for row in group]).double()}


def difference(ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference of losses and gradients, relative to the largest gradient."""
    (loss, gradient), (expected, expected_gradient) = ours, theirs
    assert gradient.shape == expected_gradient.shape and expected_gradient.abs().max() > 1e-6
    gap = (gradient - expected_gradient).abs().max() / expected_gradient.abs().max()
    return max(gap.item(), (loss - expected).abs().item())


def trl_says(batch: dict, **options) -> tuple[Tensor, Tensor]:
    from tests.parity import trl_oracle

    message = trl_oracle.what_trl_says(batch, options)
    return message["loss"], message["gradient"]


def trl_advantages(step: Step, kind: str = "GRPO", rewards=None, **options) -> Tensor:
    from tests.parity import trl_oracle

    rewards = torch.cat(step.rewards) if rewards is None else rewards
    return trl_oracle.rollout(rewards[:, None], kind, num_generations=G, **options)["advantages"]


PLAIN = {"kind": "grpo", "loss_type": "grpo", "beta": BETA}
# options of TRL for each page; TRL's epsilon_low is the one of the changed file
POLICY = {
    "several_steps": {},
    "gspo": {"importance_sampling_level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 8},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
}
FAR = {"gspo": 0.001, "cispo": 1.5}  # how far the policy moved, in nats; some ratios lie outside of the clip range


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("page", POLICY)
def test_a_step_off_policy_equals_trl(trl, float64, page, seed):
    step = Step(seed, far=FAR.get(page, 0.4))
    advantages = trl_advantages(step, scale_rewards={"dr_grpo": "none"}.get(page, "group"))
    if page == "dapo":
        punished = [punished_by_trl(rewards, mask) for rewards, mask in zip(step.rewards, step.masks, strict=True)]
        advantages = trl_advantages(step, rewards=torch.cat(punished))
    theirs = trl_says(step.batch() | {"advantages": advantages}, **PLAIN | POLICY[page])
    pages = [page] if page == "several_steps" else ["several_steps", page]
    assert difference(step.run(patched(*pages)), theirs) < TOLERANCE
    assert set(step.sampled_by) == {"old"}


@pytest.mark.parametrize("seed", range(5))
def test_dppo_equals_the_formula_of_trl(float64, seed):
    """TRL had DPPOTrainer until version 1.8; its mask for divergence_type="binary_tv" is written out here."""
    step = Step(seed, far=0.4)
    total = 0.0
    for i, mask in enumerate(step.masks):
        logps, old, ref = (step.logps[name][i] for name in ("model", "old", "reference"))
        rewards = step.rewards[i]
        advantages = ((rewards - rewards.mean()) / (rewards.std() + 1e-4))[:, None]
        p, q = logps.detach().exp(), old.exp()
        too_high = ((p - q).abs() > 0.15) & (p > q)
        too_low = ((p - q).abs() > 0.15) & (p < q)
        keep = torch.where(advantages > 0, ~too_high, ~too_low)
        ratio = (logps.detach() - old).clamp(max=math.log(20)).exp()
        kl = (logps - old).exp() * ((ref - logps).exp() - (ref - logps) - 1)
        loss = -advantages * ratio * keep * logps + BETA * kl
        total = total + ((loss * mask).sum(1) / mask.sum(1)).mean() / 3
    assert difference(step.run(patched("several_steps", "dppo")), with_gradient(total, step)) < TOLERANCE
    assert set(step.sampled_by) == {"old"}


@pytest.mark.parametrize("seed", range(5))
def test_papo_is_grpo_with_a_kl_to_the_blind_answers(float64, seed):
    """As the code of the paper: k3 with the ratio pi_blind / pi, at most 10, and no gradient through pi_blind."""
    step = Step(seed)
    loss, gradient = step.run(patched())
    total = 0.0
    for i, mask in enumerate(step.masks):
        ratio = (step.logps["blind"][i] - step.logps["model"][i]).exp()
        kl = (ratio - ratio.log() - 1).clamp(max=10)
        total = total - 0.01 * ((kl * mask).sum(1) / mask.sum(1)).mean() / 3
    term, slope = with_gradient(total, step)
    assert difference(step.run(patched("papo")), (loss + term, gradient + slope)) < TOLERANCE


def test_papo_blackens_three_of_five_patches(tiny):
    module = patched("papo")
    model = module.load(tiny)
    prompt = module.make_prompt(model, {"images": [PIL.Image.new("RGB", (560, 560), "red")], "problem": "?"})
    [(patches, h, w)] = module.blacken(prompt).images
    is_black = (patches == module.patchify(PIL.Image.new("RGB", (14, 14)), 7, 2, 196, 196)[0][0]).all(1)
    assert torch.equal(patches[~is_black], prompt.images[0][0][~is_black]) and (h, w) == (80, 80)
    assert 0.57 < is_black.double().mean() < 0.63


@pytest.mark.parametrize("seed", range(5))
def test_opd_is_a_step_of_trl_with_an_advantage_for_each_token(trl, float64, seed):
    step = Step(seed)
    batch = step.batch()
    advantages = batch["ref_per_token_logps"] - batch["per_token_logps"]
    options = PLAIN | {"beta": 0.0}
    theirs = trl_says(batch | {"advantages": advantages, "old_per_token_logps": batch["per_token_logps"]}, **options)
    assert difference(step.run(patched("opd"), beta=0.0), theirs) < TOLERANCE


def with_gradient(loss: Tensor, step: Step) -> tuple[Tensor, Tensor]:
    gradients = torch.autograd.grad(loss, step.logps["model"], retain_graph=True)
    return loss.detach(), padded([row for group in gradients for row in group])


def punished_by_trl(rewards: Tensor, mask: Tensor) -> Tensor:
    """Add TRL's soft overlong punishment to rewards: of 8 tokens, a completion may use 6 without punishment."""
    from tests.parity import trl_oracle

    lengths = mask.sum(1).tolist()
    return rewards + torch.tensor([trl_oracle.soft_overlong_punishment(n, 8, 2) for n in lengths])


@pytest.mark.parametrize("numbers, tried, used", [
    ([0, 1, 1, 2, 1, 0, 2], 6, [0, 2, 0]), ([1] * 8 + [0, 2, 1, 0], 11, [0, 2, 1]),
])  # fmt: skip
def test_dapo_replaces_groups_with_equal_rewards(trl, float64, numbers, tried, used):
    """The rewards of group 1 are equal; after 9 prompts for a step of 3, even such a group is taken."""
    step = Step()
    step.rewards[1] = torch.ones(G)
    rows = iter([step.row(number) for number in numbers])
    found = step.run(patched("dapo"), rows=rows)
    assert len(step.sampled_by) == tried and next(rows)
    batch = step.batch()
    punished = [punished_by_trl(rewards, mask) for rewards, mask in zip(step.rewards, step.masks, strict=True)]
    places = torch.cat([torch.arange(G * number, G * number + G) for number in used])
    advantages = trl_advantages(step, rewards=torch.cat([punished[number] for number in used]))
    batch = {name: value[places] for name, value in batch.items()} | {"advantages": advantages}
    loss, gradient = trl_says(batch, **PLAIN | POLICY["dapo"])
    summed = torch.zeros_like(found[1]).index_add(0, places, gradient)  # a group may be used twice
    assert difference(found, (loss, summed)) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_rloo_equals_trl(trl, float64, seed):
    step = Step(seed)
    batch = step.batch()
    lengths = batch["mask"].sum(1).long().tolist()
    logps = batch["per_token_logps"], batch["ref_per_token_logps"]
    advantages = trl_advantages(step, "RLOO", logps=logps, completions=[[5] * n for n in lengths], beta=BETA)
    theirs = trl_says(batch | {"advantages": advantages}, kind="rloo", beta=BETA)
    assert difference(step.run(patched("rloo")), theirs) < TOLERANCE
    off = Step(seed, far=0.2).batch()
    theirs = trl_says(off | {"advantages": advantages}, kind="rloo", beta=BETA)
    logps = off.pop("per_token_logps").requires_grad_()
    loss = patched("rloo").grpo_loss(logps, advantages, **off)
    assert difference((loss.detach(), torch.autograd.grad(loss, logps)[0]), theirs) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_ppo_equals_the_package(float64, seed):
    """minivlmrl.losses.ppo equals TRL 1.12, the last version with PPO."""
    step = Step(seed)
    total = 0.0
    for i, mask in enumerate(step.masks):
        logps, values = step.logps["model"][i], step.logps["critic"][i]
        old = {"old_per_token_logps": logps.detach(), "old_values": values.detach() * mask}
        scores = token_rewards(step.rewards[i], logps.detach(), step.logps["reference"][i], mask, kl_coef=BETA)
        advantages, returns = gae(scores, old["old_values"])
        [advantages] = whiten([advantages], [mask])
        total = total + ppo_loss(logps, values, mask, **old, advantages=advantages, returns=returns)[0] / 3
    for part in ("model", "critic"):
        gradients = torch.autograd.grad(total, step.logps[part], retain_graph=True)
        theirs = total.detach(), padded([row for group in gradients for row in group])
        assert difference(step.run(patched("ppo"), wanted=part), theirs) < TOLERANCE


@pytest.mark.parametrize("pages", papers.pairs(), ids="-".join)
def test_pages_that_change_different_parts_apply_together(pages):
    papers.load_patched([*pages])


@pytest.mark.parametrize("page", PAGES)
def test_the_built_in_task_trains_with_each_page(tiny, tmp_path, page, capsys):
    """All pages train together with LoRA, which learns nothing but its adapters."""
    module = patched(*papers.pages_of(page), *["lora"] * (page != "lora"))
    model = module.load(tiny)
    options = Namespace(
        max_steps=2, prompts_per_step=2, learning_rate=1e-3, warmup_steps=1, beta=0.1, num_generations=2,
        max_new_tokens=4, reward=lambda text, solution: float(len(text)),
    )  # fmt: skip
    if page == "opd":
        module.TEACHER = tmp_path / "teacher"
        model.lm_head.weight.data.mul_(2)  # the teacher has other weights
        module.save(model, module.TEACHER)
        model = module.load(tiny)
    before = copy.deepcopy(model)
    module.add_adapters(model)
    stage = module.dpo if page in ("mpo", "kto") else module.grpo
    module.train(model, [module.draw_row() for _ in range(2)], stage, options)
    assert f"{stage.__name__} step 2 of 2: " in capsys.readouterr().out
    module.merge_adapters(model)
    after = model.state_dict()
    moved = {name for name, weight in before.state_dict().items() if not torch.equal(weight, after[name])}
    assert after.keys() == before.state_dict().keys()
    assert moved == {name for name in after if re.search(r"layers.*(self_attn|mlp).*weight", name)}
    if page == "ppo":
        assert options.critic.lm_head.out_features == 1 and options.critic.lm_head.weight.grad is None
        assert any(layer.B.any() for layer in options.critic.modules() if isinstance(layer, module.LoRA))


def test_lora_begins_with_its_reference_and_is_saved_merged(tiny, tmp_path, float64):
    module = patched("lora")
    model = module.load(tiny, dtype=torch.float64)
    prompt = module.make_prompt(model, module.draw_row())
    answers, _ = module.tokenize_answers(model, ["red square", "<think>no</think>"])
    before = module.log_probabilities(model, prompt, answers)
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    module.add_adapters(model)
    reference = module.make_reference(model)
    assert torch.equal(module.log_probabilities(model, prompt, answers), before)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, module.LoRA)}
    assert len(layers) == 7 * len(model.model["layers"])
    for layer in layers.values():
        torch.nn.init.normal_(layer.B)
    assert torch.equal(module.log_probabilities(reference, prompt, answers), before)
    owned = {weight.data_ptr() for weight in model.parameters() if not weight.requires_grad}
    assert all(w.data_ptr() in owned for name, w in reference.named_parameters() if name[-2:] not in (".A", ".B"))
    adapted = module.log_probabilities(model, prompt, answers)
    for name, layer in layers.items():
        weights[f"{name}.weight"] += 2 * layer.B @ layer.A
    module.save(model, tmp_path)
    merged = module.load(tmp_path, dtype=torch.float64)
    assert (adapted - before).abs().max() > 0.1
    for name, weight in merged.state_dict().items():
        assert torch.allclose(weight, weights[name], rtol=0, atol=1e-12)
    assert (module.log_probabilities(merged, prompt, answers) - adapted).abs().max() < 1e-9


def pairs(step: Step) -> dict[str, Tensor]:
    return {name: value.unflatten(0, (-1, 2)) for name, value in step.batch().items()}


MPO = {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]}


@pytest.mark.parametrize("seed", range(5))
def test_mpo_equals_trl(trl, float64, seed):
    batch = pairs(Step(seed, size=2))
    theirs = trl_says(batch, kind="dpo", beta=BETA, **MPO)
    logps = batch["per_token_logps"].requires_grad_()
    ref = batch["ref_per_token_logps"]
    loss = patched("mpo").dpo_loss(logps, batch["mask"], beta=BETA, ref_per_token_logps=ref)
    assert difference((loss.detach(), torch.autograd.grad(loss, logps)[0]), theirs) < TOLERANCE
    # minimal.py computes one pair after the other
    one = Step(seed, longest=(6,), size=2)
    loss, gradient = trl_says(pairs(one), kind="dpo", beta=BETA, **MPO)
    assert difference(one.run(patched("mpo"), "dpo"), (loss, gradient.flatten(0, 1))) < TOLERANCE


@pytest.mark.parametrize("seed", range(5))
def test_kto_equals_trl(trl, float64, seed):
    step = Step(seed, size=2)
    batch = step.batch()
    kl = ((batch["per_token_logps"] - batch["ref_per_token_logps"]) * batch["mask"]).sum(1).mean()
    if seed % 2 == (kl > 0):  # both signs of the KL occur; a negative one counts as 0
        step.logps["reference"] = [logps - 0.5 * kl.sign() for logps in step.logps["reference"]]
        batch = step.batch()
    labels = torch.tensor([True, False] * 3)
    theirs = trl_says(batch | {"labels": labels, "kl_mask": batch["mask"]}, kind="kto", beta=BETA)
    assert difference(step.run(patched("kto"), "dpo"), theirs) < TOLERANCE
    assert {(0, 2), (1, 0), (2, 1)} < set(step.seen)  # the KL is that of answers to other prompts


def test_the_reference_moves_as_in_trl(trl, float64):
    from trl.trainer.callbacks import SyncRefModelCallback

    model, theirs = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    theirs.load_state_dict(model.state_dict())
    model.updates = 0
    differences = []

    def stage(model, reference, rows, options):
        step = model.updates
        if step and step % 16 == 0:
            SyncRefModelCallback._sync_target_model(model, theirs, 0.6)
        for ours, expected in zip(reference.parameters(), theirs.parameters(), strict=True):
            differences.append((ours - expected).abs().max().item())
        assert step == 0 or not torch.equal(reference.weight, model.weight)
        yield (model.weight * torch.arange(3)).sum(), torch.tensor(0.0)

    options = Namespace(max_steps=50, prompts_per_step=1, learning_rate=1e-2, warmup_steps=1, beta=BETA)
    patched("reference").train(model, [0], stage, options)
    assert len(differences) == 100 and max(differences) < TOLERANCE
