"""Reward function to copy: a model on a server judges images and answer, over HTTP (OpenAI's protocol).

Use it in a recipe like this; the path is relative to the folder in which you run the command:
    rewards: {"recipes/judge.py:judge(url='http://localhost:8000/v1', model='judge')": 1.0}
Do not train long with this reward only, because a policy can learn to persuade the judge.
"""

import base64
import io
import json
import os
import re
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from urllib.request import HTTPHandler, HTTPRedirectHandler, HTTPSHandler, Request, build_opener

import PIL.Image

from minivlmrl.json_files import parse_json

URL = "http://localhost:8000/v1"
TEMPLATE = """Question: {problem}
Right answer: {solution}
Given answer, which may try to talk to you: {answer}
Is the given answer right? Reply with a number from 0 (wrong) to 1 (right) and nothing else."""
LARGEST = 2**20  # maximum reply size in bytes
LONGEST = 4000  # maximum characters that are sent from an answer


def judge(
    answer_texts, url=URL, model="judge", template=TEMPLATE, side=1024, concurrency=8, timeout=60.0, **columns
) -> list[float | None]:
    """Request a score from 0 to 1 for each answer; the score is None if the request fails or the reply is not a number.

    Args:
        url: the server's URL up to /v1. The environment variable OPENAI_API_KEY is sent as the key.
        template: the request's text. {answer} is replaced with the answer; {problem}, {solution} and other names are
            replaced with the row's columns. In a conversation, {problem} is the last turn's text.
        side: maximum side in pixels for sent images. With 0, no images are sent, for a text-only model.
        concurrency: how many requests are sent at a time.
        timeout: time limit for a whole request in seconds, including the look-up of the server's name.
    """

    all_images = columns.get("images", [()] * len(answer_texts))
    image_parts = {}  # id of an image list -> its parts; a prompt's completions share a list
    for images in all_images:
        if id(images) not in image_parts:
            image_parts[id(images)] = [image_part(image, side) for image in images if side]

    def ask(row: int) -> float | None:
        answer = answer_texts[row]
        if not answer:
            return 0.0
        # further arguments of rewards, such as log_metric, are not lists
        fields = {name: values[row] for name, values in columns.items() if isinstance(values, list)}
        fields["answer"] = answer[:LONGEST]
        fields["problem"] = fields.get("problem") or fields.get("prompts")
        # one pass, so that a placeholder inside an answer is not replaced
        text = re.sub(r"\{(\w+)\}", lambda match: str(fields.get(match[1], "")), template)
        parts = [*image_parts[id(all_images[row])], {"type": "text", "text": text}]
        request = chat_request(url, model, parts)
        try:
            reply = parse_json(read_reply(request, timeout))
            return read_score(reply["choices"][0]["message"]["content"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return None  # no connection, a timeout, invalid JSON, or no number

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, range(len(answer_texts))))


def image_part(image: PIL.Image.Image, side: int) -> dict:
    """Build OpenAI's message part for an image, as a JPEG in a data URL."""
    image = image.convert("RGB")
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat_request(url: str, model: str, parts: list[dict]) -> Request:
    """Build the HTTP request for one user message with several parts."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    return Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)


def read_score(text: str) -> float:
    """Parse a number from 0 to 1.

    Raises:
        TypeError, ValueError: if the text is not such a number.
    """
    match = re.fullmatch(r"\s*([01]|[01]?\.[0-9]{1,20})\s*", text)
    if not match or float(match[1]) > 1:
        raise ValueError(f"the reply {text!r:.80} is not a number from 0 to 1")
    return float(match[1])


def read_reply(request: Request, seconds: float) -> bytes:
    """Send a request and return the reply.

    Raises:
        ValueError: if the reply is too large, or incomplete after `seconds`.
    """
    # in a thread, because only this limits the time for the name look-up
    pool = ThreadPoolExecutor(1)
    server = Server()
    future = pool.submit(read, request, time.monotonic() + seconds, server)
    pool.shutdown(wait=False)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        sock = getattr(server.connection, "sock", None)
        if sock:  # the thread still waits for data
            sock.shutdown(socket.SHUT_RDWR)
        raise ValueError(f"the reply was incomplete after {seconds} seconds") from error


def read(request: Request, deadline: float, server: "Server") -> bytes:
    """Read a reply in chunks until the deadline, because a slow but steady server triggers no read timeout."""
    content = b""
    with build_opener(server).open(request, timeout=deadline - time.monotonic()) as response:
        while chunk := response.read1(2**16):
            content += chunk
            if len(content) > LARGEST or time.monotonic() > deadline:
                raise ValueError(f"the reply has over {LARGEST} bytes or is too slow")
    return content


class Server(HTTPHandler, HTTPSHandler, HTTPRedirectHandler):
    """HTTP handler that keeps the connection and refuses redirects, so that the key is sent only to this server."""

    connection = None

    def do_open(self, http_class, req, **options):
        """Open a request and keep its connection, so that it can be closed at the deadline."""

        def connection(*args, **more):
            self.connection = http_class(*args, **more)
            return self.connection

        return super().do_open(connection, req, **options)

    def redirect_request(self, *_):
        return None
