"""Show a progress bar on the last line of the terminal."""

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta

SECONDS = 0.5  # minimum time between redraws, in seconds


class ProgressBar:
    """Progress bar with steps, remaining time, rate and values.

    Example: "grpo:  25%|##        | 40/160 [0:00:21<0:01:03, 1.90it/s, reward=0.81]". The bar is written to stderr, and
    hidden if stderr is not a terminal.
    """

    def __init__(self, name: str, total: int, is_main: bool = True, initial: int = 0, leave: bool = True):
        """Draw the bar.

        Args:
            initial: steps done before the run was resumed.
            leave: whether the bar stays on the terminal at the end.
        """
        self.name = name
        self.total = total
        self.initial = initial
        self.done = initial
        self.leave = leave
        self.values = ""
        self.begin = time.perf_counter()
        self.hidden = not is_main or not sys.stderr.isatty()
        self.draw()

    def update(self, steps: int = 1, values: Sequence[str] = ()):
        """Advance the bar, and show values such as "kl=0.01" next to the rate."""
        self.done += steps
        self.values = "".join(f", {value}" for value in values)
        if self.hidden or time.perf_counter() - self.drawn >= SECONDS:
            self.draw()

    def draw(self, end: str = ""):
        self.drawn = time.perf_counter()
        seconds = self.drawn - self.begin
        share = self.done / max(self.total, 1)
        self.left = rate = "?"
        if self.done > self.initial:
            each = seconds / (self.done - self.initial)
            self.left = str(timedelta(seconds=round(each * (self.total - self.done))))
            rate = f"{each:.2f}s/it" if each > 1 else f"{1 / each:.2f}it/s"
        steps = f"{share:4.0%}|{'#' * int(10 * share):10}| {self.done}/{self.total}"
        self._replace(
            f"{self.name}: {steps} [{timedelta(seconds=round(seconds))}<{self.left}, {rate}{self.values}]", end
        )

    def print(self, text: str, file=None):
        """Print text above the progress bar."""
        self._replace("", "\r")
        print(text, file=file, flush=True)
        self.draw()

    def close(self):
        if self.leave:
            self.draw("\n")
        else:
            self._replace("", "\r")
        self.hidden = True

    def _replace(self, line: str, end: str):
        """Overwrite the bar with a line, truncated to the terminal width."""
        if not self.hidden:
            width = os.get_terminal_size(sys.stderr.fileno()).columns or 80  # some terminals report a width of 0
            print(f"\r{line[: width - 1]:{width - 1}}", end=end, file=sys.stderr, flush=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
