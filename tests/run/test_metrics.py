"""Test the files of metrics, and how metrics of micro-batches and ranks are merged."""

import math
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minivlmrl.config.options import RunConfig
from minivlmrl.run.metrics import (
    EVALUATIONS,
    METRICS,
    TIMINGS,
    WARNINGS,
    MetricsLog,
    describe_speed,
    find_tracker,
    merge,
)
from minivlmrl.run.rollout_log import COMPLETIONS
from minivlmrl.run.trainer_state import TrainerState
from minivlmrl.trainers.phase_timer import PhaseTimer
from tests.helpers.runs import LETTERS, metrics

pytest.importorskip("tensorboard", reason="extra missing: pip install tensorboard")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.helpers.stages import ONE


@pytest.mark.parametrize("name", ["wandb", "trackio", "tensorboard"])
def test_a_tracker_that_is_not_installed_is_one_line(monkeypatch, name):
    for module in (name, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, module, None)
    for module in ("weights_and_biases", "trackio_tracker", "tensorboard"):
        monkeypatch.delitem(sys.modules, f"minivlmrl.extras.{module}", raising=False)
    with pytest.raises(ValueError, match=rf"report_to {name}: .* run pip install -e '\.\[{name}\]'"):
        find_tracker(name)


def open_log(folder, world=ONE, report_to=(), resumed=None, **state):
    config = RunConfig(output_dir=str(folder), report_to=list(report_to))
    log = MetricsLog(config, world, TrainerState(0, ["sft", "grpo"], **{"num_log_lines": {}} | state))
    log.open_files(resumed)
    return log


def test_a_full_disk_ends_the_run(tmp_path):
    with pytest.raises(OSError, match="No space left"), open_log(tmp_path) as log:
        with Path("/dev/full").open("ab", buffering=0) as full:
            os.dup2(full.fileno(), log.files["metrics.jsonl"].fileno())
        begin(log, "sft", 1).step(0, {"loss": 1.0}, STEP)


IDS = torch.zeros(3, dtype=torch.long)
GROUPS = [SimpleNamespace(input_ids=range(n), prompts=(), completion_ids=IDS) for n in (30, 20)]
STEP = SimpleNamespace(micro_batches=[SimpleNamespace(group=group) for group in GROUPS], rollout=None, groups=())


def begin(log, stage, steps, done=0, seconds=0.0):
    """Begin a stage with a stand-in trainer, which has only the attributes that the log reads."""
    options, rollout = SimpleNamespace(max_steps=steps), SimpleNamespace(max_logp_mismatch=1.0)
    model = SimpleNamespace(dtype="float32", compute_dtype=None)
    sampling = SimpleNamespace(temperature=1.0, max_new_tokens=9)
    config = SimpleNamespace(rollout=rollout, model=model, rewards={}, sampling=sampling)
    policy = SimpleNamespace(config=SimpleNamespace(vocab_size=512))
    trainer = SimpleNamespace(stage=stage, options=options, config=config, policy=policy, trained=torch.nn.Module())
    trainer.timer = PhaseTimer(log.world.device)
    log.stage(trainer, done, seconds)
    return log


def test_nan_and_inf_are_null_in_the_files_and_left_out_of_trackers(tmp_path):
    message = []
    log = begin(open_log(tmp_path, steps=5), "grpo", 9, 4)
    log.trackers = {"mine": lambda *arguments: message.append(arguments)}
    log.step(4, {"reward": float("nan"), "loss": 1.5, "kl": math.inf}, STEP)
    log.evaluation("grpo", 5, {"eval/iou_greedy": 0.5}, 0.0)
    assert log.end_stage() > 0 and message == [({"loss": 1.5}, 5), ({"eval/iou_greedy": 0.5}, 5)]
    assert metrics(tmp_path) == [{"stage": "grpo", "step": 4, "reward": None, "loss": 1.5, "kl": None}]
    [timing] = metrics(tmp_path, "timings.jsonl")
    assert timing["step_time"] == timing["seconds"] > 0 and timing["peak_memory_gib"] > 0
    assert timing["tokens_per_second"] == pytest.approx(50 / timing["step_time"])


