"""Environment around MiniWoB++ pages: task and screenshot in, click out, and the page's own reward.

    pip install miniwob selenium && apt-get install chromium chromium-driver
    python recipes/miniwob.py click-color --rows=192     # success rates for baselines that need no model
    python train.py recipes/miniwob.yaml                 # SFT on demonstrations, some of them wrong, then GRPO

The pages come from the installed package `miniwob`, and a local server serves them, so no network is used. TARGETS has
the pages that can be trained on. A completion clicks at a pixel in the page, which is 160 pixels wide and 210 high:
    <click>80, 120</click>
All completions in a process share one browser, because a browser per completion would be too large. Five rules make
this possible, also in an environment of your own:
1. Open the browser once, in a function with `functools.cache`.
2. Keep nothing in the browser. A seed determines the page, so each click loads the page again, repeats the episode's
   earlier clicks, and then clicks. Other completions may use the browser in between.
3. Compute an outcome once: it depends only on page, seed and clicks, so `functools.lru_cache` keeps it.
4. Lock the browser, because the threads that prepare prompts take screenshots, too.
5. Replace the browser after an error, because it may crash, and `max_tool_seconds` may stop a command in the middle.
"""

import argparse
import atexit
import base64
import functools
import http.server
import importlib.metadata
import io
import json
import random
import shutil
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import PIL.Image

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

WIDTH, HEIGHT = 160, 210  # size in pixels of every MiniWoB++ page
FAILURE = -1.0  # a MiniWoB++ page's reward when its time is over
GREY = PIL.Image.new("RGB", (WIDTH, HEIGHT), "grey")  # the screen in the blind control
BROWSER_LOCK = threading.RLock()  # the threads that prepare prompts use the browser too
# The page's clock would end an episode while other completions use the browser, so it is set to an hour. The reward
# that does not depend on the remaining time has the name WOB_RAW_REWARD_GLOBAL.
START = "core.EPISODE_MAX_TIME = 3600000; Math.seedrandom(arguments[0]); core.startEpisodeReal();"
REWARD = "return WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : null;"


@dataclass(frozen=True)
class Targets:
    """JavaScript that finds the elements to click on a page and the right ones, for demonstrations and baselines."""

    selector: str  # CSS selector for the elements
    name: str  # name for the element e
    right: str  # name that the solving elements have
    texts: tuple[str, ...]  # the page's instructions and the demonstrations' words, to train the tokenizer
    # how a demonstration lists the elements, one after another until the right one, before it clicks; "" lists none
    look: str = ""

    @property
    def script(self) -> str:
        """Return the instruction, the name that is right, and each element's name, left, top, width and height."""
        return f"""const describe = e => {{
            const {{x, y, width, height}} = e.getBoundingClientRect();
            return [{self.name}, x, y, width, height];
        }};
        return [core.getUtterance(), {self.right}, [...document.querySelectorAll({self.selector!r})].map(describe)];"""


