"""Test the judge over HTTP, with a real server from the standard library on this machine."""

import contextlib
import json
import threading
import time
from typing import ClassVar

import PIL.Image
import pytest
from links import ROOT
from serving import Quiet, serve
from talk import user

from minivlmrl.data.media import fetch_image
from recipes.judge import judge

from score_texts import score_texts


def says(number):
    return json.dumps({"choices": [{"message": {"content": number}}]}).encode()


REPLIES = {
    "right": says("1"), "wrong": says("0"), "half": says(" 0.5\n"), "words": says("It is right."), "much": says("7"),
    "nan": says("nan"), "underscore": says("0_1"), "true": says(True), "odd": b'{"error": "x"}', "garbage": b"<html>",
    "nested": b"[" * 100_000, "huge": b"1" * 100_000,
}  # fmt: skip


class Server(Quiet):
    """Replies with the entry in REPLIES; the words `failing`, `elsewhere`, `slow`, `dripping` and `headers` select
    faults.
    """

    asked: ClassVar = []
    running = 0
    most = 0
    lock = threading.Lock()
    hung_up = threading.Event()

    def do_POST(self):
        cls = type(self)
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][0]["content"][-1]["text"]
        with cls.lock:
            cls.running += 1
            cls.most = max(cls.most, cls.running)
            cls.asked.append((self.path, self.headers["Authorization"], body))
        time.sleep(1 if "slow" in text else 0.02)
        with cls.lock:
            cls.running -= 1
        try:
            for _ in range(400 if "headers" in text else 0):
                self.wfile.write(b"X: y")
                time.sleep(0.05)
        except (BrokenPipeError, ConnectionResetError):
            return cls.hung_up.set()
        self.send_response(500 if "failing" in text else 302 if "elsewhere" in text else 200)
        if "elsewhere" in text:
            self.send_header("Location", f"http://localhost:{self.server.server_port}/v1/other")
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # whoever asked did not wait
            for _ in range(40 if "dripping" in text else 0):
                self.wfile.write(b" ")
                time.sleep(0.05)
            self.wfile.write(next((REPLIES[word] for word in REPLIES if f"to you: {word}" in text), says("0")))

    def do_GET(self):
        type(self).asked.append((self.path, self.headers["Authorization"], None))
        self.send_response(404)
        self.end_headers()


@pytest.fixture
def url():
    Server.asked = []
    Server.running = 0
    Server.most = 0
    with serve(Server) as (_, address):
        yield f"{address}/v1"


def test_numbers_and_none(url):
    """None where the server fails or says no number from 0 to 1; no answer is wrong without asking.

    "0_1" and true are 1.0 to float(); a deep or long reply ends no run.
    """
    answers = ["right", "wrong", "half", "words", "much", "nan", "failing", "odd", "garbage"]
    answers += ["underscore", "true", "nested", "huge", None, ""]
    expected = [1.0, 0.0, 0.5, *[None] * 10, 0.0, 0.0]
    assert judge(answers, url=url, problem=["?"] * 15, solution=["cat"] * 15) == expected
    assert len(Server.asked) == 13


def test_what_is_asked(url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    picture = PIL.Image.new("RGBA", (2048, 512), "lime")
    columns = {"prompts": [[user("How many?")]], "solution": ["two"], "images": [[picture] * 2]}
    found = score_texts(
        [f"{ROOT}/recipes/judge.py:judge(url={url!r}, model='m')"], ["<answer>right {solution}</answer>"], columns
    )
    [(path, key, body)] = Server.asked
    [*pictures, part] = body["messages"][0]["content"]
    text = part["text"]
    assert found.item() == 1 and path == "/v1/chat/completions" and key == "Bearer key"
    assert body["model"] == "m" and body["temperature"] == 0
    assert "Question: How many?" in text and "Right answer: two" in text
    assert "right {solution}" in text  # braces in an answer are not filled in
    for shown in pictures:
        image = fetch_image(shown["image_url"]["url"])
        assert image.size == (1024, 256) and image.getpixel((9, 9)) == pytest.approx((0, 255, 0), abs=2)
    assert len(pictures) == 2 and picture.size == (2048, 512)
    judge(["right"], url=url, images=[[picture]], side=0)
    assert [one["type"] for one in Server.asked[1][2]["messages"][0]["content"]] == ["text"]


def test_concurrency_is_bounded_and_the_order_kept(url):
    answers = ["right", "wrong", "half"] * 4
    assert judge(answers, url=url, concurrency=3) == [1.0, 0.0, 0.5] * 4
    assert 1 < Server.most <= 3


def test_a_slow_server_and_none_at_all(url):
    """A body with a byte every 0.05 s for two seconds is slow, too, although no single read times out."""
    assert judge(["slow", "right dripping", "right"], url=url, timeout=0.6) == [None, None, 1.0]
    assert judge(["right"], url="http://127.0.0.1:9/v1", timeout=1) == [None]


def test_the_time_of_a_call_begins_before_headers_and_before_the_server_has_an_address(url, monkeypatch):
    """The connection is closed if headers never end; a name server that never answers does not block the call."""
    assert judge(["right headers", "right"], url=url, timeout=0.6) == [None, 1.0]
    assert Server.hung_up.wait(10)
    asked = threading.Event()
    answered = []
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: (asked.wait(20), answered.append(1), 1 / 0))
    assert judge(["right"], url="http://nowhere.example/v1", timeout=0.3) == [None] and not answered
    asked.set()


def test_the_key_follows_no_redirect(url, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    assert judge(["elsewhere"], url=url) == [None]
    assert [path for path, _, _ in Server.asked] == ["/v1/chat/completions"]
