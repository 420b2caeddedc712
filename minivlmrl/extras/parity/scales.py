"""Factors by which a trainer may wrongly multiply or divide, such as the row count or the temperature."""

import math

OF_FORWARD = ("logps", "logps of old", "logps of sampler", "logps of reference", "gradients")


def known_numbers(d, stage: str) -> dict[str, float]:
    """Return factors or divisors that a trainer may apply by mistake: {"beta": 0.04, ...} for the loss."""
    about = d.about
    result = {"the number of ranks": about.get("world_size")}
    if stage in ("advantages", "loss"):
        result["the number of completions of a group"] = about.get("num_generations")
    if stage == "advantages":
        result["the number of rewards"] = d["rewards"].view(len(d["rewards"]), -1).shape[1]
    else:
        result["the number of micro-batches"] = len(d.micro_batches)
    if stage in ("loss", "schedule"):
        result["the number of steps of a rollout"] = about.get("steps_per_rollout")
    if stage in (*OF_FORWARD, "loss"):
        result["1 / ln 2, as in bits"] = 1 / math.log(2)
    if stage in OF_FORWARD:
        result["the temperature"] = about.get("temperature", 1.0)
    if stage == "loss":
        rows = len(d.micro_batches[0])
        result |= {
            "beta": about.get("loss", {}).get("beta"),
            "the number of rows": len(d.all_rows),
            "the number of counted tokens": d["completion_mask"].sum().item(),
            "the number of tokens of completions, including padding": d.completion.sum().item(),
            "the number of columns": d["input_ids"].numel(),
            "the number of tokens of prompts and completions": d["row_lengths"].sum().item(),
            "the number of tokens of the longest completion": d["lengths"].max().item(),
            "the number of tokens of max_completion_length": about.get("max_completion_length"),
            "the number of rows of a micro-batch": rows,
        }
        if "pair" in d:
            result["the number of pairs of a micro-batch"] = rows // 2
    if stage in ("update", "schedule"):
        rate = d.optimizer.get("learning_rate") or 1
        schedule = about.get("schedule", {})
        earlier = [0.0, *schedule.get("rates", [])][-1]
        result["the learning rate of the previous step over the current one"] = earlier / rate
        result["the largest learning rate over the current one"] = schedule.get("learning_rate", 0) / rate
    return {says: number for says, number in result.items() if number not in (None, 0, 1)}
