"""Read losses and gradients recorded from TRL.

Copy this folder into a project in any framework; it needs only NumPy and safetensors. README.md describes the tensors
and options of a test case.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import numpy
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent


@dataclass
class Case:
    """Test case recorded from TRL.

    The gradient and most batch tensors have shape (B, T) for B completions of up to T tokens, or (B, 2, T) for B answer
    pairs. All numbers are float64.
    """

    name: str
    options: dict
    batch: dict[str, numpy.ndarray]
    loss: float
    gradient: numpy.ndarray  # loss gradient with respect to per_token_logps


def read_options() -> dict[str, dict]:
    """Return {case name: options} for all recorded cases."""
    return json.loads((FOLDER / "losses.json").read_text())["cases"]


def read_cases(**only) -> list[Case]:
    """Return the recorded test cases that have the options in `only`.

    Example: read_cases(loss_type="dapo", beta=0.0). Cases with TRL's dual clip are left out, unless `only` contains
    `delta`.
    """
    recorded = read_options()
    arrays = {name: {} for name in recorded}
    for path, array in load_file(FOLDER / "losses.safetensors").items():
        name, _, key = path.partition("/")
        arrays[name][key] = array
    cases = []
    for name, options in recorded.items():
        if has(options, only):
            batch = arrays[name]
            cases.append(Case(name, options, batch, batch.pop("loss").item(), batch.pop("gradient")))
    return cases


def has(options: dict, only: dict) -> bool:
    """Return whether a test case has all options in `only`."""
    if "delta" in options and "delta" not in only:
        return False
    # loss_type="sigmoid" also matches loss_type=["sigmoid"], because DPO cases have a list
    return all(name in options and options[name] in (x, [x]) for name, x in only.items())


def error(ours, expected) -> float:
    """Return the largest difference, relative to max(1, largest absolute number in `expected`)."""
    difference = numpy.abs(numpy.asarray(ours) - expected).max()
    return float(difference / max(1.0, numpy.abs(expected).max()))
