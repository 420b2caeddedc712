"""Write every page and picture of docs/ that code prints: python -m docs.make_pages

tests/repository/test_docs.py compares them with the files, test_exercises.py that of exercises.md.
"""

from pathlib import Path

from docs import draw, exercises, first_hour, first_run, held_out, photographs, walkthrough

DOCS = Path(__file__).parent
PAGES = {"walkthrough.md": walkthrough.page, **walkthrough.PICTURES}
PAGES |= {"first_hour.ipynb": first_hour.page, "photographs.ipynb": photographs.page}
PAGES |= draw.PICTURES | held_out.PICTURES | first_run.PICTURES


def main():
    """Write all."""
    walkthrough.write_picture()
    walkthrough.write_film()
    for name, page in {**PAGES, "exercises.md": exercises.page}.items():
        (DOCS / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
