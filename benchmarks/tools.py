"""What looks cost: a step whose completions each ask for a crop, beside one whose completions draw as many tokens.

    python benchmarks/tools.py [--repeats 3] [--crops 0,6,64,256]   # one thread; seconds of the processor, the least

20 prompts of recipes/zoom.yaml with 8 completions, random weights, which draw 24 tokens. With the tool every completion
calls it after its fifth token, whatever it wrote, and reads a crop of so many tokens.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import PIL.Image
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from minivlmrl.batch import pack  # noqa: E402
from minivlmrl.environments import tool_sampler  # noqa: E402
from minivlmrl.generate import Decode  # noqa: E402
from minivlmrl.hub.code_names import load_name  # noqa: E402
from minivlmrl.logprobs import per_token_logps  # noqa: E402
from minivlmrl.run.batches import DataSection  # noqa: E402
from minivlmrl.sampling.sample import SamplingOptions  # noqa: E402
from minivlmrl.scale.checkpoint import random_model  # noqa: E402
from minivlmrl.scale.ranks import World  # noqa: E402

PROMPTS, GROUP, TOKENS = 20, 8, 24


def main(arguments: list[str]):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--crops", default="0,6,64,256", help="tokens of a crop")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    os.chdir(ROOT)
    tool_sampler.token_bytes = lambda *_: b"</zoom>"  # what may end a call
    tool_sampler.find_calls = lambda text, tools, ended: [("zoom", "northeast")] * (len(text) > 34 and not ended)
    task = load_name("recipes/zoom.py:TASK")
    training, _ = task.datasets(DataSection(eval_rows=1), 0)
    model, processor = random_model("recipes/zoom_model.json", task.tokenizer(), 0)
    rows = [training["prompts"][i] for i in range(PROMPTS)]
    prompts = [row.prompt(processor) for row in rows]
    steps = []
    step = Decode.__call__
    Decode.__call__ = lambda *given: steps.append(1) or step(*given)
    print(f"{'crop':>8} {'decode steps':>13} {'rollout':>9} {'training':>9}")
    for tokens in map(int, options.crops.split(",")):
        environment = "recipes/zoom.py:Quarters" if tokens else None
        least = None
        crop = PIL.Image.new("RGB", (32, max(8 * tokens, 16)), (9, 99, 199))
        answer = [{"type": "image", "image": crop}], [(crop, *processor.image_processor(crop))], True
        tool_sampler.answer = lambda *_, answer=answer: answer
        limit = TOKENS + tokens + 2 * (tokens > 0)  # a picture is between two tokens
        sampling = SamplingOptions(max_new_tokens=limit, stop_token_ids=[], environment=environment)
        for _ in range(options.repeats):
            sample = tool_sampler.build_sampler(model, processor, sampling, World())
            steps.clear()
            begun = time.process_time()
            completions = sample(prompts, GROUP, [str(i) for i in range(PROMPTS)])
            drawn = time.process_time()
            per_token_logps(model, pack(prompts, completions, model.config))[0].sum().backward()
            spent = drawn - begun, time.process_time() - drawn
            least = [min(pair) for pair in zip(spent, least or spent, strict=True)]
            assert {int(c.written.sum()) for group in completions for c in group} == {TOKENS}
        print(f"{tokens:8} {len(steps):13} {least[0]:8.3f}s {least[1]:8.3f}s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
