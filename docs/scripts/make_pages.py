"""Write the generated pages and images in docs/ that need no run: python -m docs.scripts.make_pages

tests/repository/test_docs.py fails if a file in docs/ differs from its generated text. Not included: first_run and
screenshots, which need a run, and step, whose page is not stored.
"""

import inspect
import operator
import re

import minimal
from docs.scripts import claims, diagrams, it_learns, look, methods, names, notebooks, paper, results, walkthrough
from docs.scripts.picture import DOCS


def with_lines(name: str) -> str:
    """Return a page whose links to functions of minimal.py lead to their lines."""

    def link(match: re.Match) -> str:
        return f"{match[0]}#L{inspect.getsourcelines(operator.attrgetter(match[1])(minimal))[1]}"

    text = (DOCS / name).read_text(encoding="utf-8")
    return re.sub(r"\[`([\w.]+)`\]\(\.\./minimal\.py(?=[)#])", link, re.sub(r"(minimal\.py)#L\d+", r"\1", text))


PAGES = {
    "words.md": lambda: with_lines("words.md"),
    "walkthrough.md": walkthrough.page,
    "it_learns.md": it_learns.page,
    "results.md": results.page,
    "coming_from.md": names.page,
    "policy_gradients.md": methods.page,
    "look.md": look.page,
    "claims.md": claims.page,
    "your_paper.md": paper.page,
}
for script in (walkthrough, diagrams, it_learns, look, claims, results, paper):
    PAGES |= script.PICTURES


def main():
    """Generate all pages and images, and write them to docs/."""
    walkthrough.write_picture()
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    notebooks.main()


if __name__ == "__main__":
    main()
