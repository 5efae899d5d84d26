"""What `vllm serve` is to a run, as small as can be: a program that serves chat completions, and fails as it is told.

    python judge_stand_in.py MODEL --host HOST --port PORT [--fifo PATH] [--fault NAME] [--after N] [--once PATH]

It holds the FIFO open, and has a child that does too, so that whoever reads it learns when both are gone.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(3600)"


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--fifo")
    parser.add_argument(
        "--fault", choices=["dies early", "dies at length", "never listens", "stays", "dies", "refuses"]
    )
    parser.add_argument("--after", type=int, default=0, help="Questions that are answered before the fault.")
    parser.add_argument("--once", help="The fault happens only if there is no such file, and makes it.")
    return parser.parse_args()


class Answers(BaseHTTPRequestHandler):
    """A rating that depends on the whole question and on nothing else."""

    options: argparse.Namespace
    count = 0

    def do_GET(self) -> None:
        self.reply({"object": "list", "data": [{"id": self.options.model}]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        Answers.count += 1
        if Answers.count > self.options.after and self.options.fault == "dies":
            sys.stderr.write("out of memory\n")
            os._exit(3)
        if Answers.count > self.options.after and self.options.fault == "refuses":
            return self.reply({"error": {"message": "cannot identify image file", "code": 400}}, 400)
        message = {"role": "assistant", "content": json.dumps({"score": 1 + sum(body) % 401 / 100})}
        return self.reply({"id": "x", "choices": [{"index": 0, "finish_reason": "stop", "message": message}]})

    def reply(self, document: object, status: int = 200) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def server_bind(self) -> None:
        TCPServer.server_bind(self)  # HTTPServer asks for the machine's name, which can take long


def main() -> None:
    options = asked()
    if options.once and options.fault and Path(options.once).exists():
        options.fault = None
    elif options.once:
        Path(options.once).touch()
    sys.stderr.write(f"serving {options.model} on devices {os.environ.get('CUDA_VISIBLE_DEVICES')!r}\n")
    if options.fifo:
        fifo = os.open(options.fifo, os.O_WRONLY)
        child = subprocess.Popen([sys.executable, "-c", CHILD], pass_fds=[fifo])
        os.write(fifo, f"{os.getpid()} {child.pid}\n".encode())
    if options.fault == "dies early":
        sys.exit("no room for the weights")
    if options.fault == "dies at length":
        sys.exit("\n".join(["(engine) OutOfMemoryError: no room", *["(server) at a line"] * 99, "see the cause above"]))
    if options.fault == "stays":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if options.fault == "never listens":
        time.sleep(3600)
    Answers.options = options
    Server((options.host, options.port), Answers).serve_forever()


if __name__ == "__main__":
    main()
