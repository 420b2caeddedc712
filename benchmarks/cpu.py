"""Two parts of a training step on one CPU thread, each beside the ways that others do it.

python benchmarks/cpu.py logprobs    # log-probabilities and entropies from hidden states; three minutes
python benchmarks/cpu.py group       # each prompt once for its G completions, or once for every completion; two minutes
python benchmarks/cpu.py group --toy --json FILE

The ways are compared in float64 (of log-probabilities: float32 against float64). Then they run in turn, each once to
warm up, and the median of their CPU time counts: of one forward and backward, with gradients of everything.

    logprobs    2,048 tokens, 32,000 words, states of 256 numbers, float32, in a process for each way. Peak: the most
                memory held during the first call, above what the process held before, without the inputs.
    group       peer: the layout of other trainers, a row for each completion with a prompt and an image of its own,
                through the same model code. The tower spends 3.5 times as much on an image token as the decoder on any
                token, as in a VLM with a small decoder (Qwen2.5-VL-3B: .8, 7B: .4).
"""

import argparse
import dataclasses
import datetime
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from minivlmrl.batch import GroupBatch, pack
from minivlmrl.decoder import Qwen2_5_VL
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.kernels.linear_log_softmax import linear_log_softmax
from minivlmrl.logprobs import per_token_logps
from minivlmrl.rows import Prompt
from minivlmrl.scale.checkpoint import initialize, random_model
from minivlmrl.tasks import shapes

Call = Callable[[], list[Tensor]]  # one way: returns its results and gradients
RECIPE_MODEL = Path(__file__).resolve().parents[1] / "recipes" / "shapes_model.json"
# glibc returns what it frees, or the peaks of some peers would be those of its fragments
ALONE = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("logprobs", "group"))
    parser.add_argument("--toy", action="store_true", help="one small cell")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls of each way")
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--way", help=argparse.SUPPRESS)  # of `logprobs`: the one that this process is for
    o = parser.parse_args()
    torch.set_num_threads(1)
    if o.way:
        print(json.dumps(one_way(o.way, o.toy, o.repeats)))
        return
    print(f"torch {torch.__version__}, one thread, median of {o.repeats}", flush=True)
    rows = list({"logprobs": logprobs_rows, "group": group_rows}[o.part](o))
    if o.json:
        about = {"part": o.part, "toy": o.toy, "repeats": o.repeats, "torch": torch.__version__}
        about |= {"date": datetime.datetime.now(datetime.UTC).date().isoformat()}
        o.json.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")


