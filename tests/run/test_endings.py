"""Test the exit code and the saved state of runs in which a callback or a tracker raises an error.

test_wait.py tests slow and hanging callbacks.
"""

import os
import signal

import pytest

from minivlmrl.config.loading import load_config
from minivlmrl.monitor import report
from minivlmrl.run.callbacks import Callback, Watcher, default_callbacks
from minivlmrl.run.loop import run_training
from minivlmrl.run.process import run_rank
from tests.helpers.runs import metrics

pytestmark = pytest.mark.usefixtures("default_signals")
OPTIONS = ["--stages=[sft]", "--sft.max_steps=3", "--eval_steps=1", "--data.eval_rows=2", "--resume=auto"]
OPTIONS.append("--state_steps=2")


class Bad(Callback):
    """A callback that raises in the call `number` (from 1) of one method."""

    def __init__(self, method, number=1, error=None):
        self.calls = 0
        self.number = number
        self.error = error or KeyError("a bug of mine")
        setattr(self, method, self.fail)

    def fail(self, *_):
        self.calls += 1
        if self.calls == self.number:
            raise self.error
        return {}


class Signal(Callback):
    """A callback that sends SIGTERM to its own process in the second step."""

    def on_step_end(self, trainer, step, number, values):
        if number == 1:
            os.kill(os.getpid(), signal.SIGTERM)


TRACKER = """
def tracker(config, steps, closing):
    if {place!r} == "begin":
        raise KeyError("a bug of mine")

    def log(values, step):
        if {place!r} == "step" and step == 2:
            raise ConnectionError("offline,\\nafter all")

    def close():
        if {place!r} == "close":
            raise KeyError("a bug of mine")

    closing.callback(close)
    return log
"""


@pytest.fixture
def end(home, varied_rollouts, tmp_path, capfd):
    """Return a function that trains with callbacks, and returns the exit code and what was printed."""

    def end(*callbacks, options=()):
        config = load_config(home / "recipe.yaml", [f"--output_dir={tmp_path / 'run'}", *OPTIONS, *options])
        with pytest.raises(SystemExit) as ended:
            run_rank(lambda: run_training(config, [*default_callbacks(config), *callbacks]))
        message = capfd.readouterr()
        return ended.value.code, message.out + message.err

    return end


METHODS = {  # (method, number of its call): steps in the state that is saved
    ("on_recipe", 1): None,
    ("on_setup", 1): None,
    ("on_rows", 1): None,
    ("on_model", 1): None,
    ("on_run_begin", 1): None,
    ("on_stage_begin", 1): None,
    ("on_evaluation", 1): None,
    ("on_step_begin", 2): 1,
    ("on_evaluation", 3): 2,
    ("on_step_end", 2): None,  # the step is not complete
    ("after_step", 2): None,  # the update is not complete
    ("state_dict", 1): 2,  # the second try succeeds
    ("on_run_end", 1): 3,
}


def states(tmp_path):
    return sorted(int(path.name) for path in tmp_path.glob("run/states/*"))


@pytest.mark.parametrize("place", METHODS, ids=[f"{method} {number}" for method, number in METHODS])
def test_a_callback_that_raises_ends_the_run_with_1(end, tmp_path, place):
    method, number = place
    code, message = end(Bad(method, number))
    assert code == 1 and "a bug of mine" in message
    steps = METHODS[place]
    assert states(tmp_path) == [] if steps is None else states(tmp_path)[-1] == steps
    assert end()[0] == 0
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


def test_a_watcher_that_raises_ends_no_run(end, tmp_path):
    def fail(*_):
        raise KeyError("a bug of the watcher")

    hooks = {method for method, _ in METHODS}
    code, message = end(*(type(f"Fails_{hook}", (Watcher,), {hook: fail})() for hook in sorted(hooks)))
    assert code == 0
    for hook in hooks:
        line = f"Fails_{hook} failed and no longer watches this run: KeyError: 'a bug of the watcher'. The run"
        assert message.count(line) == 1
    assert [line["step"] for line in metrics(tmp_path / "run")] == [0, 1, 2]


@pytest.mark.parametrize(("place", "expected", "line", "steps"), [
    ("begin", 1, "a bug of mine", []), ("close", 1, "a bug of mine", [2, 3]),
    ("step", 0, "tracker failed, and gets no more metrics: ConnectionError: offline, after all\n", [2, 3]),
])  # fmt: skip
def test_a_tracker_that_raises(end, tmp_path, place, expected, line, steps):
    """An error at a step does not end the run."""
    (tmp_path / "my_tracker.py").write_text(TRACKER.format(place=place))
    code, message = end(options=[f"--report_to=[{tmp_path}/my_tracker.py:tracker]"])
    assert code == expected and line in message and message.count("gets no more metrics") == (place == "step")
    assert states(tmp_path) == steps


@pytest.mark.parametrize("first", [None, Signal()])
def test_a_page_that_cannot_be_written_ends_no_run(end, tmp_path, monkeypatch, first):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report, "write_page", full)
    code, message = end(*filter(None, [first]))
    assert code == (75 if first else 0)
    assert "report.html was not written: OSError: [Errno 28] No space left on device" in message
