"""Environment around a page of MiniWoB++: task and screenshot in, click out, and the page's own reward.

    pip install miniwob selenium && apt-get install chromium chromium-driver
    python recipes/miniwob.py --rows=192    # success of baselines that need no model
    python train.py recipes/miniwob.yaml    # SFT on demonstrations, half of them wrong, then GRPO

The pages are those of the package `miniwob`, served from the installed package by a local server, so no network is
used. A completion clicks at a pixel of the page, which is 160 pixels wide and 210 high:
    <click>80, 120</click>
A seed determines the page. Therefore all completions of a process can share one browser: for each click, the
environment loads the page of its seed again, repeats the former clicks of its episode, and then clicks.
docs/agents.md explains this.
"""

import argparse
import base64
import functools
import http.server
import importlib.metadata
import io
import json
import random
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import PIL.Image

from minivlmrl.data.messages import conversation
from minivlmrl.data.rows import Row
from minivlmrl.data.tokenizer import Tokenizer, train_tokenizer
from minivlmrl.tasks.registry import FRESH_ROWS, Task

PAGE = "click-color"
WIDTH, HEIGHT = 160, 210  # pixels of every page of MiniWoB++
FAILURE = -1.0  # what a page of MiniWoB++ gives when its time is over
BOX = (49, 103)  # centre of the first box of click-color on every page that we looked at
BROWSER_LOCK = threading.RLock()  # the threads that prepare prompts use the browser too
# The clock of the page would end an episode while other completions use the browser, so it is set to an hour. The
# reward without the share of time that is left has the name WOB_RAW_REWARD_GLOBAL.
START = "core.EPISODE_MAX_TIME = 3600000; Math.seedrandom(arguments[0]); core.startEpisodeReal();"
REWARD = "return WOB_DONE_GLOBAL ? WOB_RAW_REWARD_GLOBAL : null;"
BOXES = """return [...document.querySelectorAll('#area .color')].map(box => {
    const {x, y, width, height} = box.getBoundingClientRect();
    return [box.dataset.color, Math.round(x + width / 2), Math.round(y + height / 2)];
});"""
INSTRUCTION = "return core.getUtterance();"  # for example: Click on the red colored box.
COLORS = (
    "red", "lime", "blue", "yellow", "cyan", "magenta", "black", "white", "grey", "orange", "pink", "purple", "olive",
)  # fmt: skip


