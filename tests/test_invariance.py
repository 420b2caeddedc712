"""What must not change a number: how a step is split, the order of rows, what else is in the batch; to 1e-12.

First the losses alone, then whole algorithms with a tiny random model in float64. Several ranks: test_ranks.py.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from talk import assistant, text, user

from minivlmrl.algorithms import policy_losses as policy
from minivlmrl.algorithms import preference_losses as preference
from minivlmrl.algorithms.ppo_loss import PPORollout, ppo_loss
from minivlmrl.algorithms.sft_loss import SFT_LOSS_TYPES, sft_loss
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


def check(case: Case, split=True, padding=True):
    """A step in another order of rows, with more padding and in parts has the same loss and gradients."""
    loss, gradients = case()
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    other, moved = case(order)
    same(other, loss, "order")
    for name in case.leaves:
        same(moved[name], gradients[name][order], f"order, {name}")
    if padding:
        other, wider = case(padding=3)
        same(other, loss, "padding")
        for name in case.leaves:
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


def grpo_case(counted=True, **options) -> Case:
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
        given = counts if counted else {}
        return loss_of(
            **batch, **options, **given, importance_sampling_ratio=ratio, entropy_threshold=threshold,
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


def test_bnpo_is_the_token_mean_of_each_micro_batch_weighted_by_its_rows():
    """So it depends on the split, unless all micro-batches have as many tokens a row."""
    case = grpo_case(loss_type="bnpo")
    whole, _ = case()
    for split in SPLITS:
        sizes = [len(range(ROWS)[rows]) for rows in split]
        parts = [grpo_case(counted=False, loss_type="bnpo")(rows)[0] for rows in split]  # each its own token mean
        by_hand = sum(size / ROWS * part for size, part in zip(sizes, parts, strict=True))
        same(sum(case(rows)[0] for rows in split), by_hand)
        assert (by_hand - whole).abs() > 1e-3
    case.batch["mask"] = mask(torch.full((ROWS,), 3))
    check(case)


@pytest.mark.parametrize("loss_type", SFT_LOSS_TYPES)
def test_sft_loss(loss_type):
    batch = {"per_token_logps": noise(ROWS, TOKENS) - 2, "mask": mask()}
    counts = SimpleNamespace(tokens=mask().sum())
    call = lambda batch: sft_loss(**batch, loss_type=loss_type, counts=counts)  # noqa: E731
    check(Case(batch, ("per_token_logps",), call, tuple(batch)))


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


SORTING, DIVERGENCES = ("aot", "aot_unpaired"), preference.F_DIVERGENCES[1:]
DPO_OPTIONS = [
    *[{"loss_type": name} for name in preference.DPO_LOSSES],
    *[{"loss_type": name, "ld_alpha": 0.5} for name in preference.DPO_LOSSES],
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


@pytest.mark.parametrize("loss_type", SORTING)
def test_losses_that_sort_do_so_in_each_micro_batch(loss_type):
    """The quantiles that are compared are those of a micro-batch: with one pair each, this is plain DPO."""
    case = dpo_case(loss_type=loss_type)
    whole, _ = case()
    alone = sum(case(slice(i, i + 1))[0] for i in range(ROWS))
    assert (alone - whole).abs() > 1e-3
    logps, ref = ((case.batch[f"{name}per_token_logps"] * case.batch["mask"]).sum(-1) for name in ("", "ref_"))
    one, other = (logps, ref) if loss_type == "aot" else ((logps - ref).T, (logps - ref).T)
    if loss_type == "aot":
        z = (one[:, 0] - one[:, 1]).sort().values - (other[:, 0] - other[:, 1]).sort().values
    else:
        z = one[0].sort().values - other[1].sort().values
    logsigmoid = torch.nn.functional.logsigmoid
    smoothed = lambda z: (-0.9 * logsigmoid(0.1 * z) - 0.1 * logsigmoid(-0.1 * z)).mean()  # noqa: E731
    same(whole, smoothed(z))
    same(alone, smoothed((logps - ref)[:, 0] - (logps - ref)[:, 1]))


def test_weighted_sft_is_the_one_option_of_dpo_that_depends_on_the_split_unsorted():
    """WPO's weights multiply the sft loss of a whole micro-batch, as in TRL."""
    case = dpo_case(loss_type="sft", use_weighting=True)
    check(case, split=False)
    assert (sum(case(rows)[0] for rows in SPLITS[0]) - case()[0]).abs() > 1e-3


