"""What must not change a number: how a step is split, the order of rows, what else is in the batch; to 1e-12.

First the losses alone, then whole algorithms with a tiny random model in float64. Several ranks: test_ranks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.objectives import policy_losses as policy
from minivlmrl.objectives import preference_losses as preference
from minivlmrl.run.batches import Batches
from minivlmrl.tasks.shapes import Shapes

from policy_by_hand import loss_of
from stages import Stage

pytestmark = pytest.mark.usefixtures("lively")
ROWS, TOKENS = 6, 5
LENGTHS = torch.tensor([5, 1, 3, 4, 2, 5])
SPLITS = [[slice(0, 2), slice(2, 6)], [slice(0, 1), slice(1, 2), slice(2, 3), slice(3, 6)]]


@dataclass
class Case:
    """A loss as a function of a batch, whose tensors all have rows (or pairs) first."""

    batch: dict[str, torch.Tensor]
    leaves: tuple[str, ...]  # what has a gradient
    call: Callable[[dict], torch.Tensor]  # with the counts of the whole step
    per_token: tuple[str, ...] = field(default=())  # what gets wider when there is more padding

    def __call__(self, order=slice(None), padding: int = 0) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss and gradients of some rows."""
        batch = {name: value[order].clone() for name, value in self.batch.items()}
        for name in self.per_token:  # what stands in the padding must not matter, so it is no zeros
            filling = 0.0 if name == "mask" else 0.7
            batch[name] = torch.nn.functional.pad(batch[name], (0, padding), value=filling)
        leaves = [batch[name].requires_grad_() for name in self.leaves]
        loss = self.call(batch)
        return loss.detach(), dict(zip(self.leaves, torch.autograd.grad(loss, leaves), strict=True))


def same(one, other, what=""):
    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14, msg=lambda m: f"{what}: {m}")


def check(case: Case, split=True):
    """A step in another order of rows, with more padding and in parts has the same loss and gradients."""
    loss, gradients = case()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    other, moved = case(order)
    same(other, loss, "order")
    padded, wider = case(padding=3)
    same(padded, loss, "padding")
    for name in case.leaves:
        same(moved[name], gradients[name][order], f"order, {name}")
        width = gradients[name].shape[-1]
        same(wider[name][..., :width], gradients[name], f"padding, {name}")
        assert not wider[name][..., width:].any()
    for rows in SPLITS if split else ():
        parts = [case(part) for part in rows]
        same(sum(part for part, _ in parts), loss, f"split {rows}")
        for name in case.leaves:
            same(torch.cat([part[name] for _, part in parts]), gradients[name], f"split {rows}, {name}")


