"""Write the generated pages and images in docs/ that need no run: python -m docs.scripts.make_pages

tests/repository/test_docs.py fails if a file in docs/ differs from its generated text. Not included: first_run and
screenshots, which need a run, and step, whose page is not stored.
"""

from docs.scripts import claims, diagrams, it_learns, look, methods, names, notebooks, results, walkthrough
from docs.scripts.picture import DOCS

PAGES = {
    "walkthrough.md": walkthrough.page,
    "it_learns.md": it_learns.page,
    "results.md": results.page,
    "coming_from.md": names.page,
    "policy_gradients.md": methods.page,
    "look.md": look.page,
    "claims.md": claims.page,
}
PAGES |= walkthrough.PICTURES | diagrams.PICTURES | it_learns.PICTURES | look.PICTURES | claims.PICTURES


def main():
    """Generate all pages and images, and write them to docs/."""
    walkthrough.write_picture()
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    notebooks.main()


if __name__ == "__main__":
    main()
