"""Write every generated page and image in docs/: python -m docs.scripts.make_pages

tests/repository/test_docs.py compares the pages with the files.
"""

from pathlib import Path

from docs.scripts import draw, first_hour, photographs, step, walkthrough

DOCS = Path(__file__).parents[1]
PAGES = {"walkthrough.md": walkthrough.page, **walkthrough.PICTURES}
NOTEBOOKS = {"first_hour.ipynb": first_hour.page, "photographs.ipynb": photographs.page}
PAGES |= draw.PICTURES


def main():
    """Generate all pages and images, and write them into docs/."""
    walkthrough.write_picture()
    step.main()
    for name, page in PAGES.items():
        (DOCS / name).write_text(page(), encoding="utf-8")
    write_notebooks()


def write_notebooks():
    """Run the notebooks, which takes some minutes, and write them with their outputs."""
    for name, page in NOTEBOOKS.items():
        (DOCS / name).write_text(first_hour.with_outputs(page()), encoding="utf-8")


if __name__ == "__main__":
    main()
