"""Bugs of the field, put into the installed TRL by monkey patches: what the audit must name.

Most replace a piece of a method's source by what once was there, or is elsewhere. Import it where TRL is there.
"""

import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import transformers
from trl.trainer import dpo_trainer, grpo_trainer, sft_trainer

GRPO, DPO, SFT = grpo_trainer.GRPOTrainer, dpo_trainer.DPOTrainer, sft_trainer.SFTTrainer
OFF = {"num_iterations": 2, "rows": 4, "learning_rate": 2e-2}  # the second step is off-policy
SCORE = "_generate_and_score_completions"


@dataclass
class Bug:
    """A patch, the options that let it show, and what the audit says of the last step."""

    name: str
    link: str
    stage: str
    cause: str  # is in the names of the first set of causes, or its sentences
    patch: Callable  # (monkeypatch, trainer class) -> None, before the trainer is made; or see `late`
    kind: str = "grpo"
    options: dict = field(default_factory=dict)
    late: bool = False  # patch(monkeypatch, trainer)
    at: int = 0  # the step that is audited


def edit(owner, method: str, old: str, new: str) -> Callable:
    """A patch that replaces a piece of a method's source."""

    def patch(monkeypatch, _):
        function = inspect.unwrap(getattr(owner, method))
        source = textwrap.dedent(inspect.getsource(function)).replace("super()", f"super({owner.__name__}, self)")
        assert old in source, f"{method} has no {old!r}"
        source = source[source.index("def ") :].replace(old, new)
        scope = dict(function.__globals__)
        exec(source, scope)
        monkeypatch.setattr(owner, method, scope[method])

    return patch


def loss(old: str, new: str) -> Callable:
    return edit(GRPO, "_compute_loss", old, new)


def score(old: str, new: str) -> Callable:
    return edit(GRPO, SCORE, old, new)


def dpo(old: str, new: str) -> Callable:
    return edit(DPO, "_compute_loss", old, new)


def without(*names: str, reference: bool = False) -> Callable:
    """The forward lacks some inputs: all forwards, or the reference's."""

    def patch(monkeypatch, _):
        inner = GRPO._get_per_token_logps_and_entropies

        def outer(self, model, *arguments, **options):
            if not reference or model is self.ref_model:
                options = {name: value for name, value in options.items() if name not in names}
            return inner(self, model, *arguments, **options)

        monkeypatch.setattr(GRPO, "_get_per_token_logps_and_entropies", outer)

    return patch


def text_in_reference(monkeypatch, _):
    """A reference pass that leaves out the picture: its embeddings are those of the placeholders."""
    inner = GRPO._get_per_token_logps_and_entropies

    def outer(self, model, *arguments, **options):
        if model is self.ref_model:
            options |= {"pixel_values": None, "image_grid_thw": None, "mm_token_type_ids": None, "num_images": None}
        return inner(self, model, *arguments, **options)

    monkeypatch.setattr(GRPO, "_get_per_token_logps_and_entropies", outer)


def no_temperature(monkeypatch, _):
    inner = grpo_trainer.add_fused_lm_head
    monkeypatch.setattr(grpo_trainer, "add_fused_lm_head", lambda model, temperature=1.0, **o: inner(model, **o))


def shuffled_without_advantages(monkeypatch, _):
    inner = grpo_trainer.shuffle_sequence_dict
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda x: inner(x) | {"advantages": x["advantages"]})


def pictures_of_others(monkeypatch, _):
    """pixel_values.repeat where repeat_interleave was meant: rows get the pictures of others."""
    inner = GRPO._get_per_token_logps_and_entropies

    def outer(self, model, ids, *arguments, pixel_values=None, **options):
        n = len(ids)
        patches = pixel_values.view(n, -1, pixel_values.shape[1]).roll(-1, 0).flatten(0, 1)
        return inner(self, model, ids, *arguments, pixel_values=patches, **options)

    monkeypatch.setattr(GRPO, "_get_per_token_logps_and_entropies", outer)


def dropped_gradients(monkeypatch, trainer):
    inner = trainer.training_step

    def step(model, *arguments, **options):
        model.zero_grad()
        return inner(model, *arguments, **options)

    monkeypatch.setattr(trainer, "training_step", step)


