"""Messages and their parts, as the tests of rows write them."""

IMAGE_PART = {"type": "image"}


def text(words):
    return {"type": "text", "text": words}


def user(content):
    return {"role": "user", "content": content}


def assistant(content):
    return {"role": "assistant", "content": content}


def system(content):
    return {"role": "system", "content": content}