COLORS = (
    "red", "lime", "blue", "yellow", "cyan", "magenta", "black", "white", "grey", "orange", "pink", "purple", "olive",
)  # fmt: skip
WORDS = ("submit", "okay", "ok", "yes", "no", "cancel", "next", "previous")
BUTTONS = tuple(text for word in WORDS for text in (word, word.capitalize()))
TARGETS = {
    # four coloured boxes
    "click-color": Targets(
        "#area .color",
        "e.dataset.color",
        "core.getUtterance().split(' ')[3]",
        tuple(f"Click on the {color} colored box." for color in COLORS),
        look="{name}",  # otherwise the model has to compare four boxes at once, which takes many more steps to learn
    ),
    # a figure, and five buttons with the words Rectangle, Circle, Triangle, Letter and Number
    "identify-shape": Targets(
        "#area-buttons button",
        "e.dataset.type",
        "(figure => figure.tagName != 'text' ? {rect: 'rectangle', circle: 'circle', polygon: 'triangle'}"
        "[figure.tagName] : isNaN(figure.textContent) ? 'letter' : 'digit')(document.querySelector('#area_svg > *'))",
        ("Click the button that best describes the figure below.",),
    ),
    # two buttons at random positions, with the words ONE and TWO
    "click-test-2": Targets("#area button", "e.textContent", "'ONE'", ("Click button ONE.",)),
    # up to six buttons with words, among other text and text fields, whose positions depend on the elements above them
    "click-button": Targets(
        "#area > :not(br)",
        "({BUTTON: e.textContent, INPUT: 'field'})[e.tagName] || 'text'",
        """core.getUtterance().split('"')[1]""",
        (*(f'Click on the "{word}" button.' for word in BUTTONS), f"I see {'; '.join([*BUTTONS, 'field', 'text'])}"),
        look="{name} {y}",  # an element's height follows from the element before, so the model reads downwards
    ),
    # three text fields, whose positions vary
    "focus-text-2": Targets(
        "#area input",
        "({tt1: '1st', tt2: '2nd', tt3: '3rd'})[e.id]",
        "core.getUtterance().split(' ')[3]",
        tuple(f"Focus into the {number} input textbox." for number in ("1st", "2nd", "3rd")),
    ),
    # a dialog with some words and the buttons Cancel, OK and x, whose size and position vary
    "click-dialog-2": Targets(
        ".ui-dialog button",
        "e.closest('.ui-dialog-titlebar') ? 'x' : e.textContent",
        """core.getUtterance().split('"')[1]""",
        tuple(f'Click the button in the dialog box labeled "{name}".' for name in ("Cancel", "OK", "x")),
    ),
}


def import_package(name: str) -> Any:
    """Import an optional dependency for this recipe; the error message says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{error}; recipes/miniwob.py needs: pip install miniwob selenium") from None


def find_program(name: str) -> str:
    """Return a program's path; the error message says how to install it."""
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"the program {name} is not installed; apt-get install chromium chromium-driver")
    return path


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@functools.cache
def serve_pages() -> str:
    """Start a local server for the pages in the package `miniwob`, and return its address."""
    # The distribution's files, because this recipe has the same name as the package, and hides it if run as a script.
    try:
        folder = importlib.metadata.distribution("miniwob").locate_file("miniwob/html")
    except ImportError as error:
        raise ValueError(f"{error}; recipes/miniwob.py needs: pip install miniwob selenium") from None
    handler = functools.partial(QuietHandler, directory=str(folder))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"http://127.0.0.1:{server.server_port}"


@functools.cache
def open_browser(page: str) -> Any:
    """Start this process's headless Chromium, which all environments share, and open a MiniWoB++ page."""
    webdriver = import_package("selenium.webdriver")
    service = import_package("selenium.webdriver.chrome.service")
    # The paths are given, because selenium would otherwise search for a driver in the network.
    options = webdriver.ChromeOptions()
    options.binary_location = find_program("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    chromedriver = find_program("chromedriver")

    class Service(service.Service):
        """Starts chromedriver by end_with_parent.py, because neither it nor Chromium ends with this process."""

        def command_line_args(self) -> list[str]:
            return [str(Path(__file__).with_name("end_with_parent.py")), chromedriver, *super().command_line_args()]

    driver = webdriver.Chrome(options=options, service=Service(sys.executable))
    atexit.register(driver.quit)
    driver.get(f"{serve_pages()}/miniwob/{page}.html")
    return driver


def with_browser(page: str, use: Callable[[Any], Any]) -> Any:
    """Call `use` with the browser. If the browser fails, for example with a killed tab, try again with a new one."""
    for attempt in range(2):
        with BROWSER_LOCK:
            driver = open_browser(page)
            try:
                return use(driver)
            except BaseException as error:
                # A tool's time limit may have stopped the browser within a command, so the browser cannot be used
                # again.
                open_browser.cache_clear()
                driver.quit()
                if attempt or not isinstance(error, Exception):
                    raise


def start(driver: Any, seed: str, clicks: Sequence[tuple[int, int]]) -> None:
    """Start a seed's page, and click."""
    driver.execute_script(START, seed)
    for x, y in clicks:
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)


# Completions in a group often click at the same pixel, so the result is cached.
@functools.lru_cache(maxsize=4096)
def page_reward(page: str, page_seed: str, clicks: tuple[tuple[int, int], ...]) -> float | None:
    """Return a page's reward after some clicks, or None before the end."""

    def use(driver):
        start(driver, page_seed, clicks)
        return driver.execute_script(REWARD)

    return with_browser(page, use)