def clipped_parts(monkeypatch, trainer):
    inner = trainer.training_step

    def step(model, *arguments, **options):
        before = {name: p.grad for name, p in model.named_parameters()}
        model.zero_grad()
        loss = inner(model, *arguments, **options)
        torch.nn.utils.clip_grad_norm_(model.parameters(), trainer.args.max_grad_norm)
        for name, p in model.named_parameters():
            if before[name] is not None:
                p.grad = before[name] if p.grad is None else p.grad + before[name]
        return loss

    monkeypatch.setattr(trainer, "training_step", step)


def all_decay(monkeypatch, _):
    names = lambda self, model: [name for name, _ in model.named_parameters()]  # noqa: E731
    monkeypatch.setattr(transformers.Trainer, "get_decay_parameter_names", names)


def never_clipped(monkeypatch, trainer):
    norm = torch.nn.utils.get_total_norm
    monkeypatch.setattr(
        trainer, "_clip_grad_norm", lambda model: norm([p.grad for p in model.parameters() if p.grad is not None])
    )


def lost_state(monkeypatch, trainer):
    class Forget(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, **_):
            for values in trainer.optimizer.state.values():
                values["exp_avg"].zero_(), values["exp_avg_sq"].zero_(), values["step"].zero_()

    trainer.callback_handler.callbacks.append(Forget())  # after those that look


def two_schedule_steps(monkeypatch, trainer):
    inner = trainer.create_scheduler

    def create(*arguments, **options):
        scheduler = inner(*arguments, **options)
        step = scheduler.step
        monkeypatch.setattr(scheduler, "step", lambda *a, **k: (step(), step())[1])
        return scheduler

    monkeypatch.setattr(trainer, "create_scheduler", create)


def frozen_tower(monkeypatch, trainer):
    trainer.model.model.visual.requires_grad_(False)


def frozen_layer(monkeypatch, trainer):
    for name, p in trainer.model.named_parameters():
        p.requires_grad_("layers.0." not in name)


def reference_by_policy(monkeypatch, _):
    """As with an adapter that is not disabled: what is to be the reference is the policy."""
    inner = GRPO._get_per_token_logps_and_entropies

    def outer(self, model, *arguments, **options):
        return inner(self, self.model, *arguments, **options)

    monkeypatch.setattr(GRPO, "_get_per_token_logps_and_entropies", outer)


def unlabelled_end(monkeypatch, trainer):
    """The end token is the padding token, so the collator ignores it."""
    inner = trainer.data_collator

    def collate(examples):
        batch = inner(examples)
        for labels in batch["labels"]:
            labels[(labels != -100).nonzero()[-1]] = -100
        return batch

    monkeypatch.setattr(trainer, "data_collator", collate)


RATIO = "log_importance_weights = (log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)"
HUB = "https://github.com/"


def missing(completions, **_):
    """No judgement of two completions."""
    return [None if i in (1, 6) else float(len(chat[0]["content"])) for i, chat in enumerate(completions)]