def test_speed_is_a_mean_of_steps_and_memory_is_that_of_the_last():
    first = {"step_time": 1.0, "tokens_per_second": 1000.0, "phases": {"sampling": 0.5, "forward": 0.25}}
    last = {"step_time": 2.0, "tokens_per_second": 3000.0, "phases": {"forward": 0.75}}
    last |= {"allocated_memory_gib": 1.0, "reserved_memory_gib": 2.0, "free_memory_gib": 3.0}
    expected = "1.50 s a step (sampling 0.25, forward 0.50), 2,000 tokens/s; GPU memory: 1.0 GiB allocated, 2.0 "
    assert describe_speed([first, last]).startswith(expected)


@pytest.mark.parametrize(("steps", "printed"), [(3, [1, 2, 3]), (51, [1, 10, 20, 30, 40, 50, 51])])
def test_a_long_stage_prints_every_tenth_step_and_its_speed_once(tmp_path, capsys, steps, printed):
    log = begin(open_log(tmp_path), "sft", steps)
    for number in range(steps):
        log.step(number, {"loss": 1.0}, STEP)
    log.end_stage()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" loss=")[0] for line in lines[:-1]] == [f"sft {n}/{steps}, training batch:" for n in printed]
    assert all(line.endswith(" left") for line in lines[:-1])
    assert lines[-1].startswith("speed, sft: ") and len(metrics(tmp_path)) == steps


def test_a_resumed_run_goes_on_after_what_was_written(tmp_path, capsys):
    log = begin(open_log(tmp_path), "sft", 3)
    log.step(0, {"loss": 1.0}, STEP)
    log.count_lines()
    kept = log.state.num_log_lines
    assert kept == {METRICS: 1, TIMINGS: 1, EVALUATIONS: 0, WARNINGS: 0, COMPLETIONS: 0}
    log.step(1, {"loss": 9.0}, STEP)  # a resumed run makes this step again
    resumed = tmp_path / "states" / "000001"
    log = begin(open_log(tmp_path, num_log_lines=kept, resumed=resumed), "sft", 3, 1, seconds=1000.0)
    log.evaluation("sft", 1, {"eval/accuracy_greedy": 0.25, "eval/iou_greedy": 0.125}, 900.0)  # is no training time
    log.step(1, {"loss": 2.0}, STEP)
    log.count_lines()
    assert log.state.num_log_lines[METRICS] == 2
    assert [(line["step"], line["loss"]) for line in metrics(tmp_path)] == [(0, 1.0), (1, 2.0)]
    assert 100 <= metrics(tmp_path, "timings.jsonl")[1]["seconds"] <= log.end_stage() < 1000
    message = capsys.readouterr().out
    assert "held-out, sft 1: accuracy_greedy=0.250 iou_greedy=0.125 (900.0 s)\n" in message


def test_metrics_are_averaged_by_tokens_peaks_by_maximum_and_losses_by_sum():
    """Losses are summed, because each loss is already divided by the counts of the whole step."""
    parts = [
        {"kl": (1.0, 10), "rewards/chosen": (1.0, 2), "rollout/logp_mismatch": (3e-6, 10), "loss": (1.0, 10)},
        {"kl": (4.0, 20), "rewards/chosen": (3.0, 2), "rollout/logp_mismatch": (1e-6, 20), "loss": (2.0, 20)},
    ]
    merged = {"kl": (3.0, 30), "rewards/chosen": (2.0, 4), "rollout/logp_mismatch": (3e-6, 30), "loss": (3.0, 30)}
    assert merge(parts) == merged
    assert merge([{"a_rms": (3.0, 10)}, {"a_rms": (0.0, 30)}]) == {"a_rms": (1.5, 40)}
    idle = merge([{"kl": (2.0, 0.0), "loss": (0.0, 0.0)}])  # without tokens
    assert math.isnan(idle["kl"][0]) and idle["loss"] == (0.0, 0.0)
    assert merge([idle, {"kl": (2.0, 3.0), "loss": (1.0, 3.0)}]) == {"kl": (2.0, 3.0), "loss": (1.0, 3.0)}
    assert merge([merged, merged]) == merged | {"kl": (3.0, 60), "rewards/chosen": (2.0, 8),
                                                "rollout/logp_mismatch": (3e-6, 60), "loss": (6.0, 60)}  # fmt: skip


