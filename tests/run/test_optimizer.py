"""Test the optimizers and the learning rate schedules."""

import re

import pytest
import torch

from minivlmrl.config.options import OptimizerOptions, TrainingOptions
from minivlmrl.run.optimizer import begin_state, build_optimizer, check_optimizer, learning_rate


def test_the_warmup_is_one_step_ahead_of_transformers_and_the_rest_is_equal(transformers):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 3, 8)
    rates = []
    for _ in range(8):
        rates.append(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()
    config = TrainingOptions(max_steps=8, learning_rate=1.0, warmup_steps=3)
    ours = [learning_rate(step, config) for step in range(8)]
    assert rates[0] == 0 and ours[:3] == rates[1:4] and ours[3:] == pytest.approx(rates[3:])


OPTIMIZERS = """
import torch

def sgd(parameters, learning_rate, betas, weight_decay, momentum=0.9):
    return torch.optim.SGD(parameters, learning_rate, momentum, weight_decay=weight_decay)

def adagrad(parameters, learning_rate, betas, weight_decay):
    return torch.optim.Adagrad(parameters, learning_rate)

def nameless(parameters, learning_rate, betas, weight_decay):
    optimizer = torch.optim.SGD(parameters, learning_rate)
    del optimizer.param_groups[0]["lr"]
    optimizer.step = lambda: None
    return optimizer

class Keeping(torch.optim.SGD):
    def __init__(self, parameters, learning_rate, betas, weight_decay):
        super().__init__(parameters, learning_rate)

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["kept"] = 1
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "my_opt.py"
    file.write_text(OPTIMIZERS)
    return file


@pytest.mark.parametrize(("name", "error", "expected"), [
    ("Keeping", ValueError, "optimizer.name FILE:Keeping: its state cannot be saved: .*`0/kept` is invalid"),
    ("nameless", ValueError, 'optimizer.name FILE:nameless: a parameter group is .*, but it must be a dict.* "lr"'),
    ("sgd(decay=1)", ValueError, r"optimizer.name FILE:sgd\(decay=1\): there is no option 'decay'; the options are: "),
])  # fmt: skip
def test_invalid_custom_optimizers_are_refused(file, name, error, expected):
    with pytest.raises(error, match=expected.replace("FILE", re.escape(str(file)))):
        check_optimizer(OptimizerOptions(f"{file}:{name}"))


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "sgd", "adagrad"])
def test_begin_state_has_the_tensors_of_a_step(file, name):
    """The memory estimate counts the tensors of the optimizer on the meta device."""
    section = OptimizerOptions(f"{file}:{name}" if name in OPTIMIZERS else name)
    shapes = []
    for device, begins in (("cpu", False), ("cpu", True), ("meta", True)):
        model = torch.nn.Linear(96, 64, device=device)
        optimizer = build_optimizer(model, TrainingOptions(), section)
        if begins:
            begin_state(optimizer, model.parameters())
        else:
            model(torch.ones(2, 96)).sum().backward()
            optimizer.step()
        states = [optimizer.state[parameter] for parameter in model.parameters()]
        shapes.append([{name: (x.shape, x.dtype) for name, x in state.items()} for state in states])
    assert shapes[0] == shapes[1] == shapes[2] and shapes[0][0]


class WithNames(torch.optim.SGD):
    """Take parameter names, as Muon needs them to leave out embeddings."""

    def __init__(self, parameters, lr, betas, weight_decay, names):
        super().__init__(parameters, lr)
        self.names = names


def test_an_optimizer_may_ask_for_parameter_names():
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(2, 2), "layer": torch.nn.Linear(2, 2)})
    model["layer"].bias.requires_grad_(False)
    section = OptimizerOptions(name=f"{__name__}:WithNames")
    check_optimizer(section)
    assert build_optimizer(model, TrainingOptions(), section).names == ["embed.weight", "layer.weight"]


def test_an_optimizer_for_matrices_alone_is_refused_before_weights_are_loaded():
    with pytest.raises(ValueError, match="Muon only supports 2D parameters"):
        check_optimizer(OptimizerOptions(name=f"{__name__}:muon"))


def muon(parameters, learning_rate, betas, weight_decay):
    return torch.optim.Muon(parameters, learning_rate, weight_decay=weight_decay)
