"""What real bugs of the field cost: each put into our trainer, held-out accuracy of the default recipe beside it.

    python benchmarks/museum.py --seeds 0 1 2 --json museum.json   # the table; continues what the file already has
    python benchmarks/museum.py --bug no_picture_in_reference      # one run with a bug, with any options of train.py

A bug is a function that replaces parts of the package while it runs; nothing of this is in the package itself. `put`
is setattr (a test gives monkeypatch.setattr). tests/test_museum.py shows that each changes what training computes.
"""

import argparse
import copy
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
from torch.nn.utils import clip_grad_norm_

from minivlmrl import advantages, generate, grpo, losses, train
from minivlmrl.algorithms import grpo_stage, reference, sft
from minivlmrl.sampling import sample

GITHUB = "https://github.com/"
SPLIT = ["--grpo.micro_batch_size=4"]  # 4 micro-batches in a step
TWICE = ["--grpo.num_iterations=2"]
OPEN = "--rollout.max_logp_mismatch=.inf"  # or the trainer stops where its sampler differs: it finds some by itself
BUGS: dict = {}  # name: (patch, link, options)
GRPO, inner = grpo_stage.GRPOStage, {}
for owner, name in ((GRPO, "loss"), (GRPO, "columns"), (sft.SFT, "loss"), (generate, "prefill"),
                    (train, "learning_rate"), (sample, "uniform_numbers"), (sft, "per_token_logps"),
                    (grpo_stage, "RunSampler"), (grpo, "group_advantages"), (grpo, "pack"),
                    (reference.Reference, "logps"), (sft, "sft_loss")):  # fmt: skip
    inner[owner, name] = getattr(owner, name)  # before any patch


def bug(link: str, *options: str):
    """Enter a patch into the table."""
    return lambda patch: BUGS.setdefault(patch.__name__, (patch, link, [*options, OPEN]))[0]


def before_loss(put, change, owner=GRPO):
    """Do something with the algorithm and its micro-batch before each loss."""
    put(owner, "loss", lambda self, b: (change(self, b), inner[owner, "loss"](self, b))[1])


def scaled_loss(put, factor: float):
    def loss(self, b):
        value, metrics = inner[GRPO, "loss"](self, b)
        return value * factor, metrics

    put(GRPO, "loss", loss)


def sampled(put, **options):
    """Sample with other options than log-probabilities are computed with."""

    class Other(inner[grpo_stage, "RunSampler"]):
        def chooser(self, *given):
            other = replace(self.sampling, **options)
            return sample.RunSampler(self.model, self.processor, other, self.world).chooser(*given)

    put(grpo_stage, "RunSampler", Other)  # evaluations have another one


def without_end(self, b):
    b.loss_mask = b.loss_mask * (b.loss_mask.flip(1).cumsum(1).flip(1) > 1)


def other_prompts(put, change):
    """Train on other prompts than those that were sampled from."""
    put(grpo, "pack", lambda prompts, *rest: inner[grpo, "pack"](change(list(prompts)), *rest))


@bug(GITHUB + "unslothai/unsloth-zoo/pull/832")
def std_with_n(put):
    put(advantages, "nanstd", lambda x: x.std(-1, correction=0))


@bug(GITHUB + "StarsfieldAI/R1-V/issues/67")
def interleaved_groups(put):
    def compute(r, G, scale):
        mixed = inner[grpo, "group_advantages"](r.view(-1, G).T.reshape(-1), G, scale)
        return mixed.view(G, -1).T.reshape(-1)

    put(grpo, "group_advantages", compute)


@bug(GITHUB + "NVIDIA-NeMo/RL/pull/3882")
def grouped_by_text(put):  # all questions are equal, only the pictures differ
    put(grpo, "group_advantages", lambda r, G, scale: inner[grpo, "group_advantages"](r, len(r), scale))


@bug(GITHUB + "StarsfieldAI/R1-V/pull/54")
def pictures_of_others(put):
    others = lambda p: [replace(a, pixel_values=b.pixel_values) for a, b in zip(p, p[1:] + p[:1], strict=True)]  # noqa: E731
    other_prompts(put, others)


@bug(GITHUB + "StarsfieldAI/R1-V/issues/20")
def no_picture_in_training(put):
    other_prompts(put, lambda prompts: [replace(p, pixel_values=0 * p.pixel_values) for p in prompts])


@bug(GITHUB + "unslothai/unsloth/pull/11031")
def no_picture_in_reference(put):
    logps = inner[reference.Reference, "logps"]
    put(
        reference.Reference, "logps", lambda self, g, t=1.0: logps(self, replace(g, pixel_values=0 * g.pixel_values), t)
    )


