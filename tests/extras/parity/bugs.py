"""List bugs, most of them from public projects, and patches that put each bug into the installed TRL."""

import functools
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pkgutil import resolve_name

import torch
from torch.nn.utils import clip_grad_norm_


@dataclass
class InTRL:
    """A bug in TRL: its patch, options that reveal the bug, and the expected report."""

    stage: str  # the only audited stage that must differ
    cause: str  # texts, separated by commas, that a printed explanation must contain
    patch: Callable  # patch(put, trainer) puts the bug into a trainer; put is setattr or monkeypatch.setattr
    options: dict = field(default_factory=dict)  # options for trl_fixtures.dumped that reveal the bug
    kind: str = "grpo"  # "grpo", "turns" (GRPO with tool calls), "dpo" or "sft"


def around(owner, name: str, change: Callable) -> Callable:
    """Return a patch that replaces owner.name(*arguments) by change(original function, *arguments).

    If `owner` is None, the patch replaces a method of the trainer.
    """

    def put_in(put, trainer=None):
        function = getattr(owner or trainer, name)

        @functools.wraps(function)  # trainers read the names of arguments
        def changed(*arguments, **options):
            return change(function, *arguments, **options)

        put(owner or trainer, name, changed)

    return put_in


# Most patches replace some lines in the source of a method with wrong lines, for example from an older release of TRL.


def edited(method: str, stage: str, cause: str, old: str, new: str, options: dict | None = None, kind="grpo") -> InTRL:
    """Return a bug that replaces the text `old` with `new` in the source of a trainer's method."""

    def put_in(put, trainer):
        owner = type(trainer)
        function = inspect.unwrap(getattr(owner, method))
        source = textwrap.dedent(inspect.getsource(function)).replace("super()", f"super({owner.__name__}, self)")
        assert old in source, f"The source of {method} does not contain {old!r}."
        source = source[source.index("def ") :].replace(old, new)
        scope = dict(function.__globals__)
        exec(source, scope)
        put(owner, method, scope[method])

    return InTRL(stage, cause, put_in, options or {}, kind)


OFF = {"num_iterations": 2, "rows": 4, "learning_rate": 2e-2, "at": 1}  # the second step is off-policy
KL = {"beta": 0.5, **OFF}
BY_SEQUENCE = {"importance_sampling_level": "sequence", "learning_rate": 3e-4}
CLIPS = {"max_grad_norm": 0.01}
FOUR_PAIRS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 1, "rows": 8, "learning_rate": 2e-2, "at": 1
}  # fmt: skip
TELL = {"tools": ("tell",)}
LATER = {"rows": 4, "at": 1}
LABELS = "labels[:, :-logits_to_keep] = -100"
MASK = "loss_mask = completion_mask"
NO_NAN = "advantages = torch.nan_to_num(advantages, nan=0.0)"
NORMALIZED = "advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-4)"
MEANS = "mean_grouped_rewards.repeat_interleave(num_generations, dim=0)"
REWARDS = "rewards_per_func = self._calculate_rewards(inputs, prompts, completions, completion_ids_list)"
PARTS = "self.current_gradient_accumulation_steps"
SUM = "loss = (per_token_loss * mask).sum()"
KL_TERM = "per_token_loss + self.beta * per_token_kl"
K3 = "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
ROW_MEANS = "loss = ((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
DELTA = "delta_score = chosen_scores - rejected_scores"
PCT = "prompt_ids[idx_with_tool] + completion_ids[idx_with_tool] + suffix_ids"
OWN = "completion_ids[idx_with_tool]"
ENCODED_AGAIN = PCT.replace(OWN, f"self._tokenizer.encode(self._tokenizer.decode({OWN}))")
ADDED = "tool_mask[idx_with_tool] += [0] * tool_length + [1] * post_tool_length"
MERGED = "images = [(existing or []) + new for existing, new in zip(images, tool_images, strict=True)]"
ENDED = "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids_list], device=device)"
IDS = "completion_ids = [torch.tensor(ids) for ids in completion_ids_list]"
BEGIN, IN_REFERENCE = "all_logps = []", "if model is self.ref_model:\n        "
PATCHES = "pixel_values[row_start:row_end]"
IMAGES = f"{PATCHES}.unflatten(0, (len(image_grid_thw), -1))"  # (images, patches, patch_dim); all sizes are equal
OLD = 'output["old_per_token_logps"] = old_per_token_logps'
CLIPPED = "return self.accelerator.clip_grad_norm_(model.parameters(), self.args.max_grad_norm)"
DIVIDED = "advantages / (std_rewards + 1e-4)"
LOG_RATIO = "log_ratio = per_token_logps - old_per_token_logps"
SMALLER = "-torch.min(per_token_loss1, per_token_loss2)"
STEPPED = "self._step += 1"
SHUFFLED = "shuffle_sequence_dict(generation_batch)"

