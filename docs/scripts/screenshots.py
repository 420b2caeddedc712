"""Take the screenshots in docs/images/ with Chromium, after `python train.py` and `python -m docs.scripts.step`.

    python -m docs.scripts.screenshots runs/shapes

Pages are 620 pixels wide, so that a phone shows them sharply.
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import PIL.Image

from docs.scripts.picture import DOCS

WIDTH, SCALE = 620, 2  # page width in pixels; picture pixels per page pixel
BROWSERS = "chromium", "chromium-browser", "google-chrome"
FLAGS = "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--force-device-scale-factor={SCALE}"


def screenshot(page: Path, picture: Path, height: int):
    """Save the top of a page, WIDTH x height pixels, as PNG with 256 colors."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        raise SystemExit("the screenshots need Chromium: apt install chromium")
    if not page.exists():
        raise SystemExit(
            f"{page} is missing; `python train.py` writes report.html, and `python -m docs.scripts.step` the other page"
        )
    with tempfile.TemporaryDirectory() as folder:
        options = f"--user-data-dir={folder}", f"--window-size={WIDTH},{height}", f"--screenshot={folder}/picture.png"
        subprocess.run([browser, *FLAGS, *options, page.resolve().as_uri()], check=True, capture_output=True)
        PIL.Image.open(f"{folder}/picture.png").convert("RGB").quantize(256).save(picture, optimize=True)


def main():
    run = Path(*sys.argv[1:])
    screenshot(run / "report.html", DOCS / "images" / "page.png", 948)
    screenshot(DOCS / "step.html", DOCS / "images" / "step.png", 800)


if __name__ == "__main__":
    main()
