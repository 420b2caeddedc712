"""Bugs of trainers whose completions call tools, put into TRL's loop: what the threads of the field tell of.

TURNS were written with the causes of the audit, UNSEEN after them and without a look at them; test_trl_steps.py counts
both.
"""

import torch
from bugs import MODULE, InTRL, around, edit, forward

OFF = {"num_iterations": 2, "rows": 8, "learning_rate": 2e-2}
TELL, LARGE = {"tools": ("tell",)}, {"tools": ("look",), "large": True}


def put(stage, says, patch, options=None, at=0):
    return InTRL(stage, says if isinstance(says, tuple) else (says,), patch, options or {}, "turns", at=at)


def loop(stage, says, old, new, options=None):
    return put(stage, says, edit("GRPOTrainer", "_tool_call_loop", old, new), options)


def score(stage, says, old, new, options=None):
    return put(stage, says, edit("GRPOTrainer", "_generate_and_score_completions", old, new), options)


def loss(says, old, new, options=None, at=0):
    return put("loss", says, edit("GRPOTrainer", "_compute_loss", old, new), options, at)


def positions(change):
    """change(positions (3, S), kinds (S,): 1 for a picture's token) of the real tokens of each row."""

    def call(function, self, input_ids, mm_token_type_ids, *given, attention_mask=None, **named):
        found, deltas = function(self, input_ids, mm_token_type_ids, *given, attention_mask=attention_mask, **named)
        for row, real in enumerate(attention_mask.bool()):
            found[:, row, real] = change(found[:, row, real], mm_token_type_ids[row, real])
        return found, deltas

    return around("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl:Qwen2_5_VLModel", "get_rope_index", call)


def counted_after_answers(x, kinds):
    """After the first picture of an answer positions go on by tokens, not from its largest one."""
    starts = (kinds.diff() == 1).nonzero()[:, 0] + 1
    if len(starts) > 1:
        end = int(starts[1] + (kinds[starts[1] :] == 0).int().argmax())
        x[:, end:] = x[:, starts[1] : starts[1] + 1] + torch.arange(len(kinds) - starts[1])[end - starts[1] :]
    return x


def no_kinds_after_prompt(function, self, model, ids, mask, keep, **options):
    """What token is of a picture is known of the prompt alone."""
    kinds = options["mm_token_type_ids"].clone()
    kinds[:, -keep:] = 0
    return function(self, model, ids, mask, keep, **options | {"mm_token_type_ids": kinds})


def first_for_later(self, model, options):
    """All pictures of a row are its first, for the reference; all are of one size."""
    if model is not self.ref_model:
        return model, options
    pictures = options["pixel_values"].view(len(options["image_grid_thw"]), -1, options["pixel_values"].shape[1])
    rows = pictures.split(options["num_images"])
    same = torch.cat([row[:1].expand_as(row) for row in rows])
    return model, options | {"pixel_values": same.flatten(0, 1)}


PCT = "prompt_ids[idx_with_tool] + completion_ids[idx_with_tool] + suffix_ids"
OWN = "completion_ids[idx_with_tool]"
AGAIN = PCT.replace(OWN, f"self._tokenizer.encode(self._tokenizer.decode({OWN}))")
ADDED = "tool_mask[idx_with_tool] += [0] * tool_length + [1] * post_tool_length"
FLAGS = "tool_mask = [torch.tensor(mask) for mask in tool_mask_list]"
MERGED = "images = [(existing or []) + new for existing, new in zip(images, tool_images, strict=True)]"
IN_LOSS = 'mask = completion_mask if "tool_mask" not in inputs else completion_mask * inputs["tool_mask"]'
COUNTED = "loss_mask = completion_mask if tool_mask is None else completion_mask * tool_mask"
ENDED = "is_truncated = torch.tensor([ids[-1] not in eos_and_pad for ids in completion_ids_list], device=device)"
DROPPED = "del completions[idx_with_tool][completions_len_before[idx] :]"

