"""A reward service without digen, for a scorer that needs an environment of its own: Python and Pillow are enough.

python reward_server.py --port 8100, and in the run: reward={remote: {url: 'http://127.0.0.1:8100'}}

Put your scorer in place of `score`. The messages are described in docs/rewards.md.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Mapping, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from io import BytesIO
from typing import Any

from PIL import Image, ImageStat


def score(frames: Sequence[Image.Image], prompt: str, metadata: Mapping[str, Any]) -> float | None:
    """How bright the sample is, 0 to 1; higher is better, None where there is no score. An image is one frame."""
    del prompt, metadata
    return sum(ImageStat.Stat(frame.convert("L")).mean[0] for frame in frames) / len(frames) / 255


class Service(BaseHTTPRequestHandler):
    """GET /health and POST /score, one request at a time."""

    def do_GET(self) -> None:
        self.reply({"protocol": 1, "reward": "brightness", "version": "1"})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        scores = []
        for sample in request["samples"]:
            frames = [Image.open(BytesIO(base64.b64decode(file)), formats=["PNG"]) for file in sample["frames"]]
            scores.append({"id": sample["id"], "score": score(frames, sample["prompt"], sample["metadata"])})
        self.reply({"protocol": 1, "scores": scores})

    def reply(self, document: Mapping[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8100)
    server = HTTPServer(("127.0.0.1", parser.parse_args().port), Service)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
