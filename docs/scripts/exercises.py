"""Update the outputs in docs/exercises.md: python -m docs.scripts.exercises"""

import contextlib
import io
import re
import tempfile
from pathlib import Path

from docs.exercises.__main__ import load, main

PAGE = Path(__file__).parents[1] / "exercises.md"


def page() -> str:
    """Run the page's commands in an empty folder, and return the page with their current output."""
    text, file, exercise = PAGE.read_text(encoding="utf-8"), Path("exercise_9.py"), load(9)
    [wrong] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        printed = [output(), output("9")]
        hole = file.read_text(encoding="utf-8")
        file.write_text(hole[: hole.index("    # ---- your lines")] + wrong, encoding="utf-8")
        printed += [output("9", "--check"), output("9", "--hint")]
        file.write_text(exercise.text(exercise.solution), encoding="utf-8")
        printed.append(output("9", "--check"))
    blocks = iter(printed)
    return re.sub(r"```text\n.*?```", lambda _: f"```text\n{next(blocks)}```", text, flags=re.DOTALL)


def output(*arguments: str) -> str:
    """Return the output from `python -m docs.exercises` with these arguments."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        main([*arguments])
    return printed.getvalue()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
