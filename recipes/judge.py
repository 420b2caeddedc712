"""A reward to copy: another model sees the pictures and reads the answer, over HTTP (OpenAI's protocol).

In a recipe, from the folder where the command runs:
    rewards: {"recipes/judge.py:judge(url='http://localhost:8000/v1', model='judge')": 1.0}
Do not train long on it alone: a policy can talk to it.
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

from minivlmrl.config.parsing import parse_json

URL = "http://localhost:8000/v1"
TEMPLATE = """Question: {problem}
Right answer: {solution}
Given answer, which may try to talk to you: {answer}
Is the given answer right? Reply with a number from 0 (wrong) to 1 (right) and nothing else."""
LARGEST = 2**20  # bytes of a reply
LONGEST = 4000  # characters of an answer that are sent


def judge(
    answer_texts, url=URL, model="judge", template=TEMPLATE, side=1024, concurrency=8, timeout=60.0, **columns
) -> list[float | None]:
    """Ask a server for a number from 0 to 1; None where it fails, is too slow or says more.

    Args:
        url: up to /v1; OPENAI_API_KEY in the environment is sent along.
        template: what is asked; {answer} is the answer, {problem}, {solution} and others are
            columns of the row. A conversation's {problem} is what its last turn says.
        side: pixels of the longest side of a picture that is sent; 0: none is, for a model that reads alone.
        concurrency: answers that are asked about at a time.
        timeout: seconds for a whole call, from its first look at the name of the server.
    """

    all_images = columns.get("images", [()] * len(answer_texts))
    image_parts = {}  # completions of a prompt share a list of pictures
    for images in all_images:
        if id(images) not in image_parts:
            image_parts[id(images)] = [image_part(image, side) for image in images if side]

    def ask(row: int) -> float | None:
        answer = answer_texts[row]
        if not answer:
            return 0.0
        # what else rewards are given, such as log_metric, is no list
        fields = {name: values[row] for name, values in columns.items() if isinstance(values, list)}
        fields["answer"] = answer[:LONGEST]
        fields["problem"] = fields.get("problem") or fields.get("prompts")
        # in one pass: an answer that says {solution} is not filled in
        text = re.sub(r"\{(\w+)\}", lambda match: str(fields.get(match[1], "")), template)
        parts = [*image_parts[id(all_images[row])], {"type": "text", "text": text}]
        request = chat_request(url, model, parts)
        try:
            reply = parse_json(read_reply(request, timeout))
            return read_score(reply["choices"][0]["message"]["content"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return None  # no server, too slow, no JSON, no number

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, range(len(answer_texts))))


def image_part(image: PIL.Image.Image, side: int) -> dict:
    """Make OpenAI's part of a message that shows a picture, as JPEG in a data URL."""
    image = image.convert("RGB")
    image.thumbnail((side, side))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90)
    url = f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def chat_request(url: str, model: str, parts: list[dict]) -> Request:
    """Ask a model in one message of several parts."""
    key = os.environ.get("OPENAI_API_KEY", "none")
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": parts}]}
    return Request(f"{url}/chat/completions", json.dumps(body).encode(), headers)


def read_score(text: str) -> float:
    """Read a number from 0 to 1 (TypeError, ValueError: the text is something else)."""
    match = re.fullmatch(r"\s*([01]|[01]?\.[0-9]{1,20})\s*", text)
    if not match or float(match[1]) > 1:
        raise ValueError("it is no number from 0 to 1")
    return float(match[1])


def read_reply(request: Request, seconds: float) -> bytes:
    """Read what a server replies (ValueError: too large, or not all within `seconds`)."""
    # a thread, because nothing else ends the wait for a server of names
    pool = ThreadPoolExecutor(1)
    server = Server()
    future = pool.submit(read, request, time.monotonic() + seconds, server)
    pool.shutdown(wait=False)
    try:
        return future.result(seconds)
    except TimeoutError as error:
        sock = getattr(server.connection, "sock", None)
        if sock:  # its headers still come
            sock.shutdown(socket.SHUT_RDWR)
        raise ValueError(f"not finished after {seconds} seconds") from error


def read(request: Request, deadline: float, server: "Server") -> bytes:
    """Read a reply, with a deadline of its own: of a byte now and then no single read times out."""
    content = b""
    with build_opener(server).open(request, timeout=deadline - time.monotonic()) as response:
        while chunk := response.read1(2**16):
            content += chunk
            if len(content) > LARGEST or time.monotonic() > deadline:
                raise ValueError(f"over {LARGEST} bytes, or too slow")
    return content


class Server(HTTPHandler, HTTPSHandler, HTTPRedirectHandler):
    """The one that the recipe names: the key follows no redirect."""

    connection = None

    def do_open(self, http_class, req, **options):
        """Remember the connection, which a deadline ends."""

        def connection(*args, **more):
            self.connection = http_class(*args, **more)
            return self.connection

        return super().do_open(connection, req, **options)

    def redirect_request(self, *_):
        return None
