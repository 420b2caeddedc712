"""Test that the page of `minivlmrl serve` streams answers, and serves no file and no other web site."""

import json
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from threading import Thread

import pytest

from minivlmrl.extras.answers.serve import PAGE, Handler


@pytest.fixture
def ask(monkeypatch):
    """Return a function that sends a request to a server whose second model echoes the question."""
    echo = lambda prompt, image, show: [show(text) for text in ("<think>", prompt, str(image)[:10])]  # noqa: E731
    monkeypatch.setattr(Handler, "answers", [None, echo], raising=False)
    monkeypatch.setattr(Handler, "page", PAGE.encode())
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def ask(method, path="/", headers=None, **question):
            connection = HTTPConnection(*server.server_address)
            connection.request(method, path, json.dumps(question), headers or {})
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

        yield ask
        server.shutdown()


def test_the_page_answers_and_serves_no_file(ask):
    assert ask("GET") == (200, PAGE)
    question = {"model": 1, "prompt": "Was ist das? ä", "image": "data:image/png;base64,AAAA"}
    assert ask("POST", **question) == (200, "<think>Was ist das? ädata:image")
    assert ask("POST", **question | {"image": None}) == (200, "<think>Was ist das? äNone")
    for path in ("/etc/passwd", "/../../etc/passwd", "/serve.py"):
        assert ask("GET", path) == ask("POST", path, **question) == (403, "")
    for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):  # also with DNS rebinding
        assert ask("GET", headers=headers) == ask("POST", headers=headers, **question) == (403, "")
    for image in ("/etc/passwd", "file:///etc/passwd"):
        assert "no file" in ask("POST", **question | {"image": image})[1]
    assert "TypeError" in ask("POST", **question | {"model": 0})[1]  # an error of the model is shown on the page
