"""A real HTTP server in this process that fails in every way it is told to, for tests of what asks one."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from typing import Any

Act = Callable[[Any, bytes], None]
"""What to do with a request: (the request's server side, its body)."""
Make = Callable[[bytes], Any]
"""From a request's body to the document that answers it."""


class Scripted(ThreadingHTTPServer):
    """Does to its POST requests what `acts` say, one after the other, and after them answers with what `right` makes.

    GET requests are all answered with `page`.
    """

    daemon_threads = True
    block_on_close = False

    def __init__(self, acts: Iterator[Act], right: Make, page: Any) -> None:
        super().__init__(("127.0.0.1", 0), Quiet)
        self.acts, self.right, self.page, self.lock = acts, right, page, threading.Lock()
        self.asked = self.busy = self.most_busy = 0
        self.closing = threading.Event()

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer asks for the machine's name, which can take long

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Quiet(BaseHTTPRequestHandler):
    server: Scripted

    def do_GET(self) -> None:
        self.reply(json.dumps(self.server.page).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        with self.server.lock:
            self.server.asked += 1
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
            act = next(self.server.acts, answer(self.server.right))
        try:
            act(self, body)
        except OSError:  # the client left
            self.close_connection = True
        finally:
            with self.server.lock:
                self.server.busy -= 1

    def reply(self, body: bytes, status: int = 200, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(right: Make, page: Any, *acts: Act, always: Act | None = None) -> Iterator[Scripted]:
    server = Scripted(itertools.chain(acts, itertools.repeat(always) if always else ()), right, page)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        server.server_close()


def answer(make: Make) -> Act:
    return lambda handler, body: handler.reply(json.dumps(make(body)).encode())


def status(code: int) -> Act:
    return lambda handler, _: handler.reply(b"{}", code)


def half(handler: Any, body: bytes) -> None:
    whole = json.dumps(handler.server.right(body)).encode()
    handler.reply(whole[: len(whole) // 2], length=len(whole))
    handler.close_connection = True


def half_without_length(handler: Any, body: bytes) -> None:
    whole = json.dumps(handler.server.right(body)).encode()
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n\r\n" + whole[: len(whole) // 2])
    handler.close_connection = True


def huge(handler: Any, body: bytes) -> None:
    handler.send_response(200)
    handler.end_headers()
    for _ in range(64):
        handler.wfile.write(b" " * 65536)
    handler.close_connection = True


def hang(handler: Any, body: bytes) -> None:
    handler.server.closing.wait(60)


def drip(handler: Any, body: bytes) -> None:
    """A byte now and then: no single read is late, but the answer never comes."""
    handler.send_response(200)
    handler.end_headers()
    while not handler.server.closing.wait(0.02):
        handler.wfile.write(b" ")


def hang_up(handler: Any, body: bytes) -> None:
    handler.close_connection = True


def late(seconds: float) -> Act:
    def act(handler: Any, body: bytes) -> None:
        handler.server.closing.wait(seconds)
        answer(handler.server.right)(handler, body)

    return act


FAULTS: dict[str, tuple[Act, str]] = {
    "500": (status(500), "status 500"),
    "503": (status(503), "status 503"),
    "redirect": (status(302), "status 302"),
    "an empty object": (answer(lambda _: {}), "unsound answer"),
    "a bare list": (answer(lambda _: [1.0, 2.0]), "unsound answer"),
    "a bare number": (answer(lambda _: 1.0), "unsound answer"),
    "no JSON": (lambda handler, _: handler.reply(b"<html>"), "unsound answer"),
    "deep JSON": (lambda handler, _: handler.reply(b"[" * 100_000), "unsound answer"),
    "half a body": (half, "connection failed"),
    "half a body, no length": (half_without_length, "unsound answer"),
    "huge": (huge, "answer too large"),
    "hang": (hang, "timed out"),
    "a byte now and then": (drip, "timed out"),
    "hangs up": (hang_up, "connection failed"),
}
"""Name -> what is done, and how the failure is counted."""
