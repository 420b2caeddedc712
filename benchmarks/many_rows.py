"""What 200,000 rows cost before the first step: CPU seconds and memory of a run of recipes/digits.yaml.

python benchmarks/many_rows.py [--rows=200000]

The rows are VLM-R1's conversations, each with one of 1,000 pictures. Every row is read and checked and its picture
looked for, the tokenizer is trained and the model made, on one thread; the run ends where training would begin.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image

ROOT = Path(__file__).resolve().parents[1]
BEGIN = """
import resource, sys
from minivlmrl import train
def say(what):
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds, memory = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(f"{what:<8} {seconds:6.2f} s of one core, at most {memory:4.0f} MiB", flush=True)
def begin(*_):
    say("begun")
    sys.exit()
import minivlmrl.run.start
say("imports")
train.train = begin
train.main(sys.argv[1:])
"""


def write_rows(folder: Path, count: int):
    """Write `count` rows about 1,000 pictures."""
    for number in range(1000):
        PIL.Image.new("L", (56, 56), number % 256).save(folder / f"{number}.png")
    with (folder / "train.jsonl").open("w") as file:
        for number in range(count):
            asked = {"from": "human", "value": f"<image>Which digit is picture {number}?"}
            turns = [asked, {"from": "gpt", "value": str(number % 10)}]
            print(json.dumps({"image": f"{number % 1000}.png", "conversations": turns}), file=file)


def main(count: int):
    """Write the rows, and begin a run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        write_rows(Path(folder), count)
        options = ["--stages=[grpo]", "--num_threads=1", f"--output_dir={folder}/run"]
        options += [f"--data.train_file={folder}/train.jsonl", "--data.eval_file="]
        print(f"{count:,} rows, {(Path(folder) / 'train.jsonl').stat().st_size / 2**20:.0f} MiB", flush=True)
        recipe = str(ROOT / "recipes" / "digits.yaml")
        subprocess.run([sys.executable, "-c", BEGIN, recipe, *options], check=True)


if __name__ == "__main__":
    main(int(next((a.removeprefix("--rows=") for a in sys.argv[1:] if a.startswith("--rows=")), 200_000)))
