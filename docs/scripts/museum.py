"""Record a training step per exhibit in docs/museum.md; `record` shows how to record a step.

An exhibit is a section of that page with a one-line diff of minimal.py, and a table row with what `minivlmrl parity`
says about a step of the changed file.
"""

import io
import math
import random
import re
from argparse import Namespace
from collections import defaultdict
from contextlib import redirect_stdout
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import minimal
from minivlmrl.extras.parity import audit, step

SOURCE = Path(minimal.__file__).read_text(encoding="utf-8")
PAGE = Path(__file__).parents[1] / "museum.md"
SECTION = re.compile(r"^## \d+\. (.+)\n(?s:.*?)^- (.+)\n\+ (.+)\n", re.MULTILINE)
ROW = re.compile(r"^\| \d+ \| (\w+) \| ([\w ]+) \| (.+) \|$", re.MULTILINE)


class Exhibit(NamedTuple):
    title: str
    right: str  # part of minimal.py
    wrong: str
    kind: str  # grpo, dpo or sft
    stage: str  # first stage in `parity` where a step of the changed file differs
    says: str  # what parity prints about this stage


TEXT = PAGE.read_text(encoding="utf-8")
EXHIBITS = [Exhibit(*section, *row) for section, row in zip(SECTION.findall(TEXT), ROW.findall(TEXT), strict=True)]


def changed(exhibit: Exhibit) -> str:
    """Return minimal.py with the exhibit's wrong line."""
    if SOURCE.count(exhibit.right) != 1:
        raise ValueError(f"minimal.py has {exhibit.right!r} {SOURCE.count(exhibit.right)} times instead of once")
    return SOURCE.replace(exhibit.right, exhibit.wrong)


def execute(source: str) -> dict:
    """Run a copy of minimal.py, possibly changed, and return the names it defines."""
    names = {"__name__": "museum"}
    exec(compile(source, "minimal.py", "exec"), names)
    return names


def watch(names: dict, kind: str, folder: Path) -> dict[str, list]:
    """Record what functions in minimal.py return in the last training step, and save the weights of every step."""
    seen = defaultdict(list)

    def keep(name: str, function, look):
        def call(*arguments):
            result = function(*arguments)
            seen[name].append(look(result, *arguments))
            return result

        return call

    def look_at_logps(logps, model, prompt, ids):
        if logps.requires_grad:
            logps.retain_grad()
            seen["scored"].append((prompt, ids, logps))
        else:
            seen["ref"].append(logps)

    def stage(model, *arguments):
        names["save"](model, folder / ("model" if (folder / "ref_model").exists() else "ref_model"))
        seen.clear()
        for loss, metric in right_stage(model, *arguments):
            seen["loss"].append(loss.detach().view(1))
            yield loss, metric

    right_stage, names[kind] = names[kind], stage
    names["log_probabilities"] = keep("", names["log_probabilities"], look_at_logps)
    for name in ("sample", "tokenize_answers"):
        names[name] = keep("mask", names[name], lambda result, *_: result[1])
    names["group_advantages"] = keep("rewards", names["group_advantages"], lambda result, rewards, _: (rewards, result))
    names["multinomial"] = keep("drawn", torch.multinomial, lambda token, p, _: p.log().gather(1, token))
    return seen


def rows(tensors: list[Tensor]) -> Tensor:
    """Concatenate rows from all prompts, padded to the longest answer."""
    return pad_sequence([row.detach() for tensor in tensors for row in tensor], batch_first=True)


def tensors_of(seen: dict[str, list], end: int, pad: int) -> dict[str, Tensor]:
    """Return recorded tensors, named as in docs/library.md; prompts may differ only in images."""
    prompts, ids, logps = zip(*seen["scored"], strict=True)
    number, each = torch.arange(sum(map(len, ids))), len(ids[0])
    is_real = rows([(i == end).cumsum(1) - (i == end).long() < 1 for i in ids])  # True up to the first end token
    prompt = prompts[0].ids.expand(len(number), -1)
    images = [image for p in prompts for image in p.images * each]
    tensors = {
        "input_ids": torch.cat([prompt, rows(ids).where(is_real, pad)], 1),
        "attention_mask": torch.cat([torch.ones_like(prompt), is_real.long()], 1),
        "prompt_mask": torch.cat([torch.ones_like(prompt), torch.zeros_like(is_real).long()], 1),
        "completion_mask": rows(seen["mask"]).long(),
        "per_token_logps": rows(logps),
        "logps_gradient": rows([x.grad for x in logps]),
        "micro_batch": number // each,
        "loss": torch.cat(seen["loss"]),
        "pixel_values": torch.cat([patches for patches, _, _ in images]),
        "image_grid_thw": torch.tensor([[1, h, w] for _, h, w in images]),
        "num_images": torch.ones_like(number),
    }
    if seen["ref"]:
        tensors |= {"ref_per_token_logps": rows(seen["ref"]), "pair": number // 2, "chosen": (number + 1) % 2}
    if seen["rewards"]:
        rewards, advantages = map(torch.cat, zip(*seen["rewards"], strict=True))
        drawn = torch.cat(seen["drawn"], 1).split([i.shape[1] for i in ids], 1)
        tensors |= {"rewards": rewards[:, None], "group": number // each, "row": number, "sampler_logps": rows(drawn)}
        tensors |= {"advantages": advantages, "rollout_advantages": advantages}
    return tensors


def record(kind: str, source: str, folder: Path) -> str:
    """Train random weights for two steps with the code `source`, and return parity's report on the second."""
    names = execute(source)
    random.seed(0)
    torch.manual_seed(0)
    names["make_folder"](folder / "random")
    model = names["load"](folder / "random")
    names["reward"] = lambda text, solution: 0.3 + len(text) % 5  # random weights would get no reward
    seen = watch(names, kind, folder)
    options = Namespace(
        max_steps=2, prompts_per_step=4, learning_rate=1e-2, warmup_steps=1, beta=0.1, num_generations=4,
        max_new_tokens=6,
    )  # fmt: skip
    with mock.patch("torch.multinomial", names["multinomial"]), redirect_stdout(io.StringIO()):
        names["train"](model, [names["draw_row"]() for _ in range(8)], names[kind], options)
    end, pad = (model.tokenizer.token_to_id(f"<|{name}|>") for name in ("im_end", "endoftext"))
    loss = {"sft": {"loss_type": "nll"}, "dpo": {"loss_type": ["sigmoid"], "beta": 0.1}}
    loss["grpo"] = {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False}
    about = {"kind": kind, "loss": loss[kind], "dtype": "float32", "num_generations": 4, "scale_rewards": "group"}
    about |= {"model": "model", "old_model": "model", "ref_model": "ref_model", "temperature": 1.0}
    about |= {"max_completion_length": 6} if kind == "grpo" else {}
    about |= {"image_token_id": model.config["image_token_id"], "pad_token_id": pad, "stop_token_ids": [end, pad]}
    step.write(folder, about, tensors_of(seen, end, pad))
    return audit.report(*audit.checked(folder, math.inf))