@bug(GITHUB + "StarsfieldAI/R1-V/issues/146")
def rewards_see_other_rows(put):
    put(GRPO, "columns", lambda self, rows, *rest: inner[GRPO, "columns"](self, [*rows[1:], rows[0]], *rest))


@bug(GITHUB + "Goekdeniz-Guelmez/mlx-lm-lora/issues/55")
def gradient_of_zero(put):
    put(losses, "importance_ratio", lambda d, mask, level: (d - d).exp())


@bug(GITHUB + "modelscope/ms-swift/issues/10117", *SPLIT)
def divided_twice(put):
    scaled_loss(put, 1 / 4)


@bug(GITHUB + "verl-project/verl/pull/436", *SPLIT)
def not_divided(put):
    scaled_loss(put, 4.0)


@bug("https://arxiv.org/abs/2604.23747", "--sft.micro_batch_size=4")
def mean_of_means(put):  # of the tokens of each micro-batch, in sft
    put(sft, "sft_loss", lambda logps, mask, kind, counts: inner[sft, "sft_loss"](logps, mask, kind) / 8)


@bug(GITHUB + "bytetriper/RAE/issues/67", *SPLIT)
def dropped_gradients(put):
    before_loss(put, lambda self, b: self.policy.zero_grad())


@bug(GITHUB + "facebookresearch/lingua/pull/59", *SPLIT)
def clipped_before_accumulation(put):
    before_loss(put, lambda self, b: clip_grad_norm_(self.policy.parameters(), self.run.optimizer.max_grad_norm))


@bug(GITHUB + "NVIDIA/OpenSeq2Seq/pull/192")
def never_clipped(put):
    put(torch.nn.utils, "clip_grad_norm_", lambda parameters, _: clip_grad_norm_(parameters, float("inf")))


@bug(GITHUB + "huggingface/trl/pull/3029")
def temperature_left_out(put):  # samples at 0.7, scores at 1
    sampled(put, temperature=0.7)


@bug(GITHUB + "huggingface/trl/issues/5783")
def nearly_greedy(put):  # the temperature of the model's own generation_config
    sampled(put, temperature=0.1)


@bug(GITHUB + "huggingface/trl/pull/7039")
def end_token_masked(put):
    before_loss(put, without_end)


@bug(GITHUB + "NVIDIA-NeMo/Megatron-Bridge/pull/4660")
def end_token_masked_in_sft(put):
    before_loss(put, without_end, sft.SFT)


@bug(GITHUB + "huggingface/transformers/pull/47395")
def labels_shifted_twice(put):  # in sft, and the last of a row is the first of the next
    put(sft, "per_token_logps", lambda model, g: inner[sft, "per_token_logps"](
        model, replace(g, completion_ids=g.completion_ids.roll(-1))))  # fmt: skip


@bug(GITHUB + "modelscope/ms-swift/issues/3069")
def padding_counted(put):
    before_loss(put, lambda self, b: setattr(b, "loss_mask", torch.ones_like(b.loss_mask)))


@bug(GITHUB + "huggingface/trl/issues/2769", *TWICE)
def old_ignored(put):
    before_loss(put, lambda self, b: setattr(b, "old_per_token_logps", None))


@bug(GITHUB + "walkinglabs/hands-on-modern-rl/issues/75", *TWICE)
def ratio_of_sums(put):
    put(losses, "importance_ratio", lambda d, mask, level: (d * mask).sum(-1, keepdim=True).exp())


@bug(GITHUB + "NVIDIA-NeMo/RL/pull/2506")
def k1_in_the_loss(put):  # its gradient is zero in expectation
    put(losses, "kl_term", lambda logps, ref, kind: logps - ref)
    put(losses, "correct_kl", lambda kl, ratio, options: kl)


@bug(GITHUB + "X-GenGroup/Flow-Factory/issues/122")
def kl_without_gradient(put):
    put(losses, "correct_kl", lambda kl, ratio, options: kl.detach())


@bug(GITHUB + "aburkov/theLMbook/issues/8")
def reference_follows(put):
    follow = lambda self, steps: self.model.load_state_dict(self.policy.state_dict())  # noqa: E731
    put(reference.Reference, "after_step", follow)


@bug(GITHUB + "huggingface/trl/issues/3679")
def stale_sampler(put):  # all completions are the first policy's
    first = inner[grpo_stage, "RunSampler"]
    put(grpo_stage, "RunSampler", lambda model, *rest: first(copy.deepcopy(model), *rest))


