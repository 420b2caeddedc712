"""Dump steps of TRL's GRPOTrainer, DPOTrainer and SFTTrainer while they train:

    with grpo_steps(trainer, "steps"):
        trainer.train()                     # steps/0, steps/1, ...; then: python -m minivlmrl audit steps/0

What is written is seen from outside of what is checked (see record.py). Made for TRL 1.16 in one process.
"""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.nn.functional import pad

from minivlmrl.audit import dump
from minivlmrl.audit.record import prompt_mask, recorded

LOSS = ("loss_type", "importance_sampling_level", "beta", "delta", "use_bias_correction_kl", "top_entropy_quantile")
LOSS += ("off_policy_mask_threshold", "sapo_temperature_pos", "sapo_temperature_neg")
LOSS += ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
ROLLOUT = ("num_generations", "scale_rewards", "temperature", "max_completion_length", "mask_truncated_completions")
ROLLOUT += ("reward_weights", "multi_objective_aggregation")
DPO_LOSS = ("loss_weights", "beta", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "ld_alpha")
DPO_LOSS += ("use_weighting", "discopop_tau")


@contextmanager
def sft_steps(trainer, folder, steps: int = 1):
    """Of an SFTTrainer; a model that takes no num_items_in_batch is averaged by micro-batch."""
    over = "step" if trainer.model_accepts_loss_kwargs else "micro_batch"
    about = {"kind": "sft", "loss": {"loss_type": trainer.args.loss_type.removeprefix("chunked_")}, "mean_over": over}
    with recorded(trainer, folder, about, steps) as record:

        def begin(model, inputs, *_, **__):
            only = prompt_mask(trainer, inputs) if trainer.completion_only_loss else {}
            record.begin({"completion_mask": (inputs["labels"] != -100).long(), **only}, inputs)

        record.wrap("compute_loss", begin)
        yield


@contextmanager
def dpo_steps(trainer, folder, steps: int = 1):
    """Of a DPOTrainer."""
    loss = {name: getattr(trainer.args, name) for name in DPO_LOSS} | {"loss_type": list(trainer.loss_types)}
    with recorded(trainer, folder, {"kind": "dpo", "loss": loss, "mean_over": "micro_batch"}, steps) as record:

        def begin(model, inputs, *_):
            count, pairs = torch.arange(len(inputs["input_ids"])), len(inputs["input_ids"]) // 2
            part = {"completion_mask": inputs["completion_mask"], "pair": count % pairs, "chosen": (count < pairs).long()}
            record.begin(part | prompt_mask(trainer, inputs), inputs)

        record.wrap("_compute_loss", begin)
        yield


@contextmanager
def grpo_steps(trainer, folder, steps: int = 1):
    """Of a GRPOTrainer: rewards, groups and advantages of the rollout too."""
    a, rollout = trainer.args, {}
    loss = {name: getattr(a, name) for name in LOSS}
    loss |= {"epsilon_low": a.epsilon, "epsilon_high": a.epsilon if a.epsilon_high is None else a.epsilon_high}
    about = {"kind": "grpo", "loss": loss} | {name: getattr(a, name) for name in ROLLOUT}
    about |= {"stop_token_ids": list(trainer.eos_token_ids), "pad_token_id": trainer._tokenizer.pad_token_id}
    about["steps_per_rollout"] = a.steps_per_generation / a.gradient_accumulation_steps
    with recorded(trainer, folder, about, steps) as record:

        def generated(result, examples):
            keys, seen, groups = [str(e["prompt"]) + image_bytes(e) for e in examples], Counter(), {}
            for key in keys:
                groups.setdefault((key, seen[key] // a.num_generations), []).append(sum(seen.values()))
                seen[key] += 1
            group = {i: number for number, members in enumerate(groups.values()) for i in members}
            record.rollout["group"] = torch.tensor([group[i] for i in range(len(keys))])
            record.rollout["rollout_advantages"] = result["advantages"].clone()
            rollout.update(ids=[tokens(result, i) for i in range(len(keys))])
            about["rollout_tokens"] = int((result["completion_mask"] * result.get("tool_mask", 1)).sum())
            record.fresh = True

        def begin(model, inputs):
            part = {name: inputs[name] for name in dump.BY_ROW if name in inputs}
            part["prompt_mask"] = pad(inputs["prompt_mask"], (0, inputs["completion_ids"].shape[1]))
            part["completion_mask"] = inputs["completion_mask"] * inputs.get("tool_mask", 1)
            known, has = record.rollout["rollout_advantages"], inputs["advantages"].tolist()
            part["row"] = torch.zeros(len(has), dtype=torch.long)
            for i, value in enumerate(has):  # of equal completions the one with this advantage
                same = [j for j, ids in enumerate(rollout["ids"]) if ids == tokens(inputs, i)]
                part["row"][i] = min(same, key=lambda j: abs(known[j].item() - value))
            off = trainer.use_adaptive_entropy and trainer._last_world_entropy > a.entropy_target
            loss["entropy_coef"] = 0.0 if off else trainer.entropy_coef
            record.begin(part, inputs)

        record.wrap("_generate_and_score_completions", after=generated)
        record.wrap("_calculate_rewards", after=lambda result, *_: record.rollout.update(rewards=result.clone()))
        record.wrap("_compute_loss", begin)
        yield


def tokens(inputs: dict, row: int) -> tuple[list, list]:
    """Prompt and completion of a row, without padding."""
    parts = (("prompt_ids", "prompt_mask"), ("completion_ids", "completion_mask"))
    return tuple(inputs[ids][row][inputs[mask][row].bool()].tolist() for ids, mask in parts)


def image_bytes(example: dict) -> str:
    """Tells equal questions about different pictures apart."""
    images = example.get("images") or [example.get("image")]
    return str([hash(image.tobytes()) for image in images if image is not None])
