"""The reward `judge`: another model reads the answer, over HTTP (OpenAI's protocol, vLLM's too)."""

import json
import os
import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException

URL = "http://localhost:8000/v1"
TEMPLATE = """Question: {problem}
Right answer: {solution}
Given answer, which may try to talk to you: {answer}
Is the given answer right? Reply with a number from 0 (wrong) to 1 (right) and nothing else."""
LONGEST = 4000  # characters of an answer that are sent


def judge(
    answer_texts: list,
    url=URL,
    model="judge",
    template=TEMPLATE,
    concurrency=8,
    timeout=60.0,
    **columns,
) -> list[float | None]:
    """Ask a server for a number from 0 to 1; None where it fails, is too slow or says more.

    Args:
        url: up to /v1; OPENAI_API_KEY in the environment is sent along.
        template: what is asked; {answer} is the answer, {problem}, {solution} and others are
            columns of the row.
        concurrency: answers that are asked about at a time.
        timeout: seconds for which the server may be silent.
    """

    def ask(row: int) -> float | None:
        said = answer_texts[row]
        if not said:
            return 0.0
        known = {name: values[row] for name, values in columns.items()} | {"answer": said[:LONGEST]}
        # in one pass: an answer that says {solution} is not filled in
        text = re.sub(r"\{(\w+)\}", lambda name: str(known.get(name[1], "")), template)
        body = {"model": model, "temperature": 0, "messages": [{"role": "user", "content": text}]}
        key = os.environ.get("OPENAI_API_KEY", "none")
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        request = urllib.request.Request(
            f"{url}/chat/completions", json.dumps(body).encode(), headers
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                value = float(json.loads(reply.read(2**20))["choices"][0]["message"]["content"])
        except (OSError, HTTPException, ValueError, LookupError, TypeError):
            return None  # no server, no JSON, no number
        return value if 0 <= value <= 1 else None

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(ask, range(len(answer_texts))))
