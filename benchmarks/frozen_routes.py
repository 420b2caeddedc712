"""A control: routers keep their random weights, all else is trained as the recipe says.

python benchmarks/frozen_routes.py recipes/shapes.yaml --model.config=recipes/shapes_qwen3_vl_moe_model.json
"""

import sys

from minivlmrl.config.loading import load_config
from minivlmrl.run.callbacks import Callback, default_callbacks
from minivlmrl.run.loop import start


class FreezeRouters(Callback):
    """Leaves the routers' weights out of each step: AdamW skips what has no gradient."""

    def on_step_begin(self, algorithm, *_):
        for name, parameter in algorithm.trained.named_parameters():
            if name.endswith(".mlp.gate.weight"):
                parameter.requires_grad_(False)


if __name__ == "__main__":
    config = load_config(sys.argv[1], sys.argv[2:])
    sys.exit(start(config, [*default_callbacks(config), FreezeRouters()]))