MEANS = "mean_grouped_rewards.repeat_interleave(num_generations, dim=0)"
ADVANTAGES = 'advantages = inputs["advantages"]'
SUM, PARTS = "loss = (per_token_loss * mask).sum()", "self.current_gradient_accumulation_steps"
BUGS = [
    Bug(
        "std with n",
        HUB + "unslothai/unsloth-zoo/pull/832",
        "advantages",
        "ddof 0",
        lambda m, _: m.setattr(
            grpo_trainer,
            "nanstd",
            lambda x, dim=None, keepdim=False: (
                x.std(dim, correction=0, keepdim=keepdim) if dim is not None else x.std(correction=0)
            ),
        ),
    ),
    Bug(
        "epsilon 1e-6",
        HUB + "unslothai/unsloth-zoo/pull/832",
        "advantages",
        "epsilon 1e-06",
        score("(std_rewards + 1e-4)", "(std_rewards + 1e-6)"),
    ),
    Bug(
        "reward weights ignored",
        HUB + "om-ai-lab/VLM-R1",
        "advantages",
        "reward weights ignored",
        score("self.reward_weights.to(device)", "torch.ones(2)"),
        options={"reward_weights": [1.0, 0.3]},
    ),
    Bug(
        "batch std",
        HUB + "huggingface/trl/issues/3708",
        "advantages",
        "scaled by batch",
        score(
            "nanstd(rewards.view(-1, num_generations), dim=1)",
            "nanstd(rewards).expand(len(rewards) // num_generations)",
        ),
    ),
    Bug(
        "no reward is 0",
        "TRL up to 1.5",
        "advantages",
        "missing is 0",
        score("rewards[unscorable_mask] = torch.nan", "pass"),
        options={"rewards": (missing,)},
    ),
    Bug(
        "shuffled without advantages",
        HUB + "Deep-Agent/R1-V/pull/54",
        "rows",
        "rows not shuffled",
        shuffled_without_advantages,
    ),
    Bug(
        "end token masked",
        HUB + "huggingface/trl/pull/7039",
        "mask",
        "mask: no end",
        score(
            "loss_mask = completion_mask",
            "completion_mask *= completion_ids != self.eos_token_ids[0]\n    loss_mask = completion_mask",
        ),
    ),
    Bug(
        "padding counted",
        HUB + "lsdefine/simple_GRPO",
        "mask",
        "mask: padding",
        score(
            "loss_mask = completion_mask",
            "completion_mask = torch.ones_like(completion_mask)\n    loss_mask = completion_mask",
        ),
    ),
    Bug(
        "truncated completions kept",
        HUB + "huggingface/trl/pull/2881",
        "mask",
        "truncated counted",
        score("if self.mask_truncated_completions:", "if False:"),
        options={"mask_truncated_completions": True, "max_completion_length": 3},
    ),
    Bug(
        "divided twice",
        HUB + "modelscope/ms-swift/issues/10117",
        "loss",
        "divided once more by the 2 micro-batches",
        loss(SUM + " / normalizer\n", f"{SUM} / normalizer / {PARTS}\n"),
    ),
    Bug(
        "not divided",
        HUB + "huggingface/trl/issues/3021",
        "loss",
        "not divided by the 2 micro-batches",
        loss("loss = loss / normalizer", "pass"),
        options={"loss_type": "grpo"},
    ),
    Bug(
        "mean of means",
        "https://arxiv.org/abs/2604.23747",
        "loss",
        "mean of means",
        loss(SUM + " / normalizer\n", f"{SUM} / mask.sum() / {PARTS}\n"),
    ),
    Bug(
        "a row's mean",
        HUB + "huggingface/trl/issues/2995",
        "loss",
        "averaged as grpo",
        loss(SUM + " / normalizer\n", f"loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1)).mean() / {PARTS}\n"),
    ),
    Bug(
        "window of the rollout",
        HUB + "huggingface/trl/pull/6024",
        "loss",
        "2 steps of a rollout",
        options={"steps_per_generation": 4, "rows": 8},
        patch=loss(
            "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation", "normalizer"
        ),
    ),
    Bug(
        "gradient of exactly zero",
        HUB + "Goekdeniz-Guelmez/mlx-lm-lora/issues/55",
        "loss",
        "gradient of the ratio is 0",
        loss("per_token_logps.detach() if old", "per_token_logps if old"),
    ),
    Bug(
        "KL reversed",
        HUB + "volcengine/verl",
        "loss",
        "KL reversed",
        at=1,
        options={"beta": 0.5, **OFF, "use_bias_correction_kl": False},
        patch=loss(
            "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1",
            "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1",
        ),
    ),
    Bug(
        "KL subtracted",
        HUB + "huggingface/trl",
        "loss",
        "KL with the wrong sign",
        loss("+ self.beta * per_token_kl", "- self.beta * per_token_kl"),
        at=1,
        options={"beta": 0.5, **OFF},
    ),
    Bug(
        "KL without ratio",
        "TRL up to 1.9",
        "loss",
        "KL corrected the other way",
        loss("per_token_kl * coef_1", "per_token_kl"),
        at=1,
        options={"beta": 0.5, **OFF},
    ),
    Bug(
        "old ignored",
        HUB + "huggingface/trl/issues/2769",
        "loss",
        "old ignored",
        loss('inputs.get("old_per_token_logps")', "None"),
        at=1,
        options=OFF,
    ),
    Bug(
        "clip on the wrong side",
        "PPO eq. 7",
        "loss",
        "clip on the wrong side",
        loss("-torch.min(per", "-torch.max(per"),
        at=1,
        options=OFF,
    ),
    Bug(
        "one clip for both sides",
        "https://arxiv.org/abs/2503.14476",
        "loss",
        "epsilon_high ignored",
        loss("1 + self.epsilon_high)", "1 + self.epsilon_low)"),
        at=1,
        options={"epsilon": 0.02, "epsilon_high": 0.1, **OFF},
    ),
    Bug(
        "GSPO of sums",
        HUB + "volcengine/verl/pull/2775",
        "loss",
        "ratio by sequence_sum",
        loss(RATIO, "log_importance_weights = (log_ratio * mask).sum(-1)"),
        at=1,
        options={"importance_sampling_level": "sequence", **OFF, "learning_rate": 3e-4},
    ),
    Bug(
        "Dr. GRPO by the longest",
        HUB + "sail-sg/understand-r1-zero",
        "loss",
        "all of it is",
        loss("per_token_loss.size(0) * self.max_completion_length", "per_token_loss.numel()"),
        options={"loss_type": "dr_grpo", "max_completion_length": 30},
    ),
    Bug(
        "entropy punished",
        "sign of a bonus",
        "loss",
        "entropy with the wrong sign",
        loss("loss = loss - apply_coef", "loss = loss + apply_coef"),
        options={"entropy_coef": 0.1},
    ),
    Bug(
        "no picture in the reference",
        HUB + "unslothai/unsloth/pull/11031",
        "logps of reference",
        "picture ignored",
        text_in_reference,
        options={"beta": 0.1},
    ),
    Bug(
        "temperature left out",
        HUB + "huggingface/trl/pull/3029",
        "logps",
        "temperature left out",
        no_temperature,
        options={"temperature": 0.6},
    ),
    Bug("text positions", HUB + "huggingface/trl/issues/5279", "logps", "text positions", without("mm_token_type_ids")),
    Bug("pictures of others", HUB + "Deep-Agent/R1-V/pull/49", "logps", "picture of another row", pictures_of_others),
    Bug(
        "gradients dropped",
        "https://arxiv.org/abs/2604.23747",
        "gradients",
        "only the last micro-batch",
        dropped_gradients,
        late=True,
    ),
    Bug(
        "clipped before accumulation",
        HUB + "huggingface/accelerate",
        "gradients",
        "clipped before accumulation",
        clipped_parts,
        late=True,
        options={"max_grad_norm": 0.01},
    ),
    Bug(
        "tower frozen",
        HUB + "om-ai-lab/VLM-R1/issues/52",
        "gradients",
        "no gradient: the vision tower",
        frozen_tower,
        late=True,
    ),
    Bug(
        "never clipped",
        HUB + "deepspeedai/DeepSpeed",
        "clip",
        "not clipped",
        never_clipped,
        late=True,
        options={"max_grad_norm": 0.01},
    ),
    Bug("norms decay", HUB + "karpathy/minGPT", "update", "decay on norms", all_decay, options={"weight_decay": 0.1}),
    Bug(
        "state lost",
        "https://arxiv.org/abs/2604.23747",
        "update",
        "state lost",
        lost_state,
        late=True,
        at=1,
        options={"rows": 4},
    ),
    Bug(
        "schedule twice as fast",
        HUB + "huggingface/accelerate",
        "schedule",
        "steps twice",
        two_schedule_steps,
        late=True,
        at=2,
        options={"max_steps": 10, "gradient_accumulation_steps": 3, "rows": 3},
    ),
    Bug(
        "DPO without reference",
        "DPO eq. 7",
        "loss",
        "no reference",
        dpo("ref_logps.chunk(2, dim=0)", "(ref_logps * 0).chunk(2, dim=0)"),
        "dpo",
    ),
    Bug(
        "DPO exchanged",
        "DPO eq. 7",
        "loss",
        "chosen and rejected exchanged",
        dpo("delta_score = chosen_scores - rejected_scores", "delta_score = rejected_scores - chosen_scores"),
        "dpo",
    ),
    Bug(
        "DPO prompt counted",
        HUB + "huggingface/trl",
        "loss",
        "mean log-probabilities",
        dpo(
            "delta_score = chosen_scores - rejected_scores",
            "a, b = shift_completion_mask.sum(1).chunk(2)\n    delta_score = chosen_scores / a - rejected_scores / b",
        ),
        "dpo",
    ),
    Bug(
        "SFT mean of rows",
        "https://arxiv.org/abs/2604.23747",
        "loss",
        "mean of rows",
        edit(
            SFT,
            "compute_loss",
            "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)",
            "loss = (per_token_loss.sum(1) / outputs.label_mask.sum(1)).mean()",
        ),
        "sft",
    ),
    Bug(
        "variance for deviation",
        "DeepSeekMath eq. 21",
        "advantages",
        "variance for deviation",
        score("(std_rewards + 1e-4)", "(std_rewards ** 2 + 1e-4)"),
    ),
    Bug(
        "baseline of the batch",
        HUB + "OpenRLHF/OpenRLHF",
        "advantages",
        "centred on batch",
        score(MEANS, "torch.nanmean(rewards).expand_as(rewards)"),
    ),
    Bug(
        "means tiled",
        HUB + "StarsfieldAI/R1-V/pull/54",
        "advantages",
        "means of groups tiled",
        score(MEANS, "mean_grouped_rewards.repeat(num_generations)"),
    ),
    Bug(
        "groups of half the size",
        HUB + "StarsfieldAI/R1-V/pull/49",
        "advantages",
        "groups: halves",
        score("num_generations = self.num_generations if", "num_generations = self.num_generations // 2 if"),
    ),
    Bug(
        "beta twice",
        "DeepSeekMath eq. 4",
        "loss",
        "beta twice",
        loss("self.beta * per_token_kl", "self.beta * self.beta * per_token_kl"),
        at=1,
        options={"beta": 0.3, **OFF, "use_bias_correction_kl": False},
    ),
    Bug(
        "advantages whitened",
        HUB + "hiyouga/EasyR1",
        "loss",
        "advantages whitened",
        loss(
            ADVANTAGES, f"{ADVANTAGES}\n    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)"
        ),
    ),
    Bug(
        "no clip below",
        "PPO eq. 7",
        "loss",
        "no clip below",
        loss("torch.clamp(coef_1, 1 - self.epsilon_low, 1 + ", "torch.clamp(coef_1, max=1 + "),
        at=1,
        options=OFF,
    ),
    Bug(
        "ratio inverted",
        "PPO eq. 6",
        "loss",
        "ratio inverted",
        loss("log_ratio = per_token_logps - old_per_token_logps", "log_ratio = old_per_token_logps - per_token_logps"),
        at=1,
        options=OFF,
    ),
    Bug(
        "padding in the mean",
        HUB + "verl-project/verl",
        "loss",
        "divided by padded length",
        loss(SUM + " / normalizer\n", f"loss = (per_token_loss * mask).mean() / {PARTS}\n"),
    ),
    Bug("a layer frozen", "requires_grad", "gradients", "some parameters", frozen_layer, late=True),
    Bug(
        "reference by the policy",
        HUB + "huggingface/trl",
        "logps of reference",
        "weights of the policy",
        reference_by_policy,
        at=1,
        options={"beta": 0.1, "learning_rate": 2e-2, "rows": 4},
    ),
    Bug(
        "DPO hinge",
        "SLiC, arXiv 2305.10425",
        "loss",
        "loss hinge",
        dpo("-F.logsigmoid(self.beta * delta_score)", "torch.relu(1 - self.beta * delta_score)"),
        "dpo",
    ),
    Bug("DPO without beta", "DPO eq. 7", "loss", "beta 1", dpo("self.beta * delta_score", "delta_score"), "dpo"),
    Bug("SFT end masked", HUB + "huggingface/transformers", "mask", "mask: no end", unlabelled_end, "sft", late=True),
]
