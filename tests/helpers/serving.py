"""Start an HTTP server on 127.0.0.1 for one test."""

from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class Quiet(BaseHTTPRequestHandler):
    def log_message(self, *_):
        """Print nothing."""


@contextmanager
def serve(handler):
    """Run a server in a thread, yield the server and its address, and stop it when the block ends."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
