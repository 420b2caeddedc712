"""Test how a process reports errors: a user's mistake as one line, and a bug as a traceback."""

import errno
from functools import partial

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from minivlmrl.commands.train import train_recipe
from minivlmrl.rewards.text import accuracy
from minivlmrl.run.process import run_rank


@pytest.fixture
def ended(monkeypatch, tmp_path, capfd):
    """Return a function that calls main as a rank, and returns exit code, stderr and the summary of torchrun."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def ended(main, *arguments):
        with pytest.raises(SystemExit) as end:
            run_rank(partial(main, list(arguments)))
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=end.value.code, error_file=str(file))
        return end.value.code, capfd.readouterr().err, str(ChildFailedError("train.py", {0: failure}))

    return ended


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["nowhere.yaml"], "nowhere.yaml: there is no such recipe in "),
    (["shape.yaml"], "shape.yaml: there is no such recipe in "),
    (["--seed=x"], "command line: seed is 'x', but it must be of type int"),
    (["--seed={"], "command line: quote the value of seed: the text is not valid YAML (line 1, '{': close the bracket"),
], ids=str)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(ended, arguments, sentence):
    code, printed, summary = ended(train_recipe, *arguments)
    assert code == 2 and printed.startswith(sentence) and printed.count("\n") == 1
    *_, traceback, border = summary.splitlines()
    assert traceback == f"  traceback : {printed.strip()}" and set(border) == {"="}


def test_a_bug_keeps_its_traceback(ended):
    """A ValueError that Python raises in the package or in a custom reward is a bug."""
    for main in (lambda _: accuracy(["no truth"], []), lambda _: int("x")):
        code, printed, summary = ended(main)
        assert code == 1 and printed.startswith("Traceback") and "test_process.py" in printed
        assert "Traceback" in summary and "test_process.py" in summary


BASES = """
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.grpo import GRPOTrainer

class Base(GRPOTrainer):
    stage = "own"
"""
STAGES = {  # head of a class: (body, exit code, printed line)
    "Stepless(Trainer)": (
        "stage = 'own'", 2, "stages: FILE:Stepless: the class Stepless has no method steps; define this method; see",
    ),
    "Gone(Base)": ("def build_micro_batches(self, rollout, parts): return {}['gone']", 1, "KeyError: 'gone'"),
    "Exit(Base)": (
        "def loss(self, batch): raise SystemExit(0)", 1, "RuntimeError: the run called sys.exit before its end",
    ),
    "Listed(Base)": (
        "def loss(self, batch): return [super().loss(batch)[0]]", 2,
        "the method loss of the stage own returned [tensor(",
    ),
    "Other(Base)": ("pass", 2, "FILE defines no 'Missing'"),  # the recipe names the class Missing
}  # fmt: skip


@pytest.mark.parametrize("stage", STAGES)
def test_a_mistake_in_an_own_stage(ended, home, tmp_path, stage):
    body, code, line = STAGES[stage]
    file, name = tmp_path / "my_stage.py", stage.partition("(")[0].replace("Other", "Missing")
    file.write_text(f"{BASES}\n\nclass {stage}:\n    {body}\n")
    arguments = [f"--stages=[{file}:{name}]", f"--output_dir={tmp_path}/run"]
    if name not in ("Stepless", "Missing"):
        arguments += ["--own.prompts_per_step=4", "--own.micro_batch_size=4", "--own.max_steps=1"]
    found, printed, _ = ended(train_recipe, str(home / "recipe.yaml"), *arguments)
    assert found == code and ("Traceback" in printed) == (code == 1)
    assert f"\n{line}".replace("FILE", str(file)) in f"\n{printed}"
    if name in ("Gone", "Exit"):  # the user's line comes first, and again in the traceback
        assert f"{file}:10, in " in printed.partition("Traceback")[0] and f'File "{file}", line 10, in ' in printed


@pytest.mark.parametrize(("text", "code", "last_line"), [
    ("def f(completions, **columns)\n    return", 1, "SyntaxError: expected ':'"),
    ("def f(completions):\n    return []", 2, "row 0: reward FILE:f, for the completion '<answer>invented</answer>'"),
    (None, 2, "there is no file FILE; code is searched beside the recipe, in the working folder"),
])  # fmt: skip
def test_a_mistake_in_an_own_reward(ended, home, tmp_path, text, code, last_line):
    file = tmp_path / ("long" * 20) / "mine.py"  # a path is not shortened
    file.parent.mkdir()
    if text is not None:
        file.write_text(text)
    rewards = f"--rewards={{{file}:f: 1}}"
    found, printed, _ = ended(train_recipe, str(home / "recipe.yaml"), rewards, f"--output_dir={tmp_path}/run")
    assert found == code and printed.splitlines()[-1].startswith(last_line.replace("FILE", str(file)))
    assert code == 2 or f"\n{file}:1: def f(completions" in f"\n{printed}".partition("Traceback")[0]


def test_only_the_first_rank_prints_a_mistake(ended, monkeypatch):
    """torchrun's summary shows the mistakes of all ranks; without torchrun, each rank prints its own mistake."""
    monkeypatch.setenv("RANK", "1")
    assert ended(train_recipe, "--seed=x")[:2] == (2, "")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert ended(train_recipe, "--seed=x")[:2] == (2, "command line: seed is 'x', but it must be of type int\n")


@pytest.mark.parametrize(("error", "line"), [
    (OSError(errno.ENOSPC, "No space left on device"), "[Errno 28] No space left on device"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "metrics.jsonl"), "[Errno 21] Is a directory: 'metrics.jsonl'"),
    (MemoryError(), "not enough memory; reduce the sizes in the recipe or in the model's files"),
], ids=["a full disk", "a folder", "too little memory"])  # fmt: skip
def test_an_error_of_the_system_is_one_line(ended, error, line):
    def fail(_):
        raise error

    assert ended(fail)[:2] == (2, f"{line}\n")
