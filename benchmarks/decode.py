"""Tokens a second of decoding, here and in transformers' `generate` with its cache: 1, 8 and 64 rows.

python benchmarks/decode.py --json FILE      # Qwen2.5-VL-3B on a GPU; without one the default recipe's model on the CPU
python benchmarks/decode.py --toy            # at toy size in float32, on a CPU too: that it runs
python benchmarks/decode.py --uneven --tokens 256 --ways ours "ours, eager" transformers   # a few rows are long

1 row is a prompt with one completion, 8 are one with 8, 64 are 8 with 8. On a GPU, in bfloat16, each prompt has an
image of 1,000 tokens and 100 tokens of text, and each completion exactly 256 tokens; on a CPU, in float32, prompts and
completions are those of grpo_step.py. Both sides share random weights. Seconds are from the prompt to the last token,
prefill included, medians of calls in turn. `ours` decodes as training does on a GPU, by one CUDA graph; `ours, eager`
kernel by kernel, as on a CPU. `predicted` is roofline.py's. With --uneven rows end as in a rollout: lengths
are exponential with a mean of 2 in 7 of the longest, and tokens that are drawn after a row's end do not count.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # before torch is imported, as minivlmrl sets it for runs
import roofline
import torch
from gpu_step import CARD, Case, build, card, make_case, take_turns, twin, versions
from sizes import card_named
from torch import Tensor

from minivlmrl.generate import Decode, SamplingConfig, draw_by, generate, make_choose
from minivlmrl.run.memory import Work
from minivlmrl.sampling.captured import CapturedDecode
from minivlmrl.scale.checkpoint import random_model
from minivlmrl.tasks import shapes

SIZES = ((1, 1), (1, 8), (8, 8))  # prompts, completions of each
COLUMNS = ("prompt_tokens", "rows", "way", "seconds", "tokens_per_second", "times_transformers", "predicted")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes in float32")
    parser.add_argument("--repeats", type=int, help="timed calls of each way, by default 2, without a GPU 10")
    parser.add_argument("--uneven", action="store_true", help="completions of many lengths")
    parser.add_argument("--tokens", type=int, help="of the longest completion")
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    on_cpu = ["ours, eager", "transformers"]
    parser.add_argument("--ways", nargs="+", choices=("ours", *on_cpu), help="by default all of the device")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    o = parser.parse_args()
    small = CARD.type == "cpu" and not o.toy
    o.ways = o.ways or (on_cpu if small else ["ours", *on_cpu])
    if small:
        torch.set_num_threads(o.threads)
    rows = []
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for case in small_cases() if small else [make_case(o.toy, peer_rows=1)]:
        if o.tokens:
            case.completions = list(torch.zeros(len(case.completions), o.tokens))
        calls = model_calls(case, small or o.toy, "transformers" in o.ways)
        for prompts, generations in SIZES:
            lengths = lengths_of(prompts * generations, len(case.completions[0]), o.uneven)
            ways = {way: partial(calls[way], prompts, generations, lengths) for way in o.ways if way in calls}
            results = take_turns(ways, o.repeats or (10 if small else 2))
            peer = results.get("transformers", {}).get("seconds")
            for way, numbers in results.items():
                row = {"prompt_tokens": len(case.prompt.input_ids), "rows": prompts * generations, "way": way}
                row |= numbers
                if "seconds" in row:
                    row["tokens_per_second"] = lengths.sum().item() / row["seconds"]
                    row["times_transformers"] = peer and peer / row["seconds"]
                if way.startswith("ours") and not small and not o.uneven:
                    row["predicted"] = predicted(case, prompts, generations, way.replace("ours", "decode"))
                shown = (f"{x:.4g}" if isinstance(x, float) else str(x or "") for x in map(row.get, COLUMNS))
                print(f"| {' | '.join(shown)} |", flush=True)
                rows.append(row)
    if o.json:
        about = {"card": card(), "versions": versions()}
        o.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def lengths_of(rows: int, tokens: int, uneven: bool) -> Tensor:
    """(rows,) tokens of each completion, the longest has all."""
    if not uneven:
        return torch.full((rows,), tokens)
    shares = (torch.randperm(rows, generator=torch.Generator().manual_seed(0)) + 1) / (rows + 1)
    lengths = (-(1 - shares).log() * tokens / 3.5).ceil().clamp(1, tokens).long()
    return lengths.scatter(0, lengths.argmax(0, keepdim=True), tokens)


def small_cases() -> Iterator[Case]:
    """The default recipe's model and the prompts of grpo_step.py, one of each length."""
    import grpo_step  # here: a GPU's case needs no TRL

    model, processor = random_model(grpo_step.MODEL_CONFIG, shapes.tokenizer(), seed=0)
    completions = list(torch.zeros(grpo_step.NUM_GENERATIONS, grpo_step.NEW_TOKENS))
    for size, _ in grpo_step.CASES:
        [row] = grpo_step.make_rows(size, 1)
        yield Case(model.config, processor(row.messages, row.images), completions, torch.zeros(0), peer_rows=1)


def model_calls(case: Case, wide: bool, peer: bool) -> dict[str, Callable]:
    """way -> (prompts, completions of each, their lengths) -> nothing; both share their weights."""
    ours = build(case.config, torch.float32 if wide else torch.bfloat16)
    theirs = twin(ours) if peer else None
    if theirs:
        theirs.generation_config.eos_token_id = None  # nothing ends a completion
    tokens = len(case.completions[0])
    drawn = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "pad_token_id": 0}

    @torch.inference_mode()
    def decode(prompts, generations, lengths, step=CapturedDecode):
        draw = draw_by(torch.rand(prompts * generations, tokens, dtype=torch.float64), CARD)
        drawn_by = make_choose(SamplingConfig(), (), draw, device=CARD)
        ends = lengths.to(CARD)

        def choose(logits, rows, step):
            ids, logps, _ = drawn_by(logits, rows, step)
            return ids, logps, ends[rows] <= step + 1

        groups = generate(ours, [case.prompt] * prompts, generations, tokens, choose, step())
        assert [len(completion.ids) for group in groups for completion in group] == lengths.tolist()

    def decode_with_transformers(prompts, generations, lengths):
        ends = lengths.to(CARD) + len(case.prompt.input_ids)
        stop = [lambda ids, scores, **_: ids.shape[1] >= ends]
        inputs = {name: torch.cat([x] * prompts) for name, x in case.inputs.items()}
        ids = theirs.generate(**inputs, **drawn, num_return_sequences=generations, stopping_criteria=stop)
        assert ids.shape == (prompts * generations, len(case.prompt.input_ids) + tokens)

    peers = {"transformers": decode_with_transformers} if theirs else {}
    return {"ours": decode, "ours, eager": partial(decode, step=Decode)} | peers


def predicted(case: Case, prompts: int, generations: int, decode: str) -> float:
    """Tokens a second by the roofline, prefill included."""
    image = int((case.prompt.input_ids == case.config.image_token_id).sum())
    tokens = len(case.completions[0])
    work = Work(prompts, generations, len(case.prompt.input_ids) - image, image, tokens)
    counts = roofline.phases(case.config, card_named(card()), work)
    seconds = roofline.grpo_step(counts, case.config, 1, work, fsdp=False)
    return prompts * generations * tokens / (seconds["prefill"] + seconds[decode])


if __name__ == "__main__":
    main()