@pytest.mark.parametrize("loss_type", preference.KTO_LOSS_TYPES)
def test_kto_loss(loss_type):
    batch = {
        "per_token_logps": noise(ROWS, TOKENS), "ref_per_token_logps": noise(ROWS, TOKENS, seed=1),
        "mask": mask(), "labels": torch.tensor([True, False, True, True, False, False]),
    }  # fmt: skip
    given = {"kl": torch.tensor(0.2), "counts": SimpleNamespace(sequences=ROWS)}
    given["options"] = preference.KTOLoss(loss_type, desirable_weight=1.3)
    check(Case(batch, ("per_token_logps",), lambda batch: preference.kto_loss(**batch, **given)[0], tuple(batch)[:3]))


@pytest.mark.parametrize("center", [None, 0.1])
def test_reward_loss(center):
    names = ("chosen", "rejected", "margin")
    batch = {name: noise(ROWS, seed=seed) for seed, name in enumerate(names)}
    counts = SimpleNamespace(sequences=2 * ROWS)
    call = lambda batch: preference.reward_loss(**batch, options=preference.RewardLoss(center), counts=counts)[0]  # noqa: E731
    check(Case(batch, names[:2], call), padding=False)


@pytest.mark.parametrize("separate_mask", [False, True])
def test_ppo_loss(separate_mask):
    names = ("per_token_logps", "values", "old_per_token_logps", "old_values", "advantages", "returns")
    batch = {name: noise(ROWS, TOKENS, seed=seed, scale=0.6) for seed, name in enumerate(names)}
    batch["mask"] = mask()
    if separate_mask:
        batch["value_mask"] = mask((LENGTHS + 1).clamp(max=TOKENS))
    counts = SimpleNamespace(tokens=mask().sum())

    def call(batch):
        own = {name: value for name, value in batch.items() if name not in names[2:]}
        return ppo_loss(**own, rollout=PPORollout(*(batch[name] for name in names[2:])), counts=counts)[0]

    check(Case(batch, names[:2], call, tuple(batch)), padding=not separate_mask)


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


class Looking(Ragged):
    """Ragged, but in most rows each answer goes on after a user has shown another picture."""

    def __getitem__(self, index):
        row, other = super().__getitem__(index), super().__getitem__((index + 1) % len(self))
        shown = user([{"type": "image", "image": other.images[0]}, text("And this?")])
        for name in ("completion", "chosen", "rejected") if index % 3 else ():
            setattr(row, name, [assistant(getattr(row, name)), shown, assistant(getattr(other, name))])
        return row


def steps(folder, stage, *overrides, rows=Ragged):
    """Run a stage's steps; returns their metrics and what was trained."""
    usual = {"max_steps": 2, "micro_batch_size": 4, "learning_rate": 3e-3}
    usual |= {"kl_coef": 0.1} if stage == "ppo" else {}
    usual = [f"--{stage}.{name}={value}" for name, value in usual.items()]
    run, lines = Stage(folder, stage, *usual, *overrides, rows=rows(8, "rows")), []
    for _ in range(run.config.max_steps):
        run.next()
        lines.append(run.update())
    return lines, {name: p.detach().clone() for name, p in run.algorithm.trained.named_parameters()}


