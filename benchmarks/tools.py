"""What a look costs: a step whose completions each ask for a crop, beside one whose completions draw as many tokens.

    python benchmarks/tools.py [--repeats 7]        # one thread, in turn; seconds of the processor, the least of each

20 prompts of recipes/zoom.yaml with 8 completions of 24 tokens, random weights. With the tool every completion calls it
after its fifth token, whatever it wrote: 6 of its tokens are a crop's, which the tower sees in sampling and training.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from minivlmrl.batch import pack  # noqa: E402
from minivlmrl.environments import tool_sampler  # noqa: E402
from minivlmrl.hub.checker import load_name  # noqa: E402
from minivlmrl.logprobs import per_token_logps  # noqa: E402
from minivlmrl.run.batches import DataSection  # noqa: E402
from minivlmrl.sampling.sample import SamplingOptions  # noqa: E402
from minivlmrl.scale.checkpoint import random_model  # noqa: E402
from minivlmrl.scale.ranks import World  # noqa: E402

PROMPTS, GROUP, TOKENS = 20, 8, 24


def main(arguments: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args(arguments).repeats
    torch.set_num_threads(1)
    os.chdir(ROOT)
    tool_sampler.token_bytes = lambda *_: b"</zoom>"  # what may end a call
    tool_sampler.find_calls = lambda text, tools, ended: [("zoom", "2")] * (len(text) > 34 and not ended)
    task = load_name("recipes/zoom.py:TASK")
    training, _ = task.datasets(DataSection(eval_rows=1), 0)
    model, processor = random_model("recipes/zoom_model.json", task.tokenizer(), 0)
    rows = [training["prompts"][i] for i in range(PROMPTS)]
    prompts = [row.prompt(processor) for row in rows]
    keys, world = [str(i) for i in range(PROMPTS)], World()
    least = {}
    for _ in range(repeats):
        for name, environment in (("with crops", "recipes/zoom.py:Quarters"), ("without", None)):
            sampling = SamplingOptions(max_new_tokens=TOKENS, stop_token_ids=[], environment=environment)
            sample = tool_sampler.build_sampler(model, processor, sampling, world)
            begun = time.process_time()
            completions = sample(prompts, GROUP, keys)
            drawn = time.process_time()
            per_token_logps(model, pack(prompts, completions, model.config))[0].sum().backward()
            spent = drawn - begun, time.process_time() - drawn
            looks = sum(len(completion.pictures) for group in completions for completion in group)
            assert looks == (PROMPTS * GROUP if environment else 0)
            least[name] = [min(pair) for pair in zip(spent, least.get(name, spent), strict=True)]
    print(f"{'':12} {'rollout':>9} {'training':>9}")
    for name, (rollout, train) in least.items():
        print(f"{name:12} {rollout:8.3f}s {train:8.3f}s")
    ratios = [a / b for a, b in zip(least["with crops"], least["without"], strict=True)]
    print(f"{'ratio':12} {ratios[0]:9.2f} {ratios[1]:9.2f}")


if __name__ == "__main__":
    main(sys.argv[1:])
