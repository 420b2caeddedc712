"""Compare decoding and training with transformers, for several lengths of prompts and completions.

    python benchmarks/lengths.py                   # the whole table: about an hour on one core
    python benchmarks/lengths.py --models default  # only the model of the default recipe
    python benchmarks/lengths.py --quick           # four short cases with one timed call each
    python benchmarks/lengths.py --profile         # where the time of decoding goes, for 32 rows of 256 tokens
    python benchmarks/lengths.py --json FILE       # also write the numbers

`default` is the model of the default recipe, and `wide` has a width of 1,024, 8 heads of 128 and 2 layers. Both have
random weights that both sides share, in float32. A case is one prompt, which contains an image of 16 tokens, with a
group of completions. minivlmrl computes the prompt once. transformers computes one row for each completion, with a copy
of the prompt and its image, as in TRL. All completions of a case have the same length, so that no row needs padding;
with unequal lengths, transformers would also compute the padding.

    decoding    sample all completions, including the prefill
    training    the GRPO loss and its gradients for the whole group at once

The calls of both sides alternate. Each pair gives a ratio, seconds of transformers / seconds of minivlmrl, and the
table has the median. On a CPU these are seconds of CPU time, so that other processes matter less. `counted` is the
ratio of the numbers of tokens that both sides process, (P + C) G / (P + C G); a ratio above it comes from fewer
operations per token, and one below it from attention, which costs the same on both sides. `MB` is the peak memory of a
training step without weights and gradients, as the allocator of torch counts it. Before timing, the log-probabilities
of both sides must agree.

Cases with more tokens than --max_tokens are left out, and the table says so.
"""

import argparse
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from gpu_step import (
    CARD,
    TOLERANCE,
    Case,
    backward,
    grouped,
    of_transformers,
    peak_gib,
    seconds_of,
    twin,
    write_numbers,
)
from grpo_step import MODEL_CONFIG
from torch.profiler import ProfilerActivity, profile

from minivlmrl.data.rows import Prompt
from minivlmrl.generation.generate import generate, make_token_sampler, sample_by_uniforms
from minivlmrl.model.build import random_model
from minivlmrl.model.config import ModelConfig
from minivlmrl.model.decoder import VisionLanguageModel
from minivlmrl.tasks import shapes

