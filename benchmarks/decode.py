"""Measure tokens per second when decoding 1, 8 and 64 rows, also with transformers' `generate`.

python benchmarks/decode.py --json FILE      # Qwen2.5-VL-3B on a GPU; on a CPU the default recipe's model
python benchmarks/decode.py --toy            # test of the script: toy size in float32, also on a CPU

1 row is a prompt with one completion, 8 rows are a prompt with 8 completions, and 64 rows are 8 prompts with 8
completions each. On a GPU, in bfloat16, each prompt has an image of 1,000 tokens and 100 text tokens, and each
completion exactly 256 tokens. On a CPU, in float32, prompts and completions are the same as in grpo_step.py. Both sides
share random weights. The time is measured from the prompt to the last token, including prefill; the table has medians
of alternating calls. `ours` decodes with one CUDA graph, as in training on a GPU; `ours, eager` launches kernel by
kernel, as on a CPU.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported, as minivlmrl sets it for runs
import torch
from gpu_step import CARD, Case, build, make_case, take_turns, twin, write_numbers

from minivlmrl.generation.cuda_graphs import CapturedDecode
from minivlmrl.generation.generate import Decode, generate, make_token_sampler, sample_by_uniforms
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes

SIZES = ((1, 1), (1, 8), (8, 8))  # number of prompts, number of completions per prompt
COLUMNS = ("prompt_tokens", "rows", "way", "seconds", "tokens_per_second", "times_transformers")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes in float32")
    parser.add_argument("--repeats", type=int, help="timed calls of each way, by default 2, without a GPU 10")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    options = parser.parse_args()
    on_cpu = CARD.type == "cpu" and not options.toy
    if on_cpu:
        torch.set_num_threads(options.threads)
    repeats = options.repeats or (10 if on_cpu else 2)
    dtype = torch.float32 if on_cpu or options.toy else torch.bfloat16
    rows = []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for case in small_cases() if on_cpu else [make_case(options.toy)]:
        calls = model_calls(case, dtype)
        if on_cpu:
            del calls["ours"]  # there is no graph
        for prompts, generations in SIZES:
            for row in rows_of_size(case, calls, prompts, generations, repeats):
                show(row)
                rows.append(row)
    write_numbers(options.json, {"rows": rows})


def rows_of_size(case: Case, calls: dict[str, Callable], prompts: int, generations: int, repeats: int) -> list[dict]:
    """Time all implementations for one number of prompts and of completions per prompt."""
    ways = {way: partial(call, prompts, generations) for way, call in calls.items()}
    results = take_turns(ways, repeats)
    peer = results.get("transformers", {}).get("seconds")
    rows = []
    for way, numbers in results.items():
        row = {"prompt_tokens": len(case.prompt.input_ids), "rows": prompts * generations, "way": way, **numbers}
        if "seconds" in row:
            row["tokens_per_second"] = row["rows"] * len(case.completions[0]) / row["seconds"]
            row["times_transformers"] = peer and peer / row["seconds"]
        rows.append(row)
    return rows


def show(row: dict):
    cells = []
    for name in COLUMNS:
        value = row.get(name)
        cells.append(f"{value:.4g}" if isinstance(value, float) else str(value or ""))
    print(f"| {' | '.join(cells)} |", flush=True)


def small_cases() -> Iterator[Case]:
    """Yield cases with the default recipe's model and one prompt of each length of grpo_step.py."""
    import grpo_step  # imported here, because the case on a GPU needs no TRL

    model, processor = random_model(grpo_step.MODEL_CONFIG, shapes.tokenizer(), seed=0)
    completions = list(torch.zeros(grpo_step.NUM_GENERATIONS, grpo_step.NEW_TOKENS))
    for size in dict.fromkeys(size for size, *_ in grpo_step.CASES):
        [row] = grpo_step.make_rows(size, 1)
        yield Case(model.config, processor(row.messages, row.images), completions, torch.zeros(0))


def model_calls(case: Case, dtype: torch.dtype) -> dict[str, Callable]:
    """Return, for each implementation, a function (prompts, completions per prompt) to time; all share weights."""
    ours = build(case.config, dtype)
    theirs = twin(ours)
    tokens = len(case.completions[0])

    @torch.inference_mode()
    def decode(step: Callable, prompts: int, generations: int):
        draw = sample_by_uniforms(torch.rand(prompts * generations, tokens, dtype=torch.float64), CARD)
        sample_token = make_token_sampler(1.0, (), draw, device=CARD)
        groups = generate(ours, [case.prompt] * prompts, generations, tokens, sample_token, step())
        assert {len(completion.ids) for group in groups for completion in group} == {tokens}

    def decode_with_transformers(prompts: int, generations: int):
        inputs = {name: torch.cat([x] * prompts) for name, x in case.inputs.items()}
        ids = theirs.generate(
            **inputs, do_sample=True, top_k=0, max_new_tokens=tokens, pad_token_id=0, num_return_sequences=generations
        )
        assert ids.shape == (prompts * generations, len(case.prompt.input_ids) + tokens)

    calls = {"ours": partial(decode, CapturedDecode), "ours, eager": partial(decode, Decode)}
    if theirs:
        theirs.generation_config.eos_token_id = None  # so that all completions have the same length
        calls["transformers"] = decode_with_transformers
    return calls


if __name__ == "__main__":
    main()
