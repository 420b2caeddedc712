"""Ways to train a model on one card, what each needs by `python -m minivlmrl plan`, and which cards that fits.

python benchmarks/what_fits.py FOLDER_OR_CONFIG [RECIPE]     # RECIPE: by default recipes/own_data.yaml
"""

import sys
from pathlib import Path

from minivlmrl.hub.folder import read_json
from minivlmrl.hub.model_config import ModelConfig
from minivlmrl.run.config import load_config, recipes_folder
from minivlmrl.run.plan import GB, IMAGE_TOKENS, TEXT_TOKENS, Costs, most, plan

CARDS = (24, 48, 80)  # GB
BFLOAT16 = ["--model.dtype=bfloat16", "--model.compute_dtype=null"]
LORA = ["--adapter.r=16", "--adapter.target=[language, vision, merger]"]
OFFLOAD = ["--sharding.enabled=true", "--sharding.cpu_offload=true", "--rollout.gather_weights=false"]
EIGHT_BITS = ["--optimizer.name=adamw_8bit"]
WAYS = {
    "all weights, float32": [],
    "all weights, float32, 8-bit AdamW": EIGHT_BITS,
    "all weights, bfloat16, 8-bit AdamW": [*EIGHT_BITS, *BFLOAT16],
    "LoRA on float32": LORA,
    "LoRA on bfloat16": [*LORA, *BFLOAT16],
    "LoRA on NF4": [*LORA, *BFLOAT16, "--adapter.quantize=nf4"],
    "all weights, float32, in host memory": OFFLOAD,
}


def main(model: str, recipe: str = ""):
    """Print a Markdown table."""
    path, recipe = Path(model), recipe or recipes_folder() / "own_data.yaml"
    costs = Costs(ModelConfig.from_dict(read_json(path if path.is_file() else path / "config.json")))
    print("| what is trained | GB | fits | options |\n|---|---|---|---|")
    for name, options in WAYS.items():
        run = load_config(recipe, options)
        needed = most(plan(run, run.stages[0], costs, 1, TEXT_TOKENS, IMAGE_TOKENS)) / GB
        cards = ", ".join(str(card) for card in CARDS if needed <= card) or "none"
        print(f"| {name} | {needed:.1f} | {cards} | {' '.join(f'`{option}`' for option in options)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
