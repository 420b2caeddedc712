"""Write docs/faq.md from the tests of tests/test_faq.py: python docs/faq.py

The docstring of a test is a question and its answer; the page links to its code.
"""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, PAGE = ROOT / "tests" / "test_faq.py", ROOT / "docs" / "faq.md"
HEAD = """\
# Questions, answered by running code

What users of TRL, verl and VLM-R1 keep asking. Each answer has a test of at most 15 lines that shows it in numbers.

```bash
pytest tests/test_faq.py -k zero_loss
```
"""


def page() -> str:
    """The whole page."""
    module = ast.parse(SOURCE.read_text(encoding="utf-8"))
    tests = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    questions = [ast.get_docstring(test).partition("\n\n") for test in tests]
    sections = [HEAD]
    for test, (question, _, answer) in zip(tests, questions, strict=True):
        answer = re.sub(r"\s+Asked\s+in\s+[^.]*\.$", "", answer)  # the test says where
        sections += [f"## {question}\n", f"{answer}\n([`{test.name}`](../tests/test_faq.py#L{test.lineno}))\n"]
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
