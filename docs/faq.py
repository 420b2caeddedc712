"""Write docs/faq.md from the tests of tests/test_faq.py: python docs/faq.py

The docstring of a test is a question and its answer; its code is what a reader can run.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "tests" / "test_faq.py", ROOT / "docs" / "faq.md"
HEAD = """\
# Questions, answered by running code

Questions that users of TRL, verl and VLM-R1 keep asking. Each answer is a test of [test_faq.py](../tests/test_faq.py),
shown whole; [faq.py](faq.py) writes this page, and a test compares the two. Run all of them, or one by its name:

```bash
pytest tests/test_faq.py
pytest tests/test_faq.py -k zero_loss
```

To play with one in a notebook, paste the imports and its lines:
"""


def page() -> str:
    """The whole page."""
    source = SOURCE.read_text(encoding="utf-8")
    module = ast.parse(source)
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    lines = source.splitlines()
    imports = lines[module.body[1].lineno - 1 : tests[0].lineno - 1]
    questions = [ast.get_docstring(test).partition("\n\n") for test in tests]
    links = [f"- [{question}](#{slug(question)})" for question, _, _ in questions]
    sections = [HEAD, fenced(imports), "\n".join(links) + "\n"]
    for test, (question, _, answer) in zip(tests, questions, strict=True):
        code = [lines[test.lineno - 1], *lines[test.body[0].end_lineno : test.end_lineno]]
        sections += [f"## {question}\n", answer + "\n", fenced(code)]
    return "\n".join(sections)


def fenced(lines: list[str]) -> str:
    """A block of Python."""
    return "\n".join(["```python", *"\n".join(lines).strip("\n").splitlines(), "```", ""])


def slug(title: str) -> str:
    """The anchor that GitHub makes of a title."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