def show(row: dict) -> dict:
    print(", ".join(f"{k} {v:.3g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)
    return row


def farthest(ways: dict[str, Call]) -> float:
    """Largest difference of any result from the first way's, as a share of the largest number of that tensor."""
    ours, *others = [call() for call in ways.values()]
    return max(share_off(a, b) for other in others for a, b in zip(other, ours, strict=True))


def share_off(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def in_turn(ways: dict[str, Call], repeats: int) -> dict[str, float]:
    """Median CPU milliseconds of each way; the first call of each warms up."""
    seconds = {name: [] for name in ways}
    for _ in range(repeats + 1):
        for name, spent in seconds.items():
            begin = time.process_time()
            ways[name]()
            spent.append(time.process_time() - begin)
    return {name: round(1e3 * statistics.median(spent[1:]), 2) for name, spent in seconds.items()}


def gradients_of(model: torch.nn.Module, result: Tensor, loss: Tensor) -> list[Tensor]:
    """The result and the gradient of the loss by each parameter."""
    return [result.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


# ---- logprobs: (hidden, weight, ids) -> log-probabilities, and entropies where a way has them ------


def naive(hidden, weight, ids):
    log_p = (hidden @ weight.T).log_softmax(-1)
    return log_p.gather(-1, ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def naive_without_entropy(hidden, weight, ids):
    return [(hidden @ weight.T).log_softmax(-1).gather(-1, ids[:, None])[:, 0]]


def load_trl(entropies: tuple[str, ...]) -> Callable:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    def trl(hidden, weight, ids):  # 32,768 ids a tile, as TRL's trainers pass
        found = ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, 32768, None, 1.0, entropies)
        return found[: 1 + len(entropies)]

    return trl


def load_torch() -> Callable:
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    options = LinearCrossEntropyOptions()  # in chunks, of a size that PyTorch chooses
    return lambda h, w, y: [-F.linear_cross_entropy(h, w, y, reduction="none", options=options)]


LOGPROBS = {  # way: how it is loaded; a peer that cannot be imported is named
    "naive": lambda: naive,
    "ours": lambda: linear_log_softmax,
    "TRL": lambda: load_trl(("entropy",)),
    "naive, without entropy": lambda: naive_without_entropy,
    "ours, without entropy": lambda: lambda *given: linear_log_softmax(*given)[:1],
    "TRL, without entropy": lambda: load_trl(()),
    "torch, without entropy": load_torch,
}


def logprobs_rows(o):
    for name in LOGPROBS:
        given = [sys.executable, __file__, "logprobs", "--way", name, "--repeats", str(o.repeats), *["--toy"] * o.toy]
        result = subprocess.run(given, env=os.environ | ALONE, capture_output=True, text=True)
        if result.returncode:
            sys.exit(f"{name}:\n{result.stderr}")
        yield show({"way": name} | json.loads(result.stdout.splitlines()[-1]))


def one_way(name: str, toy: bool, repeats: int) -> dict:
    """Milliseconds, peak and error of one way, in this process."""
    try:
        function = LOGPROBS[name]()
    except ImportError as error:
        return {"missing": str(error)}
    rows, vocab, width = (512, 4000, 32) if toy else (2048, 32000, 256)
    torch.manual_seed(0)
    hidden = torch.randn(rows, width).requires_grad_()
    weight = (torch.randn(vocab, width) * width**-0.5).requires_grad_()  # logits of standard deviation 1
    ids = torch.randint(0, vocab, (rows,))
    upstream = torch.randn(2, rows)

    def call(n=rows, function=function, dtype=torch.float32) -> list[Tensor]:
        leaves = [x.detach().to(dtype).requires_grad_() for x in (hidden[:n], weight)]
        outputs = function(*leaves, ids[:n])
        gradients = torch.autograd.grad(outputs, leaves, list(upstream[: len(outputs), :n].to(outputs[0].dtype)))
        return [*(x.detach() for x in outputs), *gradients]

    call(1)  # what is loaded once
    before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    call()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before / 2**20
    exact = call(64, naive_without_entropy if "without" in name else naive, torch.float64)
    error = max(share_off(a, b) for a, b in zip(call(64), exact, strict=True))
    return {"milliseconds": in_turn({name: call}, repeats)[name], "peak MiB": peak, "error": error}


# ---- group: the same prompts and completions, packed in two layouts ------------------------------------------------

IMAGE_SIDES = {64: 6, 128: 10, 312: 16}  # prompt tokens -> merged image tokens a side (84, 140 and 224 pixels)
TEXT_TOKENS = 256  # ids below are text, not control tokens
TOWER = {"depth": 4, "hidden_size": 96, "intermediate_size": 256}


def group_rows(o):
    """The default recipe's model with 4 decoder layers instead of 3, and another vision tower."""
    config = random_model(RECIPE_MODEL, shapes.tokenizer(), seed=0)[0].config
    tower = dataclasses.replace(config.vision_config, **TOWER)
    model = Qwen2_5_VL(dataclasses.replace(config, num_hidden_layers=4, vision_config=tower))
    initialize(model, torch.Generator().manual_seed(0))
    difference = farthest(layouts(model.double(), 64, 4, 16))
    yield show({"float64 max difference": difference})
    model.float()
    for cell in [(64, 4, 16)] if o.toy else product(IMAGE_SIDES, (4, 8, 16), (16, 48, 128)):
        spent = in_turn(layouts(model, *cell), o.repeats)
        shape = dict(zip(("prompt tokens", "G", "completion tokens"), cell, strict=True))
        yield show(shape | spent | {"ratio": round(spent["repeated"] / spent["group"], 2)})


def layouts(model: Qwen2_5_VL, prompt_tokens: int, num_generations: int, completion_tokens: int) -> dict[str, Call]:
    """Completion tokens come in one order in both."""
    config = model.config
    generator = torch.Generator().manual_seed(0)
    prompts = [make_prompt(config, prompt_tokens, generator) for _ in range(1 if prompt_tokens > 128 else 2)]
    shape = num_generations, completion_tokens
    groups = [list(torch.randint(TEXT_TOKENS, shape, generator=generator)) for _ in prompts]
    rows = [(prompt, [ids]) for prompt, group in zip(prompts, groups, strict=True) for ids in group]
    batches = {"group": pack(prompts, groups, config), "repeated": pack(*zip(*rows, strict=True), config)}

    def call(batch: GroupBatch) -> list[Tensor]:
        logps, _ = per_token_logps(model, batch)
        return gradients_of(model, logps, logps.sum())

    return {name: lambda batch=batch: call(batch) for name, batch in batches.items()}


def make_prompt(config: ModelConfig, tokens: int, generator: torch.Generator) -> Prompt:
    """Random text around one random image."""
    side = IMAGE_SIDES[tokens]
    merge = config.vision_config.spatial_merge_size
    image = [config.vision_start_token_id, *[config.image_token_id] * side**2, config.vision_end_token_id]
    before, after = torch.randint(TEXT_TOKENS, (tokens - len(image),), generator=generator).chunk(2)
    pixels = torch.randn((side * merge) ** 2, config.vision_config.patch_dim, generator=generator)
    grid = torch.tensor([[1, side * merge, side * merge]])
    return Prompt(torch.cat([before, torch.tensor(image), after]), pixels, grid)


if __name__ == "__main__":
    main()