@bug(GITHUB + "NVIDIA-NeMo/RL/pull/171")
def one_seed(put):  # the completions of a group are equal
    numbers = inner[sample, "uniform_numbers"]
    put(sample, "uniform_numbers", lambda keys, G, T: numbers(keys, 1, T).repeat_interleave(G, 0))


@bug(GITHUB + "huggingface/accelerate/issues/963")
def schedule_by_micro_batch(put):  # four times too fast
    rate = inner[train, "learning_rate"]
    put(train, "learning_rate", lambda step, config: rate(min(4 * step, config.max_steps), config))


@bug(GITHUB + "NVIDIA-NeMo/Automodel/pull/3444")
def bfloat16_weights(put):
    def round_weights(self, steps):
        for p in self.policy.parameters():
            p.data = p.data.bfloat16().float()

    put(GRPO, "after_step", round_weights)


@bug(GITHUB + "huggingface/trl/issues/5279")
def text_positions_in_training(put):
    def as_text(input_ids, *_):
        return torch.arange(len(input_ids)).expand(3, -1)

    def pack(*arguments):
        with patch("minivlmrl.batch.get_rope_index", as_text):
            return inner[grpo, "pack"](*arguments)

    put(grpo, "pack", pack)


@bug(GITHUB + "Blaizzy/mlx-vlm/pull/1527")
def wrong_positions_in_decoding(put):
    def prefill(model, batch, prompt_index, *rest):
        logits, decoding, _ = inner[generate, "prefill"](model, batch, prompt_index, *rest)
        return logits, decoding, torch.tensor(batch.layout.prompt_lengths)[prompt_index]

    put(generate, "prefill", prefill)


HEALTHY = {"healthy": [], "healthy, num_iterations 2": TWICE}


def measure(name: str, seed: int) -> dict:
    """One run of the default recipe in a process of its own."""
    options = HEALTHY.get(name) or ([] if name in HEALTHY else BUGS[name][2])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *([] if name in HEALTHY else ["--bug", name]), f"--seed={seed}"]
        command += [f"--output_dir={folder}", "--num_threads=1", *(options if name in HEALTHY else [])]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            return {"name": name, "seed": seed, "ended": result.stderr.strip().splitlines()[-1][-200:]}
        summary = json.loads((Path(folder) / "summary.json").read_text())
    after = {key: round(summary["after_grpo"][key], 3) for key in ("sampled", "greedy", "format")}
    return {"name": name, "seed": seed, "after_sft": round(summary["after_sft"]["sampled"], 3), **after}


def table(rows: list[dict]) -> str:
    """The rows as docs/museum.md shows them: accuracy by seed, the mean, its distance to the healthy run."""
    seeds = sorted({row["seed"] for row in rows})
    of = {(row["name"], row["seed"]): row.get("sampled") for row in rows}
    lines = [f"| bug | {' | '.join(f'seed {seed}' for seed in seeds)} | costs | |", "|---" * (len(seeds) + 3) + "|"]
    for name in [*HEALTHY, *BUGS]:
        values = [of.get((name, seed)) for seed in seeds]
        _, link, options = BUGS.get(name, (None, "", []))
        whole = "healthy, num_iterations 2" if TWICE[0] in options else "healthy"
        both = [(a, of.get((whole, s))) for a, s in zip(values, seeds, strict=True) if a is not None]
        costs = [b - a for a, b in both if b is not None and link]
        shown = " | ".join("" if v is None else f"{v:.3f}" for v in values)
        cost = f"{sum(costs) / len(costs):+.3f}" if costs else ""
        lines.append(f"| {name} | {shown} | {cost} | {link.removeprefix('https://')} |")
    return "\n".join(lines)


def main(arguments: list[str]):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)  # --seed is no --seeds
    parser.add_argument("--bug", choices=[*BUGS], help="run the default recipe with this bug")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--only", nargs="+", help="names of rows")
    parser.add_argument("--json", type=Path, help="numbers as they come; what it has is not run again")
    options, overrides = parser.parse_known_args(arguments)
    if options.bug or overrides:
        patch, _, own = BUGS[options.bug] if options.bug else (None, "", [])
        if patch:
            patch(setattr)
        return train.main([*own, *overrides])
    rows = json.loads(options.json.read_text()) if options.json and options.json.exists() else []
    for seed in options.seeds:
        for name in [*HEALTHY, *BUGS]:
            wanted = options.only is None or name in options.only
            if wanted and not any(row["name"] == name and row["seed"] == seed for row in rows):
                rows.append(measure(name, seed))
                print(rows[-1], file=sys.stderr, flush=True)
                if options.json:
                    options.json.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