TURNS = {
    "answers in the loss": loop("mask", "counts the answers of tools too", ADDED, ADDED.replace("[0]", "[1]")),
    "the loss ignores the tool mask": loss("counts the answers of tools too", IN_LOSS, "mask = completion_mask"),
    "the mean ignores the tool mask": score(
        "loss", "mean is over the answers of tools too", COUNTED, "loss_mask = completion_mask"
    ),
    "text read again": loop("tokens", "decoded and encoded again", PCT, AGAIN, TELL),
    "end tokens before answers lost": loop(
        "tokens", "lack the end tokens before answers", PCT, PCT.replace(OWN, f"{OWN}[:-1]"), TELL
    ),
    "answers cut and kept": loop(
        "tokens",
        "tokens that the sampler never had",
        DROPPED,
        f"""own, more = idxs_with_tool[idx], prompt_completion_tool_ids[idx][len(prompt_ids[idxs_with_tool[idx]]):]
                more = more[len(completion_ids[own]) : self.max_completion_length]
                completion_ids[own] = completion_ids[own] + more
                tool_mask[own] += [1] * len(more)
                {DROPPED}""",
        TELL | {"max_completion_length": 85, "calls": 1.0},
    ),
    "pictures of answers lost": put("pictures", "lacks all pictures", edit("GRPOTrainer", "_generate", MERGED, "pass")),
    "a picture of a dropped answer kept": loop(
        "pictures",
        "lacks all pictures",
        "del tool_images[idx_with_tool][tool_images_len_before[idx] :]",
        "pass",
        {"max_completion_length": 90, "tools": ("look",)},
    ),
    "pictures of answers before the prompt's": put(
        "pictures",
        "one earlier",
        edit("GRPOTrainer", "_generate", MERGED, MERGED.replace("(existing or []) + new", "new + (existing or [])")),
        {"tools": ("look",), "max_tool_calling_iterations": 2},
    ),
    "kinds of the prompt alone": put(
        "logps",
        ("1-D", "the pictures of answers"),
        around("trl:GRPOTrainer", "_get_per_token_logps_and_entropies", no_kinds_after_prompt),
        LARGE,
    ),
    "positions count tokens after a picture": put(
        "logps", ("positions", "after the first picture of an answer"), positions(counted_after_answers), LARGE
    ),
    "answers not attended to": put(
        "tokens",
        "does not attend to the answers of tools",
        edit(
            "GRPOTrainer",
            "_compute_loss",
            "attention_mask = torch.cat([prompt_mask, completion_mask], dim=1)",
            'attention_mask = torch.cat([prompt_mask, completion_mask * inputs["tool_mask"]], dim=1)',
        ),
        TELL,
    ),
    "ends of turns not counted": score(
        "tokens",
        "does not attend to all stop tokens",
        COUNTED,
        f"completion_mask *= completion_ids != self.eos_token_ids[0]\n    {COUNTED}",
    ),
    "only the last turn is learned": loop(
        "mask",
        "counts the last turn alone",
        ADDED,
        "tool_mask[idx_with_tool] = [0] * (completion_length + tool_length) + [1] * post_tool_length",
        {"max_completion_length": 400},
    ),
    "only the first turn is learned": loop("mask", "counts the first turn alone", ADDED, ADDED.replace("[1]", "[0]")),
    "a cut completion that ended a turn": score(
        "mask",
        "an earlier turn ended",
        ENDED,
        ENDED.replace("ids[-1] not in eos_and_pad", "not set(ids) & set(eos_and_pad)"),
        TELL | {"ends": 0.2, "mask_truncated_completions": True},
    ),
    "tool mask one late": score(
        "mask",
        "whether a token is a tool's is that of the token before",
        FLAGS,
        FLAGS.replace("(mask)", "([1] + mask[:-1])"),
    ),
    "tool mask not shuffled": put(
        "mask",
        "before the shuffle",
        around(MODULE, "shuffle_sequence_dict", lambda shuffle, rows: shuffle(rows) | {"tool_mask": rows["tool_mask"]}),
    ),
    "the reference sees the first picture alone": put(
        "logps of reference", "has the first of all pictures for each", forward(first_for_later), LARGE | {"beta": 0.1}
    ),
    "the ratio of a row is over answers too": loss(
        "ratio of a sequence is over the answers of tools too",
        "(log_ratio * mask).sum(-1) / mask.sum(-1)",
        "(log_ratio * completion_mask).sum(-1) / completion_mask.sum(-1)",
        OFF | {"importance_sampling_level": "sequence"},
        at=1,
    ),
}