loss = partial(edited, "_compute_loss", "loss")
dpo, sft_loss = partial(loss, kind="dpo"), partial(edited, "compute_loss", "loss", kind="sft")
score = partial(edited, "_generate_and_score_completions")
forward = partial(edited, "_get_per_token_logps_and_entropies")
clip = partial(edited, "_clip_grad_norm", "clip")
optimizer, decay = partial(edited, "create_optimizer", "update"), partial(edited, "get_decay_parameter_names", "update")


def rewards(cause: str, change: str, text: str = REWARDS) -> InTRL:
    return score("advantages", cause, text, text + change)


def weighted(cause: str, weight: str) -> InTRL:
    return loss(cause, SUM, SUM.replace("* mask", f"* mask * {weight}"))


# edits of GRPO trainers whose completions call tools
loop, turns_loss = partial(edited, "_tool_call_loop", kind="turns"), partial(edited, "_compute_loss", kind="turns")


def with_dropout(function, model, *arguments, **options):
    """Compute the old log-probabilities with dropout in the attention."""
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.0 if torch.is_grad_enabled() else 0.3
    return function(model, *arguments, **options)


ENDS_WITH_PICTURES = (
    "{% for message in messages %}{% for part in message.content | reverse %}"
    "{{ part.text if part.type == 'text' else '<|image_pad|>' }}{% endfor %}{% endfor %}"
)


def axes_apart(put, trainer):
    """Continue the positions of each axis from the largest of this axis."""

    def compute(rope_index, input_ids, mm_token_type_ids, **named):
        positions, deltas = rope_index(input_ids, mm_token_type_ids, **named)
        for row, kinds in zip(positions.unbind(1), mm_token_type_ids, strict=True):
            begin = int(kinds.nonzero().max()) + 1
            row[:, begin:] = row[:, :begin].amax(1, keepdim=True) + torch.arange(1, row.shape[1] - begin + 1)
        return positions, deltas

    put(trainer.processing_class, "chat_template", ENDS_WITH_PICTURES)
    around(trainer.model.model, "get_rope_index", compute)(put)


def clip_own(training_step, model, *arguments):
    before = {p: p.grad for p in model.parameters()}
    model.zero_grad()
    loss = training_step(model, *arguments)
    clip_grad_norm_(model.parameters(), CLIPS["max_grad_norm"])
    for p, earlier in before.items():
        if earlier is not None:
            p.grad = earlier if p.grad is None else p.grad + earlier
    return loss


def without_temperature(put, trainer):
    resolve_name("trl.trainer.utils:add_fused_lm_head")(trainer.model, outputs=("log_probs", "entropy"))


def label_texts(put, trainer):
    """Compute the loss on all tokens except images and padding."""

    def change(collate, examples):
        batch = collate(examples)
        is_image = batch["input_ids"] == trainer.model.config.image_token_id
        batch["labels"] = batch["input_ids"].masked_fill(is_image | (batch["attention_mask"] == 0), -100)
        return batch

    around(None, "data_collator", change)(put, trainer)


def images_of_the_next_row(collate, examples):
    batch = collate(examples)
    rows = len(batch["input_ids"])  # each row has one image, and all images have the same size
    batch["pixel_values"] = batch["pixel_values"].unflatten(0, (rows, -1)).roll(-1, 0).flatten(0, 1)
    return batch


def double_merger(put, trainer):
    for p in trainer.model.model.visual.merger.parameters():
        p.register_hook(lambda gradient: 2 * gradient)


def two_scheduler_steps(create_scheduler, *arguments, **options):
    scheduler = create_scheduler(*arguments, **options)
    step = scheduler.step
    scheduler.step = lambda *a, **k: (step(), step())[1]
    return scheduler


def equal_later(completions, trainer_state, **_):
    """Return rewards that are equal from the second step on, so that all advantages are 0."""
    return [float(len(chat[0]["content"])) if trainer_state.global_step == 0 else 1.0 for chat in completions]


