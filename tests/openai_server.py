"""A small real HTTP server: it speaks OpenAI's JSON, answers greedily with a tiny target, fails on demand, counts."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.answering import greedy
from treespark.target import Target

os.environ["NO_PROXY"] = "127.0.0.1"  # wherever the tests run


class OpenAIServer:
    """Serves a target under the name "tiny" until `close`.

    Attributes:
        faults: What the next requests meet instead of an answer: a status, "disconnect", "truncate", "garbage" (text
            in the place of JSON) or "hang".
        unknown: Fields that a request may not have (422).
        refuses: Whether a prompt is answered by 400.
        gives_ids: Whether `return_token_ids` is obeyed.
        change: Changes a reply before it is sent.
        delay: Seconds that each answer takes.
        key: The API key that is asked for.
        bodies: Bodies of all requests.
        answered: How often each prompt was answered.
        most_at_once: The most requests that were in work at a time.
    """

    def __init__(self, target: str) -> None:
        self.target = Target.load(target, dtype="float64")
        self._known: dict[tuple[tuple[int, ...], int], list[int]] = {}
        self._lock = threading.Lock()
        self.reset()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    def reset(self) -> None:
        """Forgets what was asked and told; the target's answers stay known."""
        self.faults: list[int | str] = []
        self.unknown: set[str] = set()
        self.refuses: Callable[[str], bool] = lambda prompt: False
        self.gives_ids, self.delay, self.key = True, 0.0, ""
        self.change: Callable[[dict[str, Any]], None] = lambda reply: None
        self.bodies: list[dict[str, Any]] = []
        self.answered: Counter[str] = Counter()
        self.most_at_once = self._at_once = 0

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def reply(self, path: str, key: str, body: dict[str, Any]) -> tuple[int | str, dict[str, Any]]:
        """The status, or another fault, and the content of an answer."""
        with self._lock:
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            fault = self.faults.pop(0) if self.faults else None
        try:
            time.sleep(self.delay)
            if fault is not None:
                return fault, {"error": {"message": "as it was told"}}
            return self._answer(path, key, body)
        finally:
            with self._lock:
                self._at_once -= 1

    def _answer(self, path: str, key: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.key and key != f"Bearer {self.key}":
            return 401, {"error": {"message": "wrong key"}}
        if body["model"] != "tiny" or path not in ("/v1/chat/completions", "/v1/completions"):
            return 404, {"object": "error", "message": f"The model {body['model']} does not exist."}
        if found := self.unknown & body.keys():
            return 422, {"detail": f"Unexpected fields in the request: {found}"}
        chat = path == "/v1/chat/completions"
        prompt = body["messages"][-1]["content"] if chat else body["prompt"]
        if self.refuses(prompt):
            return 400, {"error": {"message": "This prompt is too long."}}
        tokenizer = self.target.tokenizer
        if chat:
            options = body.get("chat_template_kwargs", {})
            ids = tokenizer.apply_chat_template(
                body["messages"], add_generation_prompt=True, return_dict=False, **options
            )
        else:
            ids = tokenizer(prompt)["input_ids"] if isinstance(prompt, str) else prompt
        with self._lock:
            key_of = (tuple(ids), body["max_tokens"])
            if key_of not in self._known:
                self._known[key_of] = greedy(self.target, list(ids), body["max_tokens"])
            answer = self._known[key_of]
            self.answered[str(prompt)] += 1
        text = tokenizer.decode(answer, skip_special_tokens=True)
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
        choice["finish_reason"] = "stop" if answer[-1] in self.target.spec.eos_token_ids else "length"
        reply = {"choices": [choice], "usage": {"completion_tokens": len(answer)}}
        if self.gives_ids and body.get("return_token_ids"):
            choice |= {"token_ids": answer, "prompt_token_ids": list(ids)}
        self.change(reply)
        return 200, reply


def _handler(server: OpenAIServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, content = server.reply(self.path, self.headers.get("Authorization", ""), body)
            data = json.dumps(content).encode()
            if status == "hang":
                time.sleep(0.5)
            if status in ("disconnect", "hang"):
                self.close_connection = True
                return
            if status == "garbage":
                status, data = 200, b"<html>It works!</html>"
            length = len(data) + (100 if status == "truncate" else 0)
            try:
                self.send_response(200 if status == "truncate" else int(status))
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(length))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(data)
            except OSError:  # the client was killed
                self.close_connection = True
            if status == "truncate":
                self.close_connection = True

        def log_message(self, *args: Any) -> None:
            """Says nothing: tests read what matters from the attributes."""

    return Handler
