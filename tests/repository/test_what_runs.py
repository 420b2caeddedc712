"""Check that a GRPO step runs the code of the reading list, so that its readers have read the training code."""

import contextlib
import sys
import threading

from minivlmrl.commands.train import train_recipe
from tests.helpers.links import ROOT, reading_list


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
    """Return the reading list as {file such as "losses/grpo": name with which a reader begins}."""
    package = ROOT / "minivlmrl"
    return {path.relative_to(package).with_suffix("").as_posix(): name for path, name in reading_list().items()}


SMALL = ["--num_threads=1", "--grpo.prompts_per_step=2", "--grpo.num_generations=2", "--grpo.max_steps=1"]


def test_a_step_runs_the_reading_list(tmp_path):
    recipe = str(ROOT / "recipes" / "shapes.yaml")
    with functions_that_run() as ran:
        train_recipe([recipe, f"--output_dir={tmp_path / 'run'}", "--data.eval_rows=1", *SMALL, "--stages=[grpo]"])
    for file, name in begin_with().items():
        assert any(found == name or found.startswith(f"{name}.") for found in ran[file]), f"{file}.{name}"
