"""Check that a GRPO step runs the functions of the reading list.

The tests train the default recipe, a folder that transformers wrote, and a model on a simulated GPU.
`pytest -s tests/repository/test_what_runs.py` prints the functions.
"""

import contextlib
import re
import shutil
import sys
import threading

import pytest
from links import ROOT
from pretend_cuda import CUDA, PretendCuda
from reading_list import reading_list

from minivlmrl.commands.train import train_recipe
from minivlmrl.distributed.process_group import World

import stages

# functions that every step runs, in addition to those in README's table
NEEDED = {
    "data/chat_template": {"render"},
    "model/vision": {"VisionTransformer.forward", "VisionBlock.forward"},
    "model/rope": {"get_rope_index", "text_rotary", "apply_rotary"},
    "model/attention": {"GroupAttention.__call__", "DecodeAttention.__call__"},
    "model/decoder": {
        "VisionLanguageModel.forward",
        "TextModel.forward",
        "DecoderLayer.forward",
        "SelfAttention.forward",
    },
    "generation/generate": {
        *("generate", "prefill", "Decode.__call__"),
        *("make_token_sampler.<locals>.sample_token", "inverse_cdf", "to_completions"),
    },
    "trainers/rollout": {f"RolloutTrainer.{name}" for name in ("steps", "sample_rollout", "split", "pack")},
    "trainers/grpo": {f"GRPOTrainer.{name}" for name in ("roll_out", "prepare", "micro_batches", "loss")},
}


@contextlib.contextmanager
def functions_that_run():
    """Record which functions of the reading list run inside the block; yield {file: names of called functions}."""
    ran = {name: set() for name in begin_with()}
    files = {str(ROOT / "minivlmrl" / f"{name}.py"): found for name, found in ran.items()}

    def note(frame, event, _):
        if event == "call" and (found := files.get(frame.f_code.co_filename)) is not None:
            found.add(frame.f_code.co_qualname)

    for profile in (sys.setprofile, threading.setprofile):  # threads prepare prompts in advance
        profile(note)
    try:
        yield ran
    finally:
        for profile in (sys.setprofile, threading.setprofile):
            profile(None)


def begin_with():
    """Return README's reading list as {file such as "losses/grpo": name with which a reader begins}."""
    package = ROOT / "minivlmrl"
    return {path.relative_to(package).with_suffix("").as_posix(): name for path, name in reading_list().items()}


SMALL = ["--num_threads=1", "--grpo.prompts_per_step=2", "--grpo.num_generations=2", "--grpo.max_steps=1"]


def train_by(recipe, output, *options):
    train_recipe([str(ROOT / "recipes" / recipe), f"--output_dir={output}", "--data.eval_rows=1", *SMALL, *options])


def default_recipe(tmp_path, checkpoint, rows):
    train_by("shapes.yaml", tmp_path / "run", "--stages=[grpo]")


def own_folder(tmp_path, checkpoint, rows):
    """Train recipes/own_data.yaml from a folder with weights, config and template as transformers and the hub write."""
    transformers = pytest.importorskip("transformers", reason="oracle missing: pip install transformers==5.23.0")
    folder = shutil.copytree(checkpoint, tmp_path / "folder")
    theirs = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(checkpoint)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    theirs.save_pretrained(folder)
    files = [f"--model.path={folder}", f"--data.train_file={rows}", f"--data.eval_file={rows}"]
    train_by("own_data.yaml", tmp_path / "run", *files, "--sampling.max_new_tokens=4", "--data.max_pixels=3136")


def pretended_card(tmp_path, checkpoint, rows):
    stages.write_recipe(tmp_path)
    with PretendCuda():
        stages.Stage(tmp_path, "grpo", "--rewards={format: 1}", *SMALL, world=World(device=CUDA)).go()


@pytest.mark.parametrize("way", [default_recipe, own_folder, pretended_card])
def test_a_step_runs_the_reading_list(way, tmp_path, checkpoint, rows):
    """The fixtures train, too, but before the recording starts."""
    with functions_that_run() as ran:
        way(tmp_path, checkpoint, rows)
    print(f"\n{way.__name__}", *(f"  {name}: {', '.join(sorted(found))}" for name, found in ran.items()), sep="\n")
    for file, name in begin_with().items():
        assert any(found == name or found.startswith(f"{name}.") for found in ran[file]), f"{file}.{name}"
    missing = {file: names - ran[file] for file, names in NEEDED.items()}
    assert {file: names for file, names in missing.items() if names} == {}


def test_no_other_file_has_a_decoder_or_a_loop_of_its_own():
    """Only files of the reading list compute attention heads, generate tokens and compute the loss of GRPO.

    model/families/ is excluded, because it contains the layers in which model families differ.
    """
    own = re.compile(r"\.q_proj\(|\.down_proj\(|softmax\(-1\) @|def generate\(model|def grpo_loss")
    read = {*reading_list(), *(ROOT / "minivlmrl" / "model" / "families").glob("*.py")}
    others = [path for path in (ROOT / "minivlmrl").rglob("*.py") if path not in read]
    assert [path.name for path in others if own.search(path.read_text())] == []
