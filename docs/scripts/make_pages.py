"""Write the generated pages and images in docs/ that do not need a run: python -m docs.scripts.make_pages

A test in tests/repository/test_docs.py fails if a file in docs/ differs from its generated text. The scripts first_run
and screenshots need a run, and the page that the script step writes is not stored, so these three are run separately.
"""

from docs.scripts import diagrams, notebooks, walkthrough
from docs.scripts.picture import DOCS

PAGES = {"walkthrough.md": walkthrough.page, **walkthrough.PICTURES, **diagrams.PICTURES}


def main():
    """Generate all pages and images, and write them to docs/."""
    walkthrough.write_picture()
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    notebooks.main()


if __name__ == "__main__":
    main()