CHANGING = {"rollout/logp_mismatch", "rollout/logp_mismatch_rms"}  # differences of rounding
RUNS = {
    "sft": ("sft", []),
    "sft dft": ("sft", ["--sft.loss_type=dft"]),
    "dpo": ("dpo", ["--dpo.loss_type=[sigmoid, bco_pair, sft]", "--dpo.loss_weights=[0.8, 0.2, 1]"]),
    "dpo with options": ("dpo", ["--dpo.use_weighting=true", "--dpo.ld_alpha=0.5", "--reference.sync_ref_model=true",
                                 "--reference.ref_model_sync_steps=1"]),
    "dpo precomputed": ("dpo", ["--dpo.precompute_ref_log_probs=true"]),
    "kto": ("kto", ["--kto.undesirable_weight=0.7", "--kto.max_steps=3"]),
    "reward_model": ("reward_model", ["--reward_model.center_rewards_coefficient=0.1"]),
    "grpo": ("grpo", []),
    "grpo with options": ("grpo", ["--grpo.num_iterations=2", "--grpo.steps_per_generation=2", "--grpo.beta=0.1",
                                   "--grpo.top_entropy_quantile=0.6", "--grpo.entropy_coef=0.05", "--grpo.max_steps=4",
                                   "--grpo.mask_truncated_completions=true"]),
    **{f"grpo {name}": ("grpo", [f"--grpo.loss_type={name}", "--grpo.num_iterations=2", "--grpo.beta=0.1"])
       for name in ("dr_grpo", "rloo", "vespo")},  # one of each kind of divisor
    "grpo rloo normalized": ("grpo", ["--grpo.loss_type=rloo", "--grpo.beta=0.1", "--grpo.normalize_advantages=true",
                                      "--grpo.reward_clip_range=[0, 0.5]", "--grpo.num_iterations=2"]),
    "grpo resampled": ("grpo", ["--grpo.max_num_gen_batches=3", "--sampling.max_new_tokens=1",
                                "--grpo.num_generations=2"]),
    "ppo shared": ("ppo", ["--ppo.num_mini_batches=2", "--ppo.num_ppo_epochs=2", "--ppo.max_steps=5",
                           "--ppo.whiten_rewards=true", "--ppo.missing_eos_penalty=0.5"]),
    "ppo separate": ("ppo", ["--ppo.critic=separate", "--ppo.max_steps=5"]),
}  # fmt: skip


OF_ROWS = {"grpo rloo", "grpo rloo normalized", "grpo vespo"}  # clip ratios and phi are means over rows there


@pytest.mark.parametrize("name", RUNS)
def test_micro_batch_size(folder, name):
    """Neither loss, gradient and weights nor what is logged depends on it; some metrics are float32."""
    stage, options = RUNS[name]
    lines, weights = steps(folder, stage, *options)
    assert all(line["grad_norm"] > 1e-6 for line in lines)
    others, same_weights = steps(folder, stage, *options, f"--{stage}.micro_batch_size=1")
    for line, other in zip(lines, others, strict=True):
        assert line.keys() == other.keys()
        for metric in ("loss", "grad_norm"):
            assert other[metric] == pytest.approx(line[metric], rel=1e-12, abs=1e-13), metric
        for metric in line.keys() - CHANGING:
            if name in OF_ROWS and metric.startswith(("clip_ratio", "vespo")):
                continue  # averaged by tokens all the same
            if metric == "rewards/accuracies" and abs(line["rewards/margins"]) < 1e-9:
                continue  # policy and reference are equal: rounding decides
            assert other[metric] == pytest.approx(line[metric], rel=1e-5, abs=1e-6), metric
    for parameter, value in weights.items():
        torch.testing.assert_close(same_weights[parameter], value, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("stage", ["sft", "dpo", "reward_model"])
def test_pictures_in_later_turns(folder, stage):
    """Conversations packed together train as each by itself does."""
    (lines, weights), (others, alone) = (
        steps(folder, stage, f"--{stage}.micro_batch_size={size}", rows=Looking) for size in (4, 1)
    )
    for line, other in zip(lines, others, strict=True):
        assert line["grad_norm"] > 1e-6
        assert other["loss"] == pytest.approx(line["loss"], rel=1e-12, abs=1e-13)
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-12)
    for name, value in weights.items():
        torch.testing.assert_close(alone[name], value, rtol=1e-12, atol=1e-12)


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
    lines, weights = steps(folder, stage, *options)
    reorder(monkeypatch, [2, 0, 3, 1])
    others, same_weights = steps(folder, stage, *options)
    for line, other in zip(lines, others, strict=True):
        assert other["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-11)
        for name in line.keys() - CHANGING:
            if name == "rewards/accuracies" and abs(line["rewards/margins"]) < 1e-9:
                continue  # policy and reference are equal: rounding decides
            assert other[name] == pytest.approx(line[name], rel=1e-6, abs=1e-7), name  # rewards are float32
    for parameter, value in weights.items():
        torch.testing.assert_close(same_weights[parameter], value, rtol=1e-11, atol=1e-12)
