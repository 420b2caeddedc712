"""Run the recorded cases of losses/parity.py as pytest tests, see docs/numerical_parity.md.

minivlmrl_pytest.py loads this plugin for `pytest --pyargs minivlmrl.losses.parity`.
"""

import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import yaml
from torch import Tensor

from minivlmrl.config.import_utils import call_user_code, load_name
from minivlmrl.losses import parity

TOLERANCE = 1e-6  # as in parity.check
PROPERTY = "recorded case"  # property of a test report: name of its case
# options in a test's name, if the case has them
NAMED_OPTIONS = ("loss_type", "importance_sampling_level", "beta", "label_smoothing", "whole_step")


@dataclass
class CheckedLoss:
    """The function that --loss names, and the recorded cases that --kind and --only select."""

    target: str
    function: Callable[[dict, dict], Tensor]
    cases: dict[str, tuple]  # {case name: (options, batch, value, gradient) from TRL}

    def compare(self, name: str) -> parity.Comparison:
        """Compare the function with a case. It gets copies, because it may change its arguments.

        Raises:
            ValueError: the function failed, or did not return a scalar tensor.
        """
        options, batch, value, gradient = self.cases[name]
        batch = {key: tensor.clone() for key, tensor in batch.items()}
        return parity.compare(self, dict(options), batch, value, gradient)

    def __call__(self, batch: dict, options: dict):
        return call_user_code(self.target, self.function, batch, options)


CHECKED_LOSS = pytest.StashKey[CheckedLoss]()


def pytest_addoption(parser):
    add = parser.getgroup("minivlmrl.losses.parity").addoption
    add("--loss", metavar="FILE.py:FUNCTION", help="loss function (batch, options) -> scalar")
    add("--kind", default="grpo", help="kind of the recorded losses: grpo (default), dpo or sft")
    add(
        "--only",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="run only cases with this option, such as loss_type=dapo; may be repeated",
    )


def pytest_configure(config):
    """Load the function and select the cases.

    Raises:
        pytest.UsageError: an option is wrong.
    """
    if config.option.help or config.option.version:
        return
    try:
        target, function = load_loss(config.option.loss)
        only = dict(map(parse_option, config.option.only))
        recorded = parity.cases(kind=config.option.kind, **only)
        cases = {name: tuple(case) for name, *case in recorded}
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[CHECKED_LOSS] = CheckedLoss(target, function, cases)


def load_loss(target: str | None) -> tuple[str, Callable]:
    """Return the text of --loss and the function that it names.

    A file's folder is added to sys.path, so that the file can import modules beside it.

    Raises:
        ValueError: --loss is missing, or names no function with two arguments.
    """
    if not target or ":" not in target:
        problem = f"is {target!r}, but it must name" if target else "is missing; it must name"
        raise ValueError(f"--loss {problem} your loss function: --loss=my_file.py:my_loss")
    file = target.rpartition(":")[0]
    if file.endswith(".py"):
        if not os.path.isfile(file):
            raise ValueError(f"--loss={target}: there is no file {os.path.abspath(file)}")
        sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        function = load_name(target)
    except ValueError as error:
        raise ValueError(f"--loss={error}") from error
    if not callable(function):
        raise ValueError(
            f"--loss={target} is of type {type(function).__name__}, but it must be a function "
            "(batch, options) -> scalar loss"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some C functions have no signature
        return target, function
    try:
        signature.bind({}, {})
    except TypeError:
        raise ValueError(
            f"--loss={target} has the arguments {signature}, but it must be a function "
            "(batch, options) -> scalar loss"
        ) from None
    return target, function


def parse_option(text: str) -> tuple[str, object]:
    """Split "name=value" of --only into the name and the value, which is read as YAML.

    Raises:
        ValueError: there is no name or no value.
    """
    name, _, value = text.partition("=")
    if not name or not value or name == "kind":
        raise ValueError(f"--only is {text!r}, but it must be NAME=VALUE, such as loss_type=dapo")
    try:
        return name, yaml.safe_load(value)
    except yaml.YAMLError:
        return name, value


def describe(options: dict) -> str:
    """Return "name=value, name=value"; the list loss_type in dpo has only one value."""
    values = {key: x[0] if isinstance(x, list) else x for key, x in options.items()}
    return ", ".join(f"{key}={value}" for key, value in values.items())


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makemodule(module_path, parent):
    """Collect the recorded cases in place of the functions of losses/parity.py."""
    if os.path.samefile(module_path, parity.__file__):
        # this id, unlike a path below site-packages, can be passed to `pytest --pyargs` again
        return RecordedCases.from_parent(parent, path=module_path, nodeid=parity.__name__)
    return None


class RecordedCases(pytest.File):
    """Collector of one test for each selected case."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the tests; their names contain the case's name and options."""
        for name, (options, *_) in self.config.stash[CHECKED_LOSS].cases.items():
            named = {key: options[key] for key in NAMED_OPTIONS if key in options}
            text = describe(named).replace(" ", "")
            yield RecordedCase.from_parent(self, name=f"{name}[{text}]", case=name)


class RecordedCase(pytest.Item):
    """Test that compares the loss with one recorded case."""

    def __init__(self, *, case: str, **options):
        super().__init__(**options)
        self.case = case
        self.user_properties.append((PROPERTY, case))

    def runtest(self):
        """Raise AssertionError if the loss or its gradient differs from TRL."""
        checked = self.config.stash[CHECKED_LOSS]
        found = checked.compare(self.case)
        if not found.error <= TOLERANCE:
            options, *_ = checked.cases[self.case]
            raise AssertionError(f"{found}\noptions: {describe(options)}")

    def repr_failure(self, excinfo) -> str:
        """Return only the message, because the traceback contains no user code."""
        return str(excinfo.value)

    def reportinfo(self):
        """Return the place and the name for a failure's head line."""
        return self.path, None, self.name


def pytest_terminal_summary(terminalreporter, config):
    """Print the known mistakes that explain the failed cases; the audit searches for them."""
    checked = config.stash[CHECKED_LOSS]
    steps = []
    for report in terminalreporter.stats.get("failed", []):
        name = dict(getattr(report, "user_properties", ())).get(PROPERTY)
        if name is None:  # another test failed
            continue
        options, batch, *_ = checked.cases[name]
        try:
            found = checked.compare(name)
        except ValueError:  # the function fails, so that there are no numbers to explain
            continue
        steps.append((batch, options, found.loss, found.gradient))
    if steps:
        terminalreporter.section(f"mistakes in {checked.target}")
        for line in parity.known_mistakes(steps):
            terminalreporter.write_line(line)