def import_package(name: str) -> Any:
    """Import an optional dependency of this recipe; the error message says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(f"{error}; recipes/miniwob.py needs: pip install miniwob selenium") from None


def find_program(name: str) -> str:
    """Return the path of a program; the error message says how to install it."""
    path = shutil.which(name)
    if path is None:
        raise FileNotFoundError(f"the program {name} is not installed; apt-get install chromium chromium-driver")
    return path


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format, *args):
        pass


@functools.cache
def serve_pages() -> str:
    """Start a local server of the pages in the package `miniwob`, and return its address."""
    # The files of the distribution, because this recipe has the name of the package, and as a script hides it.
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
    """Start the headless Chromium of this process, which all environments share, and open a page of MiniWoB++."""
    webdriver = import_package("selenium.webdriver")
    service = import_package("selenium.webdriver.chrome.service")
    # The paths are given, because selenium would otherwise search for a driver in the network.
    options = webdriver.ChromeOptions()
    options.binary_location = find_program("chromium")
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--force-device-scale-factor=1"):
        options.add_argument(argument)
    driver = webdriver.Chrome(options=options, service=service.Service(find_program("chromedriver")))
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
                # The time limit of a tool may have stopped the browser within a command, so it cannot be used again.
                open_browser.cache_clear()
                driver.quit()
                if attempt or not isinstance(error, Exception):
                    raise


def play(driver: Any, seed: str, clicks: list[tuple[int, int]]) -> tuple[PIL.Image.Image, float | None]:
    """Start the page of a seed and click. Return the screenshot and the reward, which is None before the end."""
    driver.execute_script(START, seed)
    for x, y in clicks:
        for kind in ("mousePressed", "mouseReleased"):
            event = {"type": kind, "x": x, "y": y, "button": "left", "clickCount": 1}
            driver.execute_cdp_cmd("Input.dispatchMouseEvent", event)
    reward = driver.execute_script(REWARD)
    if reward is not None and clicks:  # nobody sees the screen after the end
        return PIL.Image.new("RGB", (WIDTH, HEIGHT), "white"), reward
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
    png = base64.b64decode(driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", "clip": clip})["data"])
    return PIL.Image.open(io.BytesIO(png)).convert("RGB"), reward


class Page:
    """Environment of one page: clicks end when the page gives its reward, or after max_tool_calls."""

    max_tool_calls = 1
    declare_tools = False  # calls are written in tags, so the prompt needs no description of tools
    page = PAGE

    def reset(self, page_seed, **columns):
        self.page_seed = page_seed
        self.clicks = []
        self.reward = None
        self.done = False

    def click(self, x: int, y: int) -> PIL.Image.Image:
        """Click at a pixel of the page, which has 160 columns and 210 rows."""
        if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
            raise ValueError(f"({x}, {y}) is outside of the page, which has {WIDTH} columns and {HEIGHT} rows")
        self.clicks.append((x, y))
        screen = self._play()
        self.done = self.reward is not None
        return screen

    def get_reward(self) -> float:
        """Return the reward of the page; an episode without an end has the reward that the page gives after its time.

        Otherwise a completion without a click would have a better reward than a wrong click.
        """
        return FAILURE if self.reward is None else float(self.reward)

    def _play(self) -> PIL.Image.Image:
        screen, self.reward = with_browser(self.page, lambda driver: play(driver, self.page_seed, self.clicks))
        return screen


class Blind(Page):
    """Control: all screens are grey images."""

    def _play(self):
        return PIL.Image.new("RGB", super()._play().size, "grey")


@functools.lru_cache(maxsize=4096)
def first_screen(environment: type[Page], page_seed: str) -> PIL.Image.Image:
    """Return the screenshot of a page before the first click."""
    page = environment()
    page.reset(page_seed)
    return page._play()


@functools.lru_cache(maxsize=4096)
def instruction(page: str, page_seed: str) -> str:
    """Return what a page tells its user to do."""
    return with_browser(
        page, lambda driver: (driver.execute_script(START, page_seed), driver.execute_script(INSTRUCTION))[1]
    )


@dataclass
class Pages:
    """Dataset of first screens. Row i of a seed is always the same page."""

    size: int
    seed: str
    environment: type[Page] = Page
    demonstrated: bool = False  # add a click at the centre of a box of click-color
    wrong: float = 0.0  # fraction of demonstrations that click at a random box

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        index = range(self.size)[index]  # raises IndexError, which ends iteration
        page_seed = f"{self.seed}/{index}"
        problem = instruction(self.environment.page, page_seed)
        columns = {"problem": problem, "page_seed": page_seed, "solution": ""}
        click = self.demonstration(page_seed, problem) if self.demonstrated else None
        screen = first_screen(self.environment, page_seed)
        return Row(conversation(problem, {"image": 1}), [screen], columns, click)

    def demonstration(self, page_seed: str, problem: str) -> str:
        boxes = find_boxes(page_seed)
        rng = random.Random(f"miniwob/{page_seed}")
        color = rng.choice(boxes)[0] if rng.random() < self.wrong else problem.split()[3]
        x, y = next((x, y) for name, x, y in boxes if name == color)
        return f"<click>{x}, {y}</click>"


def tokenizer() -> Tokenizer:
    """Train byte-level BPE on all texts of the task; each tag is one token."""
    questions = [f"user\nClick on the {color} colored box." for color in COLORS]
    trained = train_tokenizer(["system\nYou are a helpful assistant.", "assistant\n", *questions], vocab_size=384)
    trained.backend.add_tokens(["<click>", "</click>"])
    return trained


def task(environment: type[Page] = Page) -> Task:
    """Create the task with pages of an environment."""

    def datasets(data, seed, demonstrations=400, wrong_demonstrations=0.5):
        training = {
            "demonstrations": Pages(
                demonstrations, f"{seed}/sft", environment, demonstrated=True, wrong=wrong_demonstrations
            ),
            "prompts": Pages(FRESH_ROWS, f"{seed}/grpo", environment),
        }
        return training, Pages(data.eval_rows, "eval", environment)

    return Task(datasets, tokenizer, chance=lambda held_out: 1 / 4, chance_name="chance")


@functools.lru_cache(maxsize=4096)
def find_boxes(page_seed: str) -> list[tuple[str, int, int]]:
    """Return the colour and the centre of each box of click-color, from the elements of the page."""

    def read(driver):
        driver.execute_script(START, page_seed)
        return [tuple(box) for box in driver.execute_script(BOXES)]

    return with_browser(PAGE, read)


def baselines(num_rows: int, seed: str) -> dict[str, float]:
    """Compute the share of pages that are solved by clicks at random pixels, at random boxes, and at one pixel."""
    rng = random.Random(seed)
    solved = {"random pixel": 0, "random box": 0, "always the same pixel": 0}
    for index in range(num_rows):
        page_seed = f"{seed}/{index}"
        _, *box = rng.choice(find_boxes(page_seed))
        pixel = rng.randrange(WIDTH), rng.randrange(HEIGHT)
        for name, (x, y) in zip(solved, (pixel, box, BOX), strict=True):
            environment = Page()
            environment.reset(page_seed)
            environment.click(x, y)
            solved[name] += environment.get_reward() > 0
    return {name: count / num_rows for name, count in solved.items()}


TASK = task()
BLIND = task(Blind)


def solved(environments, **columns) -> list[float]:
    """Return 1 for each page that was solved, else 0, for evaluation."""
    return [float((page.reward or 0) > 0) for page in environments]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Print the success of baselines on click-color of MiniWoB++ as JSON.")
    parser.add_argument("--rows", type=int, default=192, help="number of pages")
    parser.add_argument("--seed", default="eval", help="seed of the pages and of the random clicks")
    options = parser.parse_args(arguments)
    try:
        print(json.dumps(baselines(options.rows, options.seed)))
    finally:
        if open_browser.cache_info().currsize:
            open_browser(PAGE).quit()


if __name__ == "__main__":
    main()
