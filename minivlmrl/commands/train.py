"""Train a recipe.

python train.py                              # recipes/shapes.yaml: a tiny model, 30 to 120 seconds
python train.py RECIPE --section.name=value  # another recipe, with an option changed
python train.py RECIPE --resume=auto         # continue from the newest state in output_dir
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


def main(arguments: list[str]):
    if "--help" in arguments:
        from minivlmrl.commands.help import print_options

        print_options(*(argument for argument in arguments if argument != "--help"))
    else:
        run_rank(partial(train_recipe, arguments))


def train_recipe(arguments: list[str]) -> int:
    return run_training(parse_arguments(arguments))


def parse_arguments(arguments: list[str]) -> RunConfig:
    """Load a recipe from the arguments [RECIPE] [--section.name=value ...]."""
    if not arguments or arguments[0].startswith("--"):
        arguments = [str(recipes_folder() / "shapes.yaml"), *arguments]
    return load_config(arguments[0], arguments[1:])
