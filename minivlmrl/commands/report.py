"""One HTML file of a run, or of two beside each other: curves, and what the policy wrote.

python -m minivlmrl report runs/shapes                  # writes runs/shapes/report.html, while it runs too
python -m minivlmrl report runs/a runs/b --out ab.html
"""

import argparse
from pathlib import Path

from minivlmrl.diagnostics.report import write_page
from minivlmrl.run.metrics import METRICS


def main(arguments: list[str]):
    """Write the page of one or two runs."""
    title = str(__doc__).splitlines()[0]
    p = argparse.ArgumentParser("python -m minivlmrl report", description=title)
    p.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run, or of two")
    p.add_argument("--out", help="default: report.html in the first run's folder")
    options = p.parse_args(arguments)
    if len(options.runs) > 2:
        raise ValueError("page shows one run or two")
    folders = [Path(run) for run in options.runs]
    for folder in folders:
        if not (folder / METRICS).is_file():
            raise ValueError(f"{folder}: has no metrics.jsonl; give the output_dir of a run")
    out = Path(options.out or folders[0] / "report.html")
    write_page(folders, out)
    print(f"open {out} in a browser")