def noise(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def mask(lengths=LENGTHS, width=TOKENS):
    return (torch.arange(width) < lengths[:, None]).double()


def grpo_case(**options) -> Case:
    shape = (ROWS, TOKENS)
    logps, old, ref, sampler = (noise(*shape, seed=s, scale=0.6) - 2 for s in range(4))
    batch = {
        "per_token_logps": logps, "old_per_token_logps": old, "ref_per_token_logps": ref,
        "sampling_per_token_logps": sampler, "entropies": noise(*shape, seed=5).abs(),
        "advantages": noise(ROWS, seed=6), "mask": mask(),
    }  # fmt: skip
    batch["mask"][2] = 0  # a completion that was cut and teaches nothing
    threshold = None
    kept = batch["mask"]
    if options.get("top_entropy_quantile", 1) < 1:
        threshold = policy.top_entropy_threshold(batch["entropies"], kept, options["top_entropy_quantile"])
        kept = kept * (batch["entropies"] >= threshold)
    correction = options.pop("rollout_correction", None)
    counts = {"sequences": ROWS, "tokens": batch["mask"].sum(), "num_entropy_tokens": kept.sum()}

    def call(batch):
        ratio = None
        if correction:
            names = ("old_per_token_logps", "sampling_per_token_logps", "mask")
            ratio = policy.rollout_importance_ratio(*(batch[n] for n in names), mode=correction, clip_max=2.0)
        return loss_of(
            **batch, **options, **counts, importance_sampling_ratio=ratio, entropy_threshold=threshold,
            max_completion_length=7,
        )[0]  # fmt: skip

    per_token = tuple(name for name in batch if name != "advantages")
    return Case(batch, ("per_token_logps", "entropies") if "entropy_coef" in options else ("per_token_logps",), call,
                per_token)  # fmt: skip


LOSS_TYPES = tuple(policy.AVERAGES)
GRPO_OPTIONS = {
    "plain": {},
    **{
        f"level {level}": {"importance_sampling_level": level, "beta": 0.3}
        for level in ("token", "sequence", "sequence_token")
    },
    **{f"kl {name}": {"beta": 0.3, "kl_estimator": name} for name in ("k1", "k2", "k3")},
    "kl straight through": {"beta": 0.3, "kl_straight_through": True, "use_bias_correction_kl": False},
    "delta": {"delta": 1.5},
    "entropy": {"top_entropy_quantile": 0.5, "entropy_coef": 0.3},
    "off-policy mask": {"off_policy_mask_threshold": 0.1},
    **{f"correction {mode}": {"rollout_correction": mode} for mode in policy.CORRECTION_MODES},
}


@pytest.mark.parametrize("options", GRPO_OPTIONS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_grpo_loss(loss_type, options):
    case = grpo_case(loss_type=loss_type, **GRPO_OPTIONS[options])
    check(case, split=loss_type != "bnpo")


def dpo_case(**options) -> Case:
    shape = (ROWS, 2, TOKENS)
    both = torch.stack([mask(), mask(LENGTHS.flip(0))], 1)
    batch = {
        "per_token_logps": noise(*shape, scale=0.6) - 2, "ref_per_token_logps": noise(*shape, seed=1, scale=0.6) - 2,
        "mask": both,
    }  # fmt: skip
    options = preference.DPOLoss(**{"label_smoothing": 0.1, **options})
    if options.use_weighting:
        batch["log_sum_sq_probs"] = noise(*shape, seed=2).abs() - 3
    counts = SimpleNamespace(sequences=2 * ROWS, tokens=both[:, 0].sum())
    call = lambda batch: preference.dpo_loss(**batch, options=options, counts=counts)[0]  # noqa: E731
    return Case(batch, ("per_token_logps",), call, tuple(batch))


SORTING = ("aot", "aot_unpaired")
DPO_OPTIONS = [
    *[{"loss_type": name} for name in preference.DPO_LOSSES],
    *[{"loss_type": name, "ld_alpha": 0.5} for name in ("sigmoid", "sft", *SORTING)],
    *[{"loss_type": name, "use_weighting": True} for name in preference.DPO_LOSSES if name not in (*SORTING, "sft")],
    *[
        {"loss_type": name, "f_divergence_type": f}
        for name in preference.F_LOSSES
        for f in preference.F_DIVERGENCES[1:]
    ],
    {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
]


@pytest.mark.parametrize("options", DPO_OPTIONS, ids=lambda options: " ".join(map(str, options.values())))
def test_dpo_loss(options):
    check(dpo_case(**options), split=options["loss_type"] not in SORTING)


CASES = {
    "bnpo": grpo_case(loss_type="bnpo"),  # the token mean of a micro-batch
    **{name: dpo_case(loss_type=name) for name in SORTING},  # the quantiles of its pairs
    "weighted sft": dpo_case(loss_type="sft", use_weighting=True),  # WPO's weights multiply the loss of all its pairs
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_these_depend_on_the_split(case):
    """As in TRL."""
    check(case, split=False)
    assert (sum(case(rows)[0] for rows in SPLITS[0]) - case()[0]).abs() > 1e-4


# whole algorithms: two steps of four rows, in one micro-batch


class Ragged(Shapes):
    """Answers of different lengths: of row i an end of i words more."""

    def __getitem__(self, index):
        row = super().__getitem__(index)
        row.completion += " so" * index
        row.chosen += " it is" * index
        row.rejected += " no" * (7 - index)
        row.columns["label"] = index % 3 == 0
        return row


def steps(folder, stage, *overrides):
    """Run a stage's steps; returns their metrics and what was trained."""
    usual = {"max_steps": 2, "micro_batch_size": 4, "learning_rate": 3e-3}
    usual |= {"kl_coef": 0.1} if stage == "ppo" else {}
    usual = [f"--{stage}.{name}={value}" for name, value in usual.items()]
    run, lines = Stage(folder, stage, *usual, *overrides, rows=Ragged(8, "rows")), []
    for _ in range(run.config.max_steps):
        run.next()
        lines.append(run.update())
    return lines, {name: p.detach().clone() for name, p in run.algorithm.trained.named_parameters()}


CHANGING = {"rollout/logp_mismatch", "rollout/logp_mismatch_rms"}  # differences of rounding
RUNS = {
    "sft dft": ("sft", ["--sft.loss_type=dft"]),
    "dpo with options": ("dpo", ["--dpo.use_weighting=true", "--dpo.ld_alpha=0.5"]),
    "kto": ("kto", ["--kto.undesirable_weight=0.7", "--kto.max_steps=3"]),
    "reward_model": ("reward_model", ["--reward_model.center_rewards_coefficient=0.1"]),
    "grpo": ("grpo", []),
    "grpo with options": ("grpo", ["--grpo.num_iterations=2", "--grpo.steps_per_generation=2", "--grpo.beta=0.1",
                                   "--grpo.top_entropy_quantile=0.6", "--grpo.entropy_coef=0.05", "--grpo.max_steps=4",
                                   "--grpo.mask_truncated_completions=true"]),
    **{f"grpo {name}": ("grpo", [f"--grpo.loss_type={name}", "--grpo.num_iterations=2", "--grpo.beta=0.1"])
       for name in ("dr_grpo", "rloo", "vespo")},  # one of each kind of divisor
    "grpo resampled": ("grpo", ["--grpo.max_num_gen_batches=3", "--sampling.max_new_tokens=1",
                                "--grpo.num_generations=2"]),
    "ppo": ("ppo", ["--ppo.num_mini_batches=2", "--ppo.num_ppo_epochs=2", "--ppo.max_steps=5"]),
}  # fmt: skip


OF_ROWS = {"grpo rloo", "grpo vespo"}  # clip ratios and phi are means over rows there


def assert_same_steps(found, expected, rel, of_rows=False):
    """Hold the metrics and weights of steps against others; some metrics are float32."""
    (lines, weights), (others, same_weights) = found, expected
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys() and line["grad_norm"] > 1e-6
        for name in ("loss", "grad_norm"):
            assert other[name] == pytest.approx(line[name], rel=rel, abs=1e-13), name
        for name in line.keys() - CHANGING:
            if of_rows and name.startswith(("clip_ratio", "vespo")):
                continue  # averaged by tokens all the same
            if name == "rewards/accuracies" and abs(line["rewards/margins"]) < 1e-9:
                continue  # policy and reference are equal: rounding decides
            assert other[name] == pytest.approx(line[name], rel=1e-5, abs=1e-6), name
    for name, value in weights.items():
        torch.testing.assert_close(same_weights[name], value, rtol=rel, atol=1e-12)


@pytest.mark.parametrize("name", RUNS)
def test_micro_batch_size(folder, name):
    """Neither loss, gradient and weights nor what is logged depends on it."""
    stage, options = RUNS[name]
    pair = (steps(folder, stage, *options, f"--{stage}.micro_batch_size={size}") for size in (4, 1))
    assert_same_steps(*pair, 1e-12, name in OF_ROWS)


def reorder(monkeypatch, order):
    """Let every draw of four rows come in another order; each row keeps its key."""
    original = Batches.__next__

    def draw(self):
        rows = original(self)
        return [rows[i] for i in order]

    monkeypatch.setattr(Batches, "__next__", draw)


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward_model", "grpo", "ppo"])
def test_order_of_rows_in_a_step(folder, stage, monkeypatch):
    options = {"grpo": ["--grpo.beta=0.1", "--grpo.max_steps=1"], "ppo": ["--ppo.max_steps=1"]}.get(stage, [])
    expected = steps(folder, stage, *options)
    reorder(monkeypatch, [2, 0, 3, 1])
    assert_same_steps(steps(folder, stage, *options), expected, 1e-11)