def two_missing_rewards(completions, **_):
    return [None if i in (1, 6) else float(len(chat[0]["content"])) for i, chat in enumerate(completions)]


# bugs that are put into TRL; comments name the source of a bug
TRL_BUGS = {
    "std_with_n": score("advantages", "by n instead of n", "nanstd(rewards.view(-1, num_generations), dim=1)",
        "rewards.view(-1, num_generations).std(dim=1, correction=0)"),  # unslothai/unsloth-zoo/pull/832
    # StarsfieldAI/R1-V/pull/54
    "pictures_of_others": forward("logps", "a row has the images of", PATCHES, f"{IMAGES}.roll(-1, 0).flatten(0, 1)"),
    "no_picture_in_reference": forward("logps of reference", "the model does not see any image", BEGIN,
        f"{IN_REFERENCE}pixel_values = image_grid_thw = mm_token_type_ids = num_images = None\n    {BEGIN}",
        {"beta": 0.1}),  # unslothai/unsloth/pull/11031
    "gradient_of_zero": loss("old log-probabilities are not detached", "per_token_logps.detach() if old",
        "per_token_logps if old"),  # Goekdeniz-Guelmez/mlx-lm-lora/issues/55
    # modelscope/ms-swift/issues/10117
    "divided_twice": loss("divided by the number of micro-batches", f"{SUM} / normalizer\n",
        f"{SUM} / normalizer / {PARTS}\n"),
    "not_divided": loss("multiplied by the number of micro-batches", "loss = loss / normalizer", "pass",
        {"loss_type": "grpo"}),  # verl-project/verl/pull/436
    "mean_of_means": loss("each micro-batch is averaged by itself", f"{SUM} / normalizer\n",
        f"{SUM} / mask.sum() / {PARTS}\n"),  # https://arxiv.org/abs/2604.23747
    "dropped_gradients": edited("training_step", "gradients", "earlier micro-batches are dropped", "output = ",
        "model.zero_grad()\n    output = "),  # bytetriper/RAE/issues/67
    "clipped_before_accumulation": InTRL("gradients", "micro-batch is clipped by itself", around(None, "training_step",
        clip_own), CLIPS),  # facebookresearch/lingua/pull/59
    # NVIDIA/OpenSeq2Seq/pull/192
    "never_clipped": clip("not clipped", CLIPPED, CLIPPED.replace("self.args.max_grad_norm", "torch.inf"), CLIPS),
    # huggingface/trl/pull/3029
    "temperature_left_out": InTRL("logps", "not divided by the temperature", without_temperature, {"temperature": 0.6}),
    "end_token_masked": score("mask", "the end token is not trained on", MASK,  # huggingface/trl/pull/7039
        f"completion_mask *= completion_ids != self.eos_token_ids[0]\n    {MASK}"),
    "padding_counted": score("mask", "padding is counted as part of the completion", MASK,
        f"completion_mask = torch.ones_like(completion_mask)\n    {MASK}"),  # modelscope/ms-swift/issues/3069
    "old_ignored": loss("old log-probabilities equal the current ones", 'inputs.get("old_per_token_logps")', "None",
        OFF),  # huggingface/trl/issues/2769
    # huggingface/accelerate/issues/963
    "schedule_by_micro_batch": InTRL("schedule", "advances twice per step", around(None, "create_scheduler",
        two_scheduler_steps), {"max_steps": 10, "gradient_accumulation_steps": 3, "rows": 3, "at": 2}),
    "text_positions_in_training": forward("logps", "positions are 1-D", "if mm_token_type_ids is not None:",
        "if False:"),  # huggingface/trl/issues/5279
    "positions_by_axis": InTRL("logps", "largest position of each axis", axes_apart),  # InternLM/xtuner/pull/2097
    "reward_weights_ignored": score("advantages", "all rewards have weight 1", "self.reward_weights.to(device)",
        "torch.ones(2)", {"reward_weights": [1.0, 0.3]}),  # om-ai-lab/VLM-R1
    "batch_std": score("advantages", "deviation of all rewards of the rollout",  # huggingface/trl/issues/3708
        "nanstd(rewards.view(-1, num_generations), dim=1)", "nanstd(rewards).expand(len(rewards) // num_generations)"),
    "no_reward_is_0": score("advantages", "without any reward gets the reward 0",  # TRL up to 1.5
        "rewards[unscorable_mask] = torch.nan", "pass", {"rewards": (two_missing_rewards, )}),
    "means_tiled": score("advantages", "the row that repeat gives instead of repeat_interleave", MEANS,
        "mean_grouped_rewards.repeat(num_generations)"),  # StarsfieldAI/R1-V/pull/54
    # StarsfieldAI/R1-V/pull/49
    "groups_of_half_the_size": score("advantages", "groups contain half as many completions",
        "num_generations = self.num_generations if", "num_generations = self.num_generations // 2 if"),
    "shuffled_without_advantages": edited("_prepare_inputs", "rows", "their advantages were not", SHUFFLED,
        f'{SHUFFLED} | {{"advantages": generation_batch["advantages"]}}'),  # Deep-Agent/R1-V/pull/54
    "truncated_completions_kept": score("mask", "truncated completions are in the loss",  # huggingface/trl/pull/2881
        "if self.mask_truncated_completions:", "if False:", {"mask_truncated_completions": True,
        "max_completion_length": 3}),
    "normalizer_of_one_step_of_a_rollout": loss("steps of a rollout",  # huggingface/trl/pull/6024
        f"normalizer * {PARTS} / self.args.steps_per_generation", "normalizer", {"steps_per_generation": 4, "rows": 8}),
    "kl_reversed": loss("policy and reference are swapped in the KL", K3,  # volcengine/verl
        "torch.exp(per_token_logps - ref_per_token_logps) - (per_token_logps - ref_per_token_logps) - 1", {**KL,
        "use_bias_correction_kl": False}),
    # TRL 1.16 itself has this bug, so nothing is replaced; google/tunix/issues/2315
    "k3_by_exp": loss("k3 loses its digits", K3, K3, {"beta": 0.5, "rewards": (equal_later, ), "rows": 4,
        "learning_rate": 1e-5, "at": 1}),
    "clip_on_the_wrong_side": loss("the maximum of the clipped and the unclipped objective", "-torch.min(per",
        "-torch.max(per", OFF),  # PPO eq. 7
    # the policy is its own reference, as when an adapter is not disabled
    # huggingface/trl
    "reference_by_policy": forward("logps of reference", "weights of the policy", BEGIN,
        f"{IN_REFERENCE}model = self.model\n    {BEGIN}", {"beta": 0.1, "learning_rate": 2e-2, "rows": 4, "at": 1}),
    "tower_frozen": InTRL("gradients", "do not get any gradient", lambda put,
        trainer: trainer.model.model.visual.requires_grad_(False)),  # om-ai-lab/VLM-R1/issues/52
    "norms_decay": decay("also applied to norms and biases", "return decay_parameters",  # karpathy/minGPT
        "return [name for name, _ in model.named_parameters()]", {"weight_decay": 0.1}),
    "state_lost": edited("_clip_grad_norm", "update", "the moments of Adam were reset", CLIPPED,
        "for values in self.optimizer.state.values():\n        for x in values.values():\n            x.zero_()\n"
        f"    {CLIPPED}", LATER),  # https://arxiv.org/abs/2604.23747
    "dpo_without_reference": dpo("the reference is left out", "ref_logps.chunk(2, dim=0)",
        "(ref_logps * 0).chunk(2, dim=0)"),  # bugs in the losses for DPO and SFT; DPO eq. 7
    "dpo_chosen_and_rejected_swapped": dpo("the rejected answer is preferred", DELTA,  # DPO eq. 7
        "delta_score = rejected_scores - chosen_scores"),
    "dpo_means": dpo("log-probabilities are averaged over tokens", DELTA,  # huggingface/trl
        "a, b = shift_completion_mask.sum(1).chunk(2)\n" "    delta_score = chosen_scores / a - rejected_scores / b"),
    "sft_mean_of_rows": sft_loss("each row of nll is averaged by itself",  # https://arxiv.org/abs/2604.23747
        "loss = per_token_loss.sum() / torch.as_tensor(num_tokens).clamp(min=1)",
        "loss = (per_token_loss.sum(1) / outputs.label_mask.sum(1)).mean()"),
    "rewards_by_view": rewards("rewards of, repeat", ".view(4, -1, 2).transpose(0, 1).reshape(-1, 2)"),
    "policy_term_twice": loss("policy term, is doubled", KL_TERM, f"2 * {KL_TERM}", KL),
    "dpo_rejected_of_the_next_pair": dpo("rejected answer of the next pair", DELTA, f"{DELTA}.roll(-1, 0)", FOUR_PAIRS),
    "merger_twice": InTRL("gradients", "", double_merger),
    "no_kl_for_negative_advantages": loss("the KL is left out, only for rows with negative advantages",
        "self.beta * per_token_kl", "self.beta * per_token_kl * (advantages > 0)", KL),
    "prompts_of_chosen_answers_counted": dpo("also counts the prompt, only for chosen answers", "labels = inputs",
        "completion_mask = torch.cat([inputs['attention_mask'].chunk(2)[0], completion_mask.chunk(2)[1]])\n"
        "    shift_completion_mask = completion_mask[..., 1:]\n    labels = inputs"),
    "old_logps_in_bfloat16": score("logps of old", "rounded to bfloat16", OLD, f"{OLD}.bfloat16().float()", OFF),
    # huggingface/trl/pull/3725
    "old_logps_of_a_straddling_rollout": score("logps of old", "instead of the weights that sampled", OLD, "pass",
        {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "rows": 8, "learning_rate": 2e-2, "at": 1}),
    "row_means_added": loss("the means of the rows are added within a micro-batch", ROW_MEANS,
        ROW_MEANS.replace(".mean()", ".sum()"), {"loss_type": "grpo"}),  # verl-project/verl/issues/7200
    "old_logps_with_dropout": InTRL("logps of old", "its dropout is active", around(None,
        "_get_per_token_logps_and_entropies", with_dropout), OFF),
    "advantages_as_mask": weighted("multiplied by its advantage", "advantages"),  # verl-project/verl/issues/2506
    "last_row_dropped": loss("only for the last row of each micro-batch", SUM,
        "loss = (per_token_loss * mask)[:-1].sum()"),
    "kl_by_token": loss("ratio of its token instead of its sequence", "per_token_kl * coef_1",
        "per_token_kl * torch.exp(log_ratio)", KL | BY_SEQUENCE),  # huggingface/trl/pull/6594
    "means_of_the_first_half": score("advantages", "the group's first half",  # ServiceNow/PipelineRL/pull/54
        "nanmean(rewards.view(-1, num_generations), dim=1)",
        "nanmean(rewards.view(-1, num_generations)[:, :2], dim=1)"),
    "tokens_before_the_shift": sft_loss("one token too many per row",
        "outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch",
        "outputs.label_mask.sum() + len(inputs['labels'])"),
    "dft_weight_with_gradient": sft_loss("not detached", "outputs.log_probs.exp().detach()", "outputs.log_probs.exp()",
        {"loss_type": "dft"}),  # modelscope/twinkle/pull/291
    "zero_grad_missing": InTRL("gradients", "of the step before", lambda put, trainer: put(trainer.model, "zero_grad",
        lambda *_, **__: None), LATER),  # meta-pytorch/torchforge/pull/71
    "one_missing_reward_voids_its_group": score("advantages", "one missing reward makes",
        "torch.nanmean(rewards.view(-1, num_generations), dim=1)", "rewards.view(-1, num_generations).mean(dim=1)",
        {"rewards": (two_missing_rewards, ), "rows": 8}),  # modelscope/ms-swift/issues/8123
    "norms_added": clip("the sum of the parameters' norms", CLIPPED,  # laekov/fastmoe/pull/65
        "norm = sum(p.grad.norm() for p in model.parameters() if p.grad is not None)\n"
        "    torch.nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)\n"
        "    return norm", CLIPS),
    "advantages_normalized_twice": score("advantages", "normalized a second time, over the batch", NO_NAN,
        f"{NO_NAN}; {NORMALIZED}"),
    "end_token_scored_as_padding": forward("logps", "the end token is scored as the padding token", LABELS,
        f"{LABELS}; labels[labels == self._tokenizer.eos_token_id] = self._tokenizer.pad_token_id"),
    "prompt_texts_trained": InTRL("mask", "also counts the text of the prompt", label_texts, kind="sft"),
    "means_added": loss("each micro-batch is averaged by itself, and the means are added", f"{SUM} / normalizer\n",
        f"{SUM} / mask.sum()\n"),
    "advantages_min_max": score("advantages", "from 0 to 1 (min-max)", DIVIDED,
        "((groups := rewards.view(-1, num_generations)) - groups.amin(1, True)).div("
        "groups.amax(1, True) - groups.amin(1, True) + 1e-4).flatten()"),
    "tool_responses_in_the_sum": turns_loss("loss", "also counts tool responses, only in the sum", SUM,
        "loss = (per_token_loss * completion_mask).sum()", TELL),  # alibaba/ROLL/pull/444
    # huggingface/trl/pull/5521
    "tool_responses_in_the_loss": loop("mask", "also counts tool responses", ADDED, ADDED.replace("[0]", "[1]")),
    # huggingface/trl/issues/5144
    "completions_encoded_again": loop("tokens", "decoded and encoded again", PCT, ENCODED_AGAIN, TELL),
    # THUDM/slime/issues/1847
    "images_of_tool_responses_lost": edited("_generate", "pictures", "lacks all images", MERGED, "pass", kind="turns"),
    "tool_responses_not_attended_to": turns_loss("tokens", "does not attend to tool responses",
        "torch.cat([prompt_mask, completion_mask], dim=1)",  # huggingface/trl/pull/4976
        'torch.cat([prompt_mask, completion_mask * inputs["tool_mask"]], dim=1)', TELL),
    "padding_before_prompts_attended_to": edited("_compute_loss", "tokens",
        "attend to the padding before the prompt",
        "torch.cat([prompt_mask, completion_mask], dim=1)",
        "torch.cat([torch.ones_like(prompt_mask), completion_mask], dim=1)"),
    "scored_tokens_that_were_not_sampled": score("tokens", "decoded and encoded again", IDS,
        IDS.replace("(ids)", "(self._tokenizer.encode(self._tokenizer.decode(ids)))")),
    "images_of_the_next_pair": InTRL("pictures", "a row has the images of", around(None, "data_collator",
        images_of_the_next_row), FOUR_PAIRS, "dpo"),
    "dpo_reference_is_the_policy": InTRL("logps of reference", "weights of the policy",
        lambda put, trainer: put(trainer, "ref_model", trainer.model), LATER | {"learning_rate": 2e-2}, "dpo"),
    "a_cut_completion_that_ended_a_turn": partial(score, kind="turns")("mask", "an earlier turn ended", ENDED,
        ENDED.replace("ids[-1] not in eos_and_pad", "not set(ids) & set(eos_and_pad)"), TELL | {"ends": 0.2,
        "mask_truncated_completions": True}),
}  # fmt: skip