# A PNG takes a few kilobytes, so all demonstrations' pages fit.
@functools.lru_cache(maxsize=2**15)
def png(page: str, page_seed: str, clicks: tuple[tuple[int, int], ...]) -> bytes:
    """Return a page's screen after some clicks as a PNG file. This takes longer than page_reward."""
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}

    def use(driver):
        start(driver, page_seed, clicks)
        return driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})["data"]

    return base64.b64decode(with_browser(page, use))


def screenshot(page: str, page_seed: str, clicks: tuple[tuple[int, int], ...]) -> PIL.Image.Image:
    """Return a page's screen after some clicks."""
    return PIL.Image.open(io.BytesIO(png(page, page_seed, clicks))).convert("RGB")


class Page:
    """Environment for the page that a row names: clicks end when the page gives its reward, or after max_tool_calls."""

    max_tool_calls = 1
    declare_tools = False  # calls are written in tags, so the prompt needs no tool descriptions

    def reset(self, page, page_seed, blind=False, **columns):
        """Begin the page for a row from Pages. With `blind`, all screens are grey images."""
        self.page = page
        self.page_seed = page_seed
        self.blind = blind
        self.clicks = []
        self.reward = None
        self.done = False

    def click(self, x: int, y: int) -> PIL.Image.Image | str:
        """Click at a pixel of the page, which has 160 columns and 210 rows."""
        if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
            raise ValueError(f"({x}, {y}) is outside of the page, which has {WIDTH} columns and {HEIGHT} rows")
        self.clicks.append((x, y))
        position = self.page, self.page_seed, tuple(self.clicks)
        self.reward = page_reward(*position)
        self.done = self.reward is not None or len(self.clicks) == self.max_tool_calls
        if self.done:
            return "The episode has ended."
        return GREY if self.blind else screenshot(*position)

    def get_reward(self) -> float:
        """Return the page's reward; an episode without an end gets the page's reward after its time limit.

        Otherwise a completion without a click would get a better reward than a wrong click.
        """
        return FAILURE if self.reward is None else float(self.reward)


@dataclass
class Puzzle:
    """One seed's page."""

    instruction: str
    right: str  # name that the solving elements have
    boxes: list[tuple[str, float, float, float, float]]  # the elements' name, left, top, width and height

    def centers(self, name: str | None = None) -> list[tuple[int, int]]:
        """Return each element's centre (x, y), or only the centres of elements with this name."""
        return [(round(x + w / 2), round(y + h / 2)) for n, x, y, w, h in self.boxes if name in (None, n)]

    def is_right(self, x: int, y: int) -> bool:
        """Return whether a click at a pixel would solve the page, if no element covers another."""
        return any(
            left <= x < left + width and top <= y < top + height
            for name, left, top, width, height in self.boxes
            if name == self.right
        )


@functools.lru_cache(maxsize=2**15)
def puzzle(page: str, page_seed: str) -> Puzzle:
    """Read a page's instruction and elements."""

    def read(driver):
        driver.execute_script(START, page_seed)
        return driver.execute_script(TARGETS[page].script)

    instruction, right, boxes = with_browser(page, read)
    return Puzzle(instruction, right, [tuple(box) for box in boxes])


@dataclass
class Pages:
    """Dataset with first screens. With the same seed, row i is always the same page."""

    size: int
    seed: str
    page: str
    blind: bool = False
    demonstrated: bool = False  # add a click at an element's centre
    wrong: float = 0.0  # fraction of demonstrations that click at a random element

    def __post_init__(self):
        if self.page not in TARGETS:
            raise ValueError(f"the page is {self.page!r}, but it must be one of {', '.join(TARGETS)}")

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        index = range(self.size)[index]  # raises IndexError, which ends iteration
        page_seed = f"{self.seed}/{index}"
        found = puzzle(self.page, page_seed)
        columns = {"problem": found.instruction, "page": self.page, "page_seed": page_seed, "blind": self.blind}
        screen = GREY if self.blind else screenshot(self.page, page_seed, ())
        click = self.demonstration(page_seed, found) if self.demonstrated else None
        return Row(conversation(found.instruction, {"image": 1}), [screen], columns | {"solution": ""}, click)

    def demonstration(self, page_seed: str, found: Puzzle) -> str:
        rng = random.Random(f"miniwob/{page_seed}")
        wrong = rng.random() < self.wrong
        names = [name for name, *_ in found.boxes]
        centers = found.centers()
        chosen = rng.choice([i for i, name in enumerate(names) if wrong or name == found.right])
        look = TARGETS[self.page].look
        listed = [look.format(name=names[i], x=centers[i][0], y=centers[i][1]) for i in range(chosen + 1)]
        x, y = centers[chosen]
        return f"I see {'; '.join(listed)} <click>{x}, {y}</click>" if look else f"<click>{x}, {y}</click>"


