"""Test how a process reports errors.

A user's mistake is one line, a bug is a traceback, and torchrun's summary contains the same.
"""

import errno
import re
from functools import partial

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from minivlmrl.commands.train import train_recipe
from minivlmrl.rewards.text import accuracy
from minivlmrl.run.process import run_rank


@pytest.fixture
def ended(monkeypatch, tmp_path, capfd):
    """Return a function that calls main as a rank under torchrun.

    The function returns the exit code, the printed errors, and torchrun's error summary.
    """
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def ended(main, *arguments):
        with pytest.raises(SystemExit) as end:
            run_rank(partial(main, list(arguments)))
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=end.value.code, error_file=str(file))
        return end.value.code, capfd.readouterr().err, str(ChildFailedError("train.py", {0: failure}))

    return ended


@pytest.mark.parametrize(("arguments", "sentence"), [
    (["nowhere.yaml"], "nowhere.yaml: this recipe does not exist"),
    (["shape.yaml"], "shape.yaml: this recipe does not exist; did you mean shapes.yaml?"),
    (["--seed=x"], "command line: seed is 'x', but it must be of type int"),
    (["--seed={"], "command line: quote the value of seed: the text is not valid YAML (while parsing"),
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


OWN_STAGE = """
from minivlmrl.trainers.base import Trainer
from minivlmrl.trainers.grpo import GRPOTrainer


class Nameless(Trainer):
    pass


class Stepless(Trainer):
    stage = "own"


class Base(GRPOTrainer):
    stage = "own"


class Narrow(Base):
    def __init__(self, run):
        pass


class Gone(Base):
    def prepare(self, rollout, parts):
        return {}["gone"]


class Exit(Base):
    def loss(self, batch):
        raise SystemExit(0)


class Scalar(Base):
    def loss(self, batch):
        return super().loss(batch)[0]


class Ends(Base):
    def steps(self, batches):
        return iter([])


class NoMetrics(Base):
    def evaluate(self, rows):
        pass
"""


@pytest.mark.parametrize(("name", "sentence"), [
    ("Nameless", r"stages: .*: the attribute stage of the class \(defined in .*my_stage\.py:6\) is None, but it"),
    ("Stepless", r"stages: .*: the class Stepless \(defined in .*my_stage\.py:10\) has no method steps; define"),
    ("Narrow", r"the class of the stage own \(defined in .*my_stage\.py:18\) cannot be called"),
    ("Gone", r".*my_stage\.py:25: the code of this file raised KeyError: 'gone'"),
    ("Exit", r".*my_stage\.py:30: the code of this file raised SystemExit: 0"),
    ("Scalar", r"the method loss of the stage own \(defined in .*my_stage\.py:34\) returned tensor\("),
    ("Ends", r"the method steps of the stage own \(defined in .*my_stage\.py:39\) did not yield a Step"),
    ("NoMetrics", r"the method evaluate of the stage own \(defined in .*my_stage\.py:44\) returned None, but it must"),
])  # fmt: skip
def test_a_mistake_in_an_own_stage_names_its_line(ended, home, tmp_path, name, sentence):
    (tmp_path / "my_stage.py").write_text(OWN_STAGE)
    arguments = [f"--stages=[{tmp_path}/my_stage.py:{name}]", f"--output_dir={tmp_path}/run"]
    if name not in ("Nameless", "Stepless"):
        arguments += ["--own.prompts_per_step=4", "--own.micro_batch_size=4", "--own.max_steps=1"]
    code, printed, _ = ended(train_recipe, str(home / "recipe.yaml"), *arguments)
    assert code == 2 and "Traceback" not in printed
    assert re.match(sentence, printed.splitlines()[-1]), printed


def test_only_the_first_rank_prints_a_mistake(ended, monkeypatch):
    """Under torchrun, the summary shows all ranks' mistakes.

    Otherwise each rank prints its own mistakes.
    """
    monkeypatch.setenv("RANK", "1")
    assert ended(train_recipe, "--seed=x")[:2] == (2, "")
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert ended(train_recipe, "--seed=x")[:2] == (2, "command line: seed is 'x', but it must be of type int\n")


def test_a_full_disk_is_reported_as_full(ended):
    def main(_arguments):
        with open("/dev/full", "w") as file:  # the operating system raises this error, not our code
            print("metrics", file=file)

    code, printed, _ = ended(main)
    said = "[Errno 28] No space left on device: the disk is full; free some space and continue with --resume=auto\n"
    assert (code, printed) == (2, said)


@pytest.mark.parametrize(("error", "says"), [
    (OSError(errno.EFBIG, "File too large"), "[Errno 27] File too large: raise the limit of file sizes (ulimit -f)"),
    (IsADirectoryError(errno.EISDIR, "Is a directory", "metrics.jsonl"), "[Errno 21] Is a directory: 'metrics.jsonl'"),
])  # fmt: skip
def test_file_system_errors_are_one_line(ended, error, says):
    def main(_arguments):
        raise error

    code, printed, _ = ended(main)
    assert code == 2 and printed.startswith(says) and printed.count("\n") == 1


def test_too_little_memory_is_one_line(ended):
    code, printed, _ = ended(lambda _: bytearray(2**60) and 0)
    assert (code, printed) == (2, "not enough memory; decrease the sizes in the recipe or in the files of the model\n")