# stand-in for wandb, which writes all calls into a file of the run's folder
WANDB = """
import json, pathlib
class Run:
    def __init__(self, **settings):
        self.file = (pathlib.Path(settings["dir"]) / settings.pop("file", "said.jsonl")).open("w")
        self.say("init", settings)
    def say(self, *what):
        self.file.write(json.dumps(what) + chr(10))
    def log(self, values, step):
        self.say(step, values)
    def finish(self):
        self.say("finish")
        self.file.close()
def init(**settings):
    return Run(**settings)
"""
# stand-in for trackio 0.43, which takes no folder
TRACKIO = """
import wandb
def init(project, name=None, group=None, *, config=None):
    run = wandb.init(dir=config["output_dir"], file="trackio.jsonl", project=project, name=name, config=config)
    def log(metrics, step=None):
        type(run).log(run, metrics, step)
    run.log = log
    return run
"""
TRACKER = """
def csv(config, steps, closing, sign=","):
    file = closing.enter_context(open(config.output_dir + "/said.csv", "a" if steps else "w"))

    def log(values, steps):
        file.writelines(f"{steps}{sign}{name}{sign}{value!r}\\n" for name, value in values.items())

    return log
"""


def curves(values):
    """Return {name: [(step, value), ...]} for tuples (name, step, value), without duplicates."""
    found = {}
    for name, *point in dict.fromkeys(values):
        found.setdefault(name, []).append(tuple(point))
    return found


def of_tensorboard(folder):
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    return curves((name, e.step, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name))


def expected(folder):
    """Return the curves in metrics.jsonl and evaluations.jsonl; the grpo steps follow two sft steps."""
    found, before = {}, {"sft": 0, "grpo": 2}
    for lines, offset in ((metrics(folder), 1), (metrics(folder, "evaluations.jsonl"), 0)):
        for line in lines:
            step = before[line.pop("stage")] + line.pop("step") + offset
            for name, value in line.items():
                found.setdefault(name, []).append((step, pytest.approx(value, rel=1e-6)))
    return found


@pytest.mark.usefixtures("quick", "varied_rollouts")
def test_trackers_agree_with_the_files(run, monkeypatch, tmp_path):
    (tmp_path / "wandb.py").write_text(WANDB)
    (tmp_path / "trackio.py").write_text(TRACKIO)
    (tmp_path / "my_tracker.py").write_text(TRACKER)
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("wandb", "minivlmrl.extras.weights_and_biases", "trackio", "minivlmrl.extras.trackio_tracker"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    options = ["--stages=[sft, grpo]", LETTERS, "--sft.max_steps=2", "--grpo.max_steps=2", "--eval_steps=1"]
    options += ["--state_steps=1", '--report_to=[tensorboard, wandb, trackio, "CSV"]']
    options[-1] = options[-1].replace("CSV", f"{tmp_path}/my_tracker.py:csv(sign=';')")
    folder = run(*options)
    monkeypatch.delitem(sys.modules, "wandb")
    monkeypatch.delitem(sys.modules, "trackio")
    first, *message, last = metrics(folder, "said.jsonl")
    assert first[1]["project"] == "minivlmrl" and first[1]["name"] == "run" and first[1]["config"]["seed"] == 0
    assert last == ["finish"] and [step for step, _ in message] == sorted(step for step, _ in message)
    assert [line for line in metrics(folder, "trackio.jsonl") if line[0] != "init"] == [*message, last]
    of_wandb = curves((name, step, value) for step, values in message for name, value in values.items())
    lines = [line.split(";") for line in (folder / "said.csv").read_text().splitlines()]
    of_csv = curves((name, int(step), float(value)) for step, name, value in lines)
    for found in (of_tensorboard(folder), of_wandb, of_csv):
        assert found == expected(folder)
    assert [step for step, _ in of_csv["eval/accuracy_sampled"]] == [0, 1, 2, 3, 4]
    shutil.rmtree(folder / "states" / "000004")
    run(*options, "--resume=auto")
    assert of_tensorboard(folder) == expected(folder)
    run("--stages=[sft]", "--sft.max_steps=1", "--report_to=[tensorboard]", "--resume=never")
    assert of_tensorboard(folder) == expected(folder)  # without values of the earlier run
