"""Write an HTML report on one run, or on two runs side by side: curves and completions.

python -m minivlmrl report runs/shapes                  # writes runs/shapes/report.html
python -m minivlmrl report runs/a runs/b --out ab.html  # compares two runs

A report can be written while a run is still training.
"""

import argparse
from pathlib import Path

from minivlmrl.diagnostics.report import write_page
from minivlmrl.run.metrics import METRICS


def main(arguments: list[str]):
    title = str(__doc__).splitlines()[0]
    p = argparse.ArgumentParser("python -m minivlmrl report", description=title)
    p.add_argument("runs", nargs="+", metavar="RUN", help="output_dir of a run; one or two runs")
    p.add_argument("--out", help="output file; defaults to report.html in the first run's folder")
    options = p.parse_args(arguments)
    if len(options.runs) > 2:
        raise ValueError(f"a report shows one or two runs, but {len(options.runs)} were given")
    folders = [Path(run) for run in options.runs]
    for folder in folders:
        if not (folder / METRICS).is_file():
            raise ValueError(f"{folder} has no metrics.jsonl; pass the output_dir of a run")
    out = Path(options.out or folders[0] / "report.html")
    write_page(folders, out)
    print(f"open {out} in a browser")