def one_on_after_answers(x, kinds):
    starts = (kinds.diff() == 1).nonzero()[:, 0] + 1
    if len(starts) > 1:
        x[:, int(starts[1] + (kinds[starts[1] :] == 0).int().argmax()) :] += 1
    return x


def black_for_later(self, model, options):
    """The reference is shown black pictures where tools answered; all are of one size."""
    if model is not self.ref_model:
        return model, options
    pictures = options["pixel_values"].view(len(options["image_grid_thw"]), -1, options["pixel_values"].shape[1])
    rows = (torch.cat([row[:1], row[1:] * 0]) for row in pictures.split(options["num_images"]))
    return model, options | {"pixel_values": torch.cat([*rows]).flatten(0, 1)}


SUFFIX = "suffix_ids = self._get_tool_suffix_ids(tool_messages)"
PART = 'tool_images[idx_with_tool].append(part["image"])'

UNSEEN = {
    "the separator before an answer lost": put(
        "tokens",
        "separator",
        edit("GRPOTrainer", "_get_tool_suffix_ids", "full_ids[len(prefix_ids) :]", "full_ids[len(prefix_ids) + 1 :]"),
    ),
    "an answer laid out twice": loop(
        "pictures", "pictures", SUFFIX, SUFFIX + " * 2", {"tools": ("look",), "calls": 0.4}
    ),
    "an answer begins two tokens early": loop(
        "mask", "last", ADDED, "tool_mask[idx_with_tool][-2:] = [0, 0]\n            " + ADDED
    ),
    "the environment of another row": loop(
        "pictures", "picture of", "self._sync_tool_dicts[idx_with_tool]", "self._sync_tool_dicts[idx]", LARGE
    ),
    "pictures of answers upside down": loop(
        "pictures", "upside down", PART, 'tool_images[idx_with_tool].append(part["image"].rotate(180))', LARGE
    ),
    "positions one too large after an answer": put(
        "logps", ("too large", "picture of an answer"), positions(one_on_after_answers), LARGE
    ),
    "the reference sees black pictures": put(
        "logps of reference", ("one grey", "pictures of answers"), forward(black_for_later), LARGE | {"beta": 0.1}
    ),
    "the opening of a turn is learned": loop(
        "mask",
        "last 3 tokens of answers",
        ADDED,
        "tool_mask[idx_with_tool] += [0] * (tool_length - 3) + [1] * (post_tool_length + 3)",
    ),
    "the mean is over answers alone": score(
        "loss", ("mean", "answers"), COUNTED, "loss_mask = completion_mask * (1 - tool_mask)", {"calls": 0.9}
    ),
    "failed calls are not learned": loop(
        "mask",
        "error",
        ADDED,
        ADDED
        + """
            if any("error" in str(message["content"]) for message in completions[idx_with_tool]):
                tool_mask[idx_with_tool] = [0] * len(tool_mask[idx_with_tool])""",
        {"tools": ("tell",), "calls": 0.9},
    ),
}
NOT_NAMED = (  # the first is the same for the sampler, of the others it is said where the numbers differ
    "the separator before an answer lost",
    "an answer begins two tokens early",
    "the environment of another row",
    "pictures of answers upside down",
    "failed calls are not learned",
)
