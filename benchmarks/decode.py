"""Tokens a second of decoding, here and in transformers' `generate` with its cache: 1, 8 and 64 rows.

python benchmarks/decode.py --json FILE                    # Qwen2.5-VL-3B on a GPU, random weights in bfloat16
python benchmarks/decode.py --toy                          # at toy size in float32, on a CPU too: that it runs
python benchmarks/decode.py --ways vllm                    # vLLM, if it is installed; alone, it takes the whole card

1 row is a prompt with one completion, 8 are one with 8, 64 are 8 with 8; each prompt has an image of 1,000 tokens and
100 tokens of text, and each completion exactly 256 tokens. Seconds are from the prompt to the last token, prefill
included. `ours` decodes as training does on a GPU, by one CUDA graph; `ours, eager` kernel by kernel. `predicted` is
roofline.py's. vLLM reads as many tokens of text alone: its processor needs files of the hub.
"""

import argparse
import importlib.util
import json
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import roofline
import torch
from gpu_step import CARD, Case, build, card, make_case, take_turns, versions
from sizes import HUB, card_named

from minivlmrl.generate import SamplingConfig, draw_by, generate
from minivlmrl.sampling.captured import generate_captured
from minivlmrl.tools.plan import Work

SIZES = ((1, 1), (1, 8), (8, 8))  # prompts, completions of each


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--toy", action="store_true", help="toy sizes in float32")
    parser.add_argument("--repeats", type=int, default=2, help="timed calls of each way")
    ways = ["ours", "ours, eager", "transformers"]
    parser.add_argument("--ways", nargs="+", default=ways, choices=(*ways, "vllm"))
    parser.add_argument("--json", type=Path, help="write the numbers here")
    o = parser.parse_args()
    if CARD.type == "cpu" and not o.toy:
        sys.exit("no GPU here: --toy runs everything at toy size")
    if "vllm" in o.ways and (len(o.ways) > 1 or importlib.util.find_spec("vllm") is None):
        sys.exit("vLLM is not installed" if len(o.ways) == 1 else "--ways vllm runs alone")
    case, rows = make_case(o.toy, peer_rows=1), []
    calls = vllm_calls(case) if "vllm" in o.ways else model_calls(case, o.toy)
    tokens = len(case.completions[0])
    print("| rows | way | seconds | tokens/s | predicted tokens/s |\n|---|---|---|---|---|")
    for prompts, generations in SIZES:
        ways = {way: partial(calls[way], prompts, generations) for way in o.ways}
        for way, numbers in take_turns(ways, o.repeats).items():
            row = {"rows": prompts * generations, "way": way, **numbers}
            if "seconds" in row:
                row["tokens_per_second"] = row["rows"] * tokens / row["seconds"]
            if way.startswith("ours"):
                row["predicted"] = predicted(case, prompts, generations, way.replace("ours", "decode"))
            cells = (row.get(name) for name in ("rows", "way", "seconds", "tokens_per_second", "predicted"))
            shown = (f"{x:.2f}" if isinstance(x, float) else str(x or "") for x in cells)
            print(f"| {' | '.join(shown)} |", flush=True)
            rows.append(row)
    if o.json:
        about = {"card": card(), "versions": versions()}
        o.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def model_calls(case: Case, toy: bool) -> dict[str, Callable]:
    """way -> (prompts, completions of each) -> nothing; both share their weights."""
    ours, theirs = build(case.config, torch.float32 if toy else torch.bfloat16)
    theirs.generation_config.eos_token_id = None  # nothing ends a completion
    tokens = len(case.completions[0])
    drawn = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "min_new_tokens": tokens}

    def decode(prompts, generations, sample=generate_captured):
        draw = draw_by(torch.rand(prompts, generations, tokens, dtype=torch.float64), CARD)
        sampling = SamplingConfig(max_new_tokens=tokens)
        groups = sample(ours, [case.prompt] * prompts, generations, sampling, (), draw)
        assert {len(completion.ids) for group in groups for completion in group} == {tokens}

    def decode_with_transformers(prompts, generations):
        inputs = {name: torch.cat([x] * prompts) for name, x in case.inputs.items()}
        ids = theirs.generate(**inputs, **drawn, num_return_sequences=generations)
        assert ids.shape == (prompts * generations, len(case.prompt.input_ids) + tokens)

    return {"ours": decode, "ours, eager": partial(decode, sample=generate), "transformers": decode_with_transformers}


def vllm_calls(case: Case) -> dict[str, Callable]:
    """As model_calls; vLLM draws weights of its own."""
    from vllm import LLM, SamplingParams

    folder = Path(tempfile.mkdtemp())
    hub = HUB["3b"] | {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(case.config.to_dict() | hub))
    text = {"skip_tokenizer_init": True, "limit_mm_per_prompt": {"image": 0, "video": 0}, "max_model_len": 2048}
    model, tokens = LLM(str(folder), load_format="dummy", dtype="bfloat16", **text), len(case.completions[0])

    def decode(prompts, generations):
        ids = [{"prompt_token_ids": [7 + i] * len(case.prompt.input_ids)} for i in range(prompts)]
        sampling = {"max_tokens": tokens, "ignore_eos": True, "detokenize": False}
        model.generate(ids, SamplingParams(n=generations, temperature=1.0, **sampling), use_tqdm=False)

    return {"vllm": decode}


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
