"""One forward and backward of Qwen3.5 on a group, by its size: a prompt once, beside a row for each completion.

python benchmarks/recurrent.py            # five minutes on one CPU thread
python benchmarks/recurrent.py --json FILE

A prompt of 312 tokens, 256 of them of an image, and completions of 64, float32, recipes/shapes_qwen3_5_model.json.
`rows` is the same code with a prompt for each completion, `transformers` its model on these rows as one batch, without
padding. Group and rows have the same results (float64 tells). Operations are those that torch's FlopCounterMode
counts, and of triangular systems; times are medians of CPU time.
"""

import argparse
import json
from pathlib import Path

import cpu
import torch
from torch.utils.flop_counter import FlopCounterMode

from minivlmrl.batch import pack
from minivlmrl.hub.family import memory_name
from minivlmrl.logprobs import per_token_logps
from minivlmrl.scale.checkpoint import random_model
from minivlmrl.tasks import shapes

MODEL = Path(__file__).resolve().parents[1] / "recipes" / "shapes_qwen3_5_model.json"
SIZES, PROMPT, COMPLETION = (1, 2, 4, 8, 16), 312, 64


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3, help="timed calls of each way")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    o = parser.parse_args()
    torch.set_num_threads(1)
    model = random_model(MODEL, shapes.tokenizer(), seed=0)[0]
    theirs, rows = theirs_of(model), []
    calls = ways(model.double(), theirs, 3)
    print(f"float64 max difference {cpu.farthest({name: calls[name] for name in ('group', 'rows')}):.1e}", flush=True)
    model.float()
    print("| G | operations, 1e9 | of rows | of transformers | CPU ms | rows | transformers |\n" + "|---" * 7 + "|")
    for size in SIZES:
        calls = ways(model, theirs, size)
        counts = {name: count(call) / 1e9 for name, call in calls.items()}
        spent = cpu.in_turn(calls, o.repeats)
        rows.append({"G": size, "operations": counts, "milliseconds": spent})
        cells = [f"{counts[name]:.1f}" for name in calls] + [f"{spent[name]:.0f}" for name in calls]
        print(f"| {size} | {' | '.join(cells)} |", flush=True)
    if o.json:
        o.json.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def theirs_of(model: torch.nn.Module) -> torch.nn.Module:
    """The same weights in transformers' model."""
    import transformers

    config = transformers.Qwen3_5Config(**model.config.to_dict())
    theirs = transformers.Qwen3_5ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    theirs.load_state_dict({memory_name(name): p for name, p in model.state_dict().items()})
    return theirs


def ways(model: torch.nn.Module, theirs: torch.nn.Module, size: int) -> dict[str, cpu.Call]:
    """The three ways, for a group of this size."""
    calls, generator = {}, torch.Generator().manual_seed(0)
    prompt = cpu.make_prompt(model.config, PROMPT, generator)
    ids = torch.randint(cpu.TEXT_TOKENS, (size, COMPLETION), generator=generator)
    dtype = model.lm_head.weight.dtype
    prompt.pixel_values = prompt.pixel_values.to(dtype)
    group = pack([prompt], [list(ids)], model.config)
    repeated = pack([prompt] * size, [[row] for row in ids], model.config)

    def ours(batch):
        logps, _ = per_token_logps(model, batch)
        return cpu.gradients_of(model, logps, logps.sum())

    def transformers():
        whole = torch.cat([prompt.input_ids.expand(size, -1), ids], dim=1)
        kinds = (whole == model.config.image_token_id).long()
        given = {"pixel_values": prompt.pixel_values.float().repeat(size, 1)}
        given |= {"image_grid_thw": prompt.image_grid_thw.repeat(size, 1), "mm_token_type_ids": kinds}
        logits = theirs(input_ids=whole, **given, logits_to_keep=COMPLETION + 1).logits[:, :-1]
        logps = logits.log_softmax(-1).gather(2, ids[..., None]).flatten()
        return cpu.gradients_of(theirs, logps, logps.sum())

    calls["group"], calls["rows"] = (lambda batch=batch: ours(batch) for batch in (group, repeated))
    calls["transformers"] = transformers
    return calls


def triangular(a_shape, b_shape, *_, out_shape=None, **__) -> int:
    """Multiplications and additions of a triangular system with b_shape[-1] right sides."""
    return a_shape.numel() * b_shape[-1]


def count(call: cpu.Call) -> int:
    """Operations of one call."""
    with FlopCounterMode(display=False, custom_mapping={torch.ops.aten.linalg_solve_triangular: triangular}) as counter:
        call()
    return counter.get_total_flops()


if __name__ == "__main__":
    main()
