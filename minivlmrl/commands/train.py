"""Train a recipe.

python train.py                              # recipes/shapes.yaml: a tiny model, 30 to 120 seconds
python train.py RECIPE --section.name=value  # another recipe, with an option changed
python train.py RECIPE --resume=auto         # continue from the newest state in output_dir
python train.py RECIPE --seeds=0,1,2         # one run per seed, in output_dir/seed0 and so on; `report` compares them
python train.py --help [SECTION]             # options and defaults
torchrun --nproc_per_node=8 train.py RECIPE  # eight GPUs

If you have no clone of the repository, run `minivlmrl train` instead of `python train.py`.
"""

from functools import partial

from minivlmrl.config.import_utils import recipes_folder
from minivlmrl.config.loading import load_config
from minivlmrl.config.options import RunConfig
from minivlmrl.run.loop import run_training
from minivlmrl.run.process import run_rank
from minivlmrl.run.seeds import take_seeds, train_seeds


def main(arguments: list[str]):
    if "--help" in arguments:
        from minivlmrl.commands.help import print_options

        print_options(*(argument for argument in arguments if argument != "--help"))
    else:
        run_rank(partial(train_recipe, arguments))


def train_recipe(arguments: list[str]) -> int:
    seeds, arguments = take_seeds(arguments)
    config = parse_arguments(arguments)
    return train_seeds(config, seeds, arguments) if seeds else run_training(config)


def parse_arguments(arguments: list[str]) -> RunConfig:
    """Load a recipe from the arguments [RECIPE] [--section.name=value ...]."""
    if not arguments or arguments[0].startswith("--"):
        arguments = [str(recipes_folder() / "shapes.yaml"), *arguments]
    return load_config(arguments[0], arguments[1:])