PROMPTS = (40, 300, 1200)  # number of tokens of a prompt, including its image
COMPLETIONS = (16, 64, 256, 1024)  # number of tokens of a completion
GROUPS = (8, 32)  # number of completions of the prompt
QUICK = {"prompts": (40, 300), "completions": (16, 64), "groups": (8,)}
IMAGE_SIDE = 8  # patches on each side of the image
# sizes of the model `wide`, where they differ from the default recipe's
WIDE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
COLUMNS = ("model", "P", "C", "G", "counted", "decoding", "training", "MB", "MB of transformers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="four short cases with one timed call each")
    parser.add_argument("--profile", action="store_true", help="print where the time of decoding goes")
    parser.add_argument("--models", nargs="+", choices=("default", "wide"), default=["default", "wide"])
    parser.add_argument("--repeats", type=int, help="pairs of timed calls, by default 3, or 1 with --quick")
    parser.add_argument("--max_tokens", type=int, default=80_000, help="largest (P + C) G")
    parser.add_argument("--threads", type=int, default=1, help="on a CPU")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.profile:
        return print_profile(build("default"))
    repeats = options.repeats or (1 if options.quick else 3)
    sizes = QUICK if options.quick else {"prompts": PROMPTS, "completions": COMPLETIONS, "groups": GROUPS}
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    rows = []
    for name in options.models:
        ours = build(name)
        theirs = twin(ours)
        if theirs is None:
            raise SystemExit("This benchmark compares minivlmrl with transformers; run pip install transformers")
        for P, C, G in itertools.product(*sizes.values()):
            row = {"model": name, "P": P, "C": C, "G": G, "counted": (P + C) * G / (P + C * G)}
            if options.max_tokens >= (P + C) * G:
                row |= measure(ours, theirs, make_case(ours.config, P, C, G), repeats)
            rows.append(row)
            print(f"| {' | '.join(cell(row.get(column)) for column in COLUMNS)} |", flush=True)
    print_ranges(rows)
    write_numbers(options.json, {"rows": rows, "threads": options.threads, "repeats": repeats})


def build(name: str) -> VisionLanguageModel:
    """Build a model with random weights."""
    values = json.loads(MODEL_CONFIG.read_text())
    if name == "wide":
        values |= WIDE
        values["vision_config"] |= {"out_hidden_size": WIDE["hidden_size"]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.json"
        file.write_text(json.dumps(values))
        model, _ = random_model(file, shapes.tokenizer(), seed=0)
    return model.to(CARD)


def measure(ours: VisionLanguageModel, theirs: torch.nn.Module, case: Case, repeats: int) -> dict[str, float]:
    """Measure the ratios of decoding and training of a case, and the peak memory of both sides in training."""
    G = len(case.completions)
    train = (partial(backward, grouped, ours, case, G), partial(backward, of_transformers, theirs, case, G))
    # also the warm-up of each side
    difference = (train[0]() - train[1]()).abs().max().item()
    assert difference <= TOLERANCE, f"log-probabilities differ by {difference:.1e}, more than {TOLERANCE}"
    megabytes = [peak_megabytes(call) for call in train]
    training = median_ratio(*train, repeats, ours)
    ours.zero_grad()  # the parameters of both sides
    decoding = median_ratio(partial(decode, ours, case), partial(decode_with_transformers, theirs, case), repeats, ours)
    return {"decoding": decoding, "training": training, "MB": megabytes[0], "MB of transformers": megabytes[1]}


def median_ratio(ours: Callable, theirs: Callable, repeats: int, model: torch.nn.Module) -> float:
    """Return the median of seconds of `theirs` / seconds of `ours` over pairs of calls."""
    ratios = []
    for _ in range(repeats):
        model.zero_grad()
        seconds = cpu_seconds(ours)
        model.zero_grad()
        ratios.append(cpu_seconds(theirs) / seconds)
    return statistics.median(ratios)


def cpu_seconds(call: Callable) -> float:
    """Measure the CPU time of a call, or the elapsed time on a GPU."""
    if CARD.type != "cpu":
        return seconds_of(call)
    begin = time.process_time()
    call()
    return time.process_time() - begin


def peak_megabytes(call: Callable) -> float:
    """Measure the peak memory of a call in MB (10^6 bytes); the gradients of the parameters exist before it."""
    if CARD.type == "cuda":
        return peak_gib(call) * 2**30 / 1e6
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = profiler.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(itertools.accumulate(change for _, change in changes)) / 1e6


@torch.inference_mode()
def decode(model: VisionLanguageModel, case: Case, prompts: int = 1):
    """Sample the completions of a case, all with the same length, for one or several copies of its prompt."""
    G = len(case.completions)
    C = len(case.completions[0])
    uniforms = torch.rand(prompts * G, C, dtype=torch.float64)
    sample_token = make_token_sampler(1.0, (), sample_by_uniforms(uniforms, CARD), device=CARD)
    groups = generate(model, [case.prompt] * prompts, G, C, sample_token)
    assert {len(completion.ids) for group in groups for completion in group} == {C}


def decode_with_transformers(model: torch.nn.Module, case: Case):
    G = len(case.completions)
    C = len(case.completions[0])
    model.generation_config.eos_token_id = None  # so that all completions have the same length
    lengths = {"max_new_tokens": C, "min_new_tokens": C, "pad_token_id": 0}
    ids = model.generate(**case.inputs, **lengths, do_sample=True, top_k=0, num_return_sequences=G)
    assert ids.shape == (G, len(case.prompt.input_ids) + C)


def print_profile(model: VisionLanguageModel):
    """Print the share of the operations in the time of decoding 4 x 8 completions of 256 tokens."""
    case = make_case(model.config, 40, 256, 8)
    decode(model, case, prompts=4)  # warm-up
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        decode(model, case, prompts=4)
    names = {
        "products with weights": ("aten::mm", "aten::addmm"),
        "products with keys and values": ("aten::bmm", "aten::baddbmm"),
    }
    times = {event.key: (event.self_cpu_time_total, event.count) for event in profiler.key_averages()}
    total = sum(time for time, _ in times.values())
    for name, keys in names.items():
        print(f"{name}: {sum(times[key][0] for key in keys) / total:.0%}")
    others = [count for key, (_, count) in times.items() if key.startswith("aten::")]
    print(f"everything else; calls of operations in a step: {sum(others) / 256:.0f}")


def cell(value: str | float | None) -> str:
    """Format a cell of the table; a case that was left out has empty cells."""
    if value is None:
        return "left out"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def print_ranges(rows: list[dict]):
    """Print the range of the ratios of each model, and how many cells reach the goals."""
    for name in dict.fromkeys(row["model"] for row in rows):
        for phase, goal in (("decoding", 1.5), ("training", 1.0)):
            ratios = [row[phase] for row in rows if row["model"] == name and phase in row]
            if not ratios:
                continue
            reached = sum(ratio >= goal for ratio in ratios)
            summary = f"{min(ratios):.2f} to {max(ratios):.2f}, median {statistics.median(ratios):.2f}"
            print(f"{name}, {phase}: {summary}; {reached} of {len(ratios)} cells reach {goal}")


def make_case(config: ModelConfig, prompt_tokens: int, completion_tokens: int, group: int) -> Case:
    """Create a prompt of random text after a random image, and random completions of text tokens."""
    generator = torch.Generator().manual_seed(0)
    image_tokens = IMAGE_SIDE**2 // config.vision_config.spatial_merge_size**2
    image = [config.vision_start_token_id, *[config.image_token_id] * image_tokens, config.vision_end_token_id]
    # ids below 256 are bytes, so no control tokens
    text = torch.randint(256, (prompt_tokens - len(image),), generator=generator)
    pixels = torch.randn(IMAGE_SIDE**2, config.vision_config.patch_dim, generator=generator)
    prompt = Prompt(torch.cat([torch.tensor(image), text]), pixels, torch.tensor([[1, IMAGE_SIDE, IMAGE_SIDE]]))
    completions = list(torch.randint(256, (group, completion_tokens), generator=generator).to(CARD))
    return Case(config, prompt, completions, torch.randn(group, generator=generator).to(CARD))


if __name__ == "__main__":
    main()
