"""A control: routers keep their random weights, all else is trained as the recipe says.

python benchmarks/frozen_routes.py recipes/shapes.yaml --model.config=recipes/shapes_qwen3_vl_moe_model.json
"""

import sys

from minivlmrl.config.loading import load_config
from minivlmrl.run.loop import start


def freeze_routers(algorithm, *_):
    """Leave the routers' weights out of the step: AdamW skips what has no gradient."""
    for name, parameter in algorithm.trained.named_parameters():
        if name.endswith(".mlp.gate.weight"):
            parameter.requires_grad_(False)


if __name__ == "__main__":
    sys.exit(start(load_config(sys.argv[1], sys.argv[2:]), freeze_routers))