def tokenizer() -> Tokenizer:
    """Train byte-level BPE on all texts in the task; each tag is one token."""
    questions = [f"user\n{text}" for targets in TARGETS.values() for text in targets.texts]
    trained = train_tokenizer(["system\nYou are a helpful assistant.", "assistant\nI see", *questions], vocab_size=500)
    trained.backend.add_tokens(["<click>", "</click>"])
    return trained


def datasets(data, seed, page="click-color", blind=False, demonstrations=3000, wrong_demonstrations=0.3):
    """Build the rows for SFT and GRPO, and the held-out rows, from pages with one name.

    Args:
        data: section `data` in the recipe.
        page: a key of TARGETS.
        blind: show grey images instead of screenshots, as a control.
        demonstrations: number of rows for SFT.
        wrong_demonstrations: fraction of demonstrations that click at a random element.
    """
    rows = functools.partial(Pages, page=page, blind=blind)
    training = {
        "demonstrations": rows(demonstrations, f"{seed}/sft", demonstrated=True, wrong=wrong_demonstrations),
        "prompts": rows(FRESH_ROWS, f"{seed}/grpo"),
    }
    return training, rows(data.eval_rows, "eval")


def chance(held_out: Pages) -> float:
    """Compute the success rate for clicks at a random element."""
    puzzles = [puzzle(held_out.page, row.columns["page_seed"]) for row in held_out]
    shares = [sum(name == found.right for name, *_ in found.boxes) / len(found.boxes) for found in puzzles]
    return sum(shares) / len(shares)


TASK = Task(datasets, tokenizer, chance, "random element")


def baselines(page: str, num_rows: int, seed: str) -> dict[str, float]:
    """Compute the fraction of pages that are solved without a model.

    The clicks are at random pixels, at random elements, and at each instruction's best pixel. This pixel is chosen from
    the same pages, so a model that does not see the screen can hardly exceed its success rate.
    """
    rng = random.Random(seed)
    seeds = [f"{seed}/{index}" for index in range(num_rows)]
    puzzles = [puzzle(page, page_seed) for page_seed in seeds]
    solved = {"random pixel": 0, "random element": 0}
    for page_seed, found in zip(seeds, puzzles, strict=True):
        element = rng.choice(found.centers())
        pixel = rng.randrange(WIDTH), rng.randrange(HEIGHT)
        for name, (x, y) in zip(solved, (pixel, element), strict=True):
            environment = Page()
            environment.reset(page, page_seed)
            environment.click(x, y)
            solved[name] += environment.get_reward() > 0
    solved["best pixel of each instruction"] = 0
    for instruction in {found.instruction for found in puzzles}:
        same = [found for found in puzzles if found.instruction == instruction]
        candidates = {center for found in same for center in found.centers(found.right)}
        solved["best pixel of each instruction"] += max(
            sum(found.is_right(x, y) for found in same) for x, y in candidates
        )
    return {name: count / num_rows for name, count in solved.items()}


def solved(environments, **columns) -> list[float]:
    """Return 1 for each page that was solved, else 0, for evaluation."""
    return [float((page.reward or 0) > 0) for page in environments]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the success of baselines on a page of MiniWoB++ as JSON.")
    parser.add_argument("page", nargs="?", default="click-color", choices=TARGETS)
    parser.add_argument("--rows", type=int, default=192, help="number of pages")
    parser.add_argument("--seed", default="eval", help="seed of the pages and of the random clicks")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(baselines(options.page, options.rows, options.seed)))
    finally:
        if open_browser.cache_info().currsize:
            open_browser(options.page).quit()


if __name__ == "__main__":
    main()
