"""Print the numbers that a part of first_gpu_hour.py measures, each as one JSON line."""

import argparse
import json
from collections.abc import Callable, Mapping

from gpu_step import about, read_options


def run_part(description: str, parts: Mapping[str, Callable]):
    """Run the part that the command line names; `parts` has the functions of a script by name."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("part", choices=[name for name, x in parts.items() if getattr(x, "is_part", False)])
    parser.add_argument("arguments", nargs="*")
    options = read_options(parser)
    print(json.dumps(about()), flush=True)
    parts[options.part](options.toy, *options.arguments)


def part(function: Callable) -> Callable:
    """Mark a function(toy, *arguments) as a part of first_gpu_hour.py."""
    function.is_part = True
    return function


def report(name: str, value: float, unit: str):
    """Print a number with four significant digits."""
    show(name, value=float(f"{value:.4g}"), unit=unit)


def report_skipped(name: str, reason: str):
    """Print that a number was not measured, with the reason."""
    show(name, skipped=reason)


def show(name: str, **fields):
    print(json.dumps({"card": about()["card"], "name": name, **fields}), flush=True)
