"""Time 5 rollouts (8 prompts x 8 completions x 64 tokens) in minivlmrl and in vLLM.

python benchmarks/vllm_speed.py
"""

import timeit
from functools import partial
from importlib.util import find_spec

from minivlmrl.config.options import SamplingOptions
from minivlmrl.distributed.device import find_device
from minivlmrl.distributed.process_group import World
from minivlmrl.generation.environments import make_sampler
from minivlmrl.model.build import random_model
from minivlmrl.tasks import shapes

world = World(device=find_device())
model, processor = random_model("recipes/shapes_model.json", shapes.tokenizer(), 0)
(model.bfloat16() if world.device.type == "cuda" else model).to(world.device)
prompts = [shapes.Shapes(8, "speed")[i].prompt(processor) for i in range(8)]
for engine in ("native", "vllm") if find_spec("vllm") else ("native",):
    options = SamplingOptions(max_new_tokens=64, stop_token_ids=[], engine=engine)
    sample = make_sampler(model, processor, options, world)
    seconds = timeit.repeat(partial(sample, prompts, 8, "abcdefgh"), number=1, repeat=5)
    print(engine, seconds)