# bugs that were written without looking at the causes of the audit; with an empty cause, no cause may be printed
UNSEEN_BUGS = {
    "half of the mean is subtracted": score("advantages", "the baseline is halved", MEANS, f"{MEANS} / 2"),
    "1 is added to the deviation": score("advantages", "instead of 1e-4 is 1", DIVIDED, DIVIDED.replace("1e-4", "1.0")),
    # rewards or advantages of the next group give the same numbers, so the report may name either
    "advantages of the next group": score("advantages", "next group", DIVIDED, f"({DIVIDED}).roll(-4, 0)"),
    "absolute KL": loss("", KL_TERM, "per_token_loss + self.beta * (ref_per_token_logps - per_token_logps).abs()",
        KL | {"use_bias_correction_kl": False}),
    "old log-probabilities of the next row": loss("next row", LOG_RATIO, f"{LOG_RATIO}.roll(-1, 0)", OFF),
    # with a positive advantage, a ratio is clipped only above
    "no clipping for negative advantages": loss("not clipped below", SMALLER,
        f"torch.where(advantages > 0, {SMALLER}, -per_token_loss1)", OFF),
    "no rows with negative advantages": weighted("never below 0", "(advantages > 0)"),
    "first image for all rows": forward("logps", "images of the first row", PATCHES,
        f"{IMAGES}[:1].repeat(len(image_grid_thw), 1, 1).flatten(0, 1)"),
    "dark images": forward("logps", "", PATCHES, f"{PATCHES} * 0.8"),
    "head not trained": edited("training_step", "gradients", "do not get any gradient", STEPPED,
        f"{STEPPED}\n    model.lm_head.weight.grad = None"),
    "bits": dpo("1 / ln 2, as in bits", "-F.logsigmoid(self.beta * delta_score)",
        "-F.logsigmoid(self.beta * delta_score) / 0.6931471805599453"),
}  # fmt: skip
