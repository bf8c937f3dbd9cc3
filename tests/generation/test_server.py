"""Answers from an OpenAI-compatible server on loopback: the same bytes as in this process, through all its failures."""

from __future__ import annotations

import json
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.import_utils import is_serve_available

from tests.answering import PROMPTS, read, run, save_tiny_target, write
from tests.openai_server import OpenAIServer
from tests.tiny_text import THINKING_TEMPLATE
from treespark.data import DraftingData
from treespark.generation import GenerationSummary, client
from treespark.generation.client import base_url


@pytest.fixture(scope="module")
def running(target: str) -> Iterator[OpenAIServer]:
    found = OpenAIServer(target)
    yield found
    found.close()


@pytest.fixture
def server(running: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> OpenAIServer:
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.001)
    running.reset()
    return running


@pytest.fixture(scope="module")
def local(target: str, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The file that this process writes: the measure of all others."""
    folder = tmp_path_factory.mktemp("local")
    run(target, write(folder / "prompts.jsonl", PROMPTS), folder / "out.jsonl", batch_size=8)
    return (folder / "out.jsonl").read_bytes()


def ask(of: OpenAIServer, prompts: str, output: Path, target: str | None = None, **options: Any) -> GenerationSummary:
    return run(target, prompts, output, **({"server": of.url, "model": "tiny", "num_retries": 3} | options))


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
@pytest.mark.parametrize("concurrency", [1, 7])
def test_exact_answers_are_those_of_this_process(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, local: bytes, endpoint: str, concurrency: int
) -> None:
    """With the tokenizer: token ids, text and finish reasons, byte for byte; every prompt is asked for once."""
    server.delay = 0.005
    summary = ask(server, prompts, tmp_path / "out.jsonl", target, endpoint=endpoint, concurrency=concurrency)
    assert (tmp_path / "out.jsonl").read_bytes() == local
    assert set(server.answered.values()) == {1} and len(server.answered) == 23
    assert concurrency == 1 or server.most_at_once > 1
    assert server.most_at_once <= concurrency
    body = server.bodies[0]
    assert body["temperature"] == 0 and body["max_tokens"] == 12 and body["repetition_penalty"] == 1.0
    assert ("messages" in body) == (endpoint == "chat")
    assert (
        summary.num_new_tokens
        == summary.num_tokens
        == sum(len(x["response_ids"]) for x in read(tmp_path / "out.jsonl"))
    )
    samples = DraftingData(target, train=str(tmp_path / "out.jsonl")).samples("train")
    assert all(sample.own_text for sample in samples)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_text_alone_is_kept_without_the_tokenizer(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, local: bytes, endpoint: str
) -> None:
    """No token ids, old ones are dropped, and training does not take the tokens for the target's own."""
    path = write(tmp_path / "in.jsonl", [PROMPTS[0] | {"response_ids": [5], "response": "old"}, *PROMPTS[1:]])
    summary = ask(server, path, tmp_path / "out.jsonl", endpoint=endpoint)
    lines = read(tmp_path / "out.jsonl")
    assert [{key: line[key] for key in PROMPTS[0]} for line in lines] == PROMPTS
    assert not any("response_ids" in line for line in lines)
    assert all(set(body) & {"return_token_ids"} == set() for body in server.bodies)
    assert summary.num_tokens > 23 and summary.num_stopped == sum(x["finish_reason"] == "stop" for x in lines)
    if endpoint == "chat":
        texts = [(line["response"], line["finish_reason"]) for line in map(json.loads, local.splitlines())]
        assert [(line["response"], line["finish_reason"]) for line in lines] == texts
        data = DraftingData(target, train=str(tmp_path / "out.jsonl"), on_error="skip")  # an answer may be empty
        assert data.samples("train") and not any(sample.own_text for sample in data.samples("train"))


def test_a_base_model_gets_the_tokens_of_its_prompt(tmp_path: Path) -> None:
    base = save_tiny_target(tmp_path / "base", chat_template=None)
    path = write(tmp_path / "in.jsonl", PROMPTS[:5])
    server = OpenAIServer(base)
    try:
        run(base, path, tmp_path / "local.jsonl")
        ask(server, path, tmp_path / "out.jsonl", base)
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "local.jsonl").read_bytes()
        assert isinstance(server.bodies[0]["prompt"], list)
        ask(server, path, tmp_path / "text.jsonl", endpoint="completions")
        assert server.bodies[-1]["prompt"] in [line["prompt"] for line in PROMPTS]
        with pytest.raises(ValueError, match="has no chat template: leave --endpoint out"):
            ask(server, path, tmp_path / "no.jsonl", base, endpoint="chat")
        talk = write(
            tmp_path / "talk.jsonl",
            [{"messages": [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]}],
        )
        with pytest.raises(ValueError, match=r"talk.jsonl:1: the completions endpoint takes one 'prompt'.*got 2"):
            ask(server, talk, tmp_path / "no.jsonl", endpoint="completions")
    finally:
        server.close()


def test_template_options_reach_the_server(tmp_path: Path) -> None:
    """The same options render here and there; a server that drops them is found out at the first prompt."""
    thinker = save_tiny_target(tmp_path / "thinker", chat_template=THINKING_TEMPLATE)
    path = write(tmp_path / "in.jsonl", PROMPTS[:3])
    server = OpenAIServer(thinker)
    try:
        options: dict[str, Any] = {"chat_template_kwargs": {"enable_thinking": False}}
        run(thinker, path, tmp_path / "local.jsonl", **options)
        ask(server, path, tmp_path / "out.jsonl", thinker, **options)
        assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "local.jsonl").read_bytes()
        server.target.tokenizer.chat_template = server.target.tokenizer.chat_template.replace("is false", "is none")
        with pytest.raises(ValueError, match=r"in.jsonl:1: the server reads this prompt otherwise.*token \d+ is None"):
            ask(server, path, tmp_path / "no.jsonl", thinker, **options)
        with pytest.raises(ValueError, match="renders no template"):
            ask(server, path, tmp_path / "no.jsonl", endpoint="completions", **options)
    finally:
        server.close()


FAULTS = [429, 500, 503, "disconnect", "truncate", 504, 408]


def test_failures_that_pass_are_repeated(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, local: bytes
) -> None:
    """A third of the first requests fail in every way; nothing is lost, doubled or out of order."""
    server.faults = [*FAULTS[:3], *FAULTS[3:6]]  # each within the retries of a request
    ask(server, prompts, tmp_path / "out.jsonl", target, concurrency=5, num_retries=6)
    assert (tmp_path / "out.jsonl").read_bytes() == local
    assert len(server.bodies) == 23 + 6 and set(server.answered.values()) == {1}


def test_an_answer_that_does_not_come_is_asked_for_again(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that hangs costs the time-out."""
    monkeypatch.setattr(client.httpx2, "Timeout", lambda timeout, connect: 0.2)
    server.faults = ["hang"]
    assert ask(server, prompts, tmp_path / "out.jsonl", target, limit=3).num_answers == 3
    assert len(server.bodies) == 4


@pytest.mark.parametrize("fault", FAULTS)
def test_a_failure_that_stays_ends_the_run_and_a_restart_goes_on(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, local: bytes, fault: int | str
) -> None:
    """Ten answers, then failures only: the error says what and how to go on; the restart asks for the other 13."""
    output = tmp_path / "out.jsonl"
    server.change = lambda reply: server.faults.extend([fault] * 4) if sum(server.answered.values()) == 10 else None
    with pytest.raises(ValueError, match="3 attempts failed, the last with .*run the same command again"):
        ask(server, prompts, output, target, concurrency=1, num_retries=2)
    assert not output.exists()
    server.faults, server.change = [], lambda reply: None
    assert ask(server, prompts, output, target).num_reused == 10
    assert output.read_bytes() == local and set(server.answered.values()) == {1}


def test_the_pauses_grow_and_a_server_may_ask_for_longer_ones(
    server: OpenAIServer, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.5, 1 and 2 seconds, each shortened by half at most."""
    monkeypatch.undo()
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(client.anyio, "sleep", sleep)
    server.faults = [500, 500, 500]
    ask(server, prompts, tmp_path / "out.jsonl", limit=1)
    assert [0.25, 0.5, 1.0] <= pauses <= [0.5, 1.0, 2.0] and pauses == sorted(pauses)
    response = client.httpx2.Response(429, headers={"Retry-After": "7"})
    assert client._retry_after(response) == 7.0 and client._pause(50) <= 30.0


def test_units_may_come_in_any_order(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path, local: bytes
) -> None:
    """Answers are kept as they come; torn after any line, the file is continued to the same bytes."""
    output, partial = tmp_path / "out.jsonl", tmp_path / "out.jsonl.partial"
    server.change = lambda reply: server.faults.extend([404] * 9) if sum(server.answered.values()) == 9 else None
    with pytest.raises(ValueError, match="404"):
        ask(server, prompts, output, target, concurrency=4)
    lines = partial.read_bytes().splitlines(keepends=True)
    kept = lines[1:]
    assert 5 <= len(kept) <= 9
    random.Random(0).shuffle(kept)
    partial.write_bytes(b"".join([lines[0], *kept, kept[0]]))  # the last one twice: it counts once
    server.faults, server.change = [], lambda reply: None
    assert ask(server, prompts, output, target).num_reused == len(kept)
    assert output.read_bytes() == local


def test_refused_prompts_stop_or_are_skipped(server: OpenAIServer, prompts: str, tmp_path: Path) -> None:
    """Prompt 4 and prompt 9 are too long for the server; the refusals are kept like answers."""
    server.refuses = lambda prompt: prompt.endswith(("about 4", "about 9"))
    with pytest.raises(ValueError, match=r"prompts.jsonl:5: the server refuses the request: 400.*too long"):
        ask(server, prompts, tmp_path / "out.jsonl", concurrency=1)
    summary = ask(server, prompts, tmp_path / "out.jsonl", on_error="skip")
    assert summary.num_skipped == 2 and summary.num_answers == 21 and summary.num_reused == 4
    assert [line["id"] for line in read(tmp_path / "out.jsonl")] == [i for i in range(23) if i not in (4, 9)]


def test_refusals_of_everything_are_no_matter_of_the_prompts(server: OpenAIServer, tmp_path: Path) -> None:
    path = write(tmp_path / "many.jsonl", [{"prompt": str(i)} for i in range(200)])
    server.refuses = lambda prompt: True
    with pytest.raises(ValueError, match="has refused each of 20 prompts, the last one: .*too long"):
        ask(server, path, tmp_path / "out.jsonl", on_error="skip")
    assert len(server.bodies) < 25


def test_a_server_without_the_extension(
    server: OpenAIServer, prompts: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`repetition_penalty` is left out once the server has refused it, with one warning."""
    server.unknown = {"repetition_penalty"}
    assert ask(server, prompts, tmp_path / "out.jsonl").num_answers == 23
    assert len(server.bodies) == 24 and len(caplog.records) == 1
    assert "does not know repetition_penalty" in caplog.text


def test_token_ids_that_the_server_does_not_know(
    server: OpenAIServer, target: str, prompts: str, tmp_path: Path
) -> None:
    server.unknown = {"return_token_ids"}
    with pytest.raises(ValueError, match="gives no token ids: .*Unexpected fields.*leave --target out"):
        ask(server, prompts, tmp_path / "out.jsonl", target, on_error="skip")
    assert len(server.bodies) == 1


def change(**fields: Any) -> Any:
    return lambda reply: reply["choices"][0].update(fields)


@pytest.mark.parametrize(
    ("exact", "reply", "words"),
    [
        (True, change(token_ids=None), "gives no token ids.*leave --target out"),
        (
            True,
            change(prompt_token_ids=[1, 5]),
            r"in.jsonl:1: the server reads this prompt otherwise.*--endpoint compl",
        ),
        (True, change(finish_reason="stop", token_ids=[7, 8]), "stops after token 8, which is no end token.*2"),
        (False, change(message={"content": "b", "reasoning_content": "a"}), "hands the reasoning apart"),
        (
            False,
            change(finish_reason="content_filter"),
            "in.jsonl:1: the server ended the answer with 'content_filter'",
        ),
        (False, lambda reply: reply.clear(), "answers without 'choices'"),
    ],
)
def test_replies_that_would_ruin_the_data(
    server: OpenAIServer, target: str, tmp_path: Path, exact: bool, reply: Any, words: str
) -> None:
    server.change = reply
    path = write(tmp_path / "in.jsonl", PROMPTS[:3])
    with pytest.raises(ValueError, match=words):
        ask(server, path, tmp_path / "out.jsonl", target if exact else None)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (401, "refuses access: 401 Unauthorized .as it was told.*--api_key_env"),
        (403, "refuses access"),
        (404, "was not found.*Check --model"),
        (405, "405 Method Not Allowed.*Check --server"),
        (302, "302 Found.*Check --server"),
        (400, r"prompts.jsonl:1: the server refuses the request: 400 Bad Request \(as it was told\)"),
        ("garbage", "does not answer in JSON, but '<html>It works!</html>'"),
    ],
)
def test_errors_that_stay_are_not_repeated(
    server: OpenAIServer, prompts: str, tmp_path: Path, fault: int | str, words: str
) -> None:
    """One request tells it, in words."""
    server.faults = [fault] * 50
    with pytest.raises(ValueError, match=words):
        ask(server, prompts, tmp_path / "out.jsonl")
    assert len(server.bodies) == 1


def test_the_key_comes_from_the_environment_and_is_written_nowhere(
    server: OpenAIServer, prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.key = "sesame-11"
    with pytest.raises(ValueError, match="refuses access"):
        ask(server, prompts, tmp_path / "out.jsonl")
    with pytest.raises(ValueError, match="the environment variable SOME_KEY is not set"):
        ask(server, prompts, tmp_path / "out.jsonl", api_key_env="SOME_KEY")
    monkeypatch.setenv("SOME_KEY", "sesame-11")
    ask(server, prompts, tmp_path / "out.jsonl", api_key_env="SOME_KEY")
    written = [path.read_text() for path in tmp_path.iterdir()]
    assert not any("sesame" in text for text in written)
    meta = json.loads((tmp_path / "out.jsonl.meta.json").read_text())
    assert meta["server"] == server.url and meta["identity"]["model"] == "tiny"


def test_another_machine_may_go_on(server: OpenAIServer, target: str, prompts: str, tmp_path: Path) -> None:
    """The address is no part of what the answers depend on; the model's name is."""
    output = tmp_path / "out.jsonl"
    ask(server, prompts, output, target)
    assert ask(server, prompts, output, target, server="http://elsewhere:1/v1").num_reused == 23
    with pytest.raises(ValueError, match="model: 'tiny' there, 'large' now"):
        ask(server, prompts, output, target, model="large")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("localhost:8000", "expected an address such as http://localhost:8000/v1"),
        ("http://", "expected an address"),
        ("http://me:secret@host/v1", "leave the password out"),
    ],
)
def test_addresses(url: str, words: str) -> None:
    assert base_url("https://host:1/a/v2/") == "https://host:1/a/v2"
    with pytest.raises(ValueError, match=words) as error:
        base_url(url)
    assert "secret" not in str(error.value)


@pytest.mark.skipif(not is_serve_available(), reason="transformers serve needs transformers[serving]")
def test_transformers_serve(target: str, prompts: str, tmp_path: Path, local: bytes) -> None:
    """A server of other people: the same texts, though it calls an end token in the last place "length"."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--device", "cpu", "--dtype", "float64", "--host", "127.0.0.1", "--port", str(port)]
    start = "import sys; from transformers.cli.transformers import main; sys.exit(main())"
    server = subprocess.Popen([sys.executable, "-c", start, "serve", target, *options])
    try:
        url = f"http://127.0.0.1:{port}"  # the retries wait until it is up
        run(None, prompts, tmp_path / "out.jsonl", server=url, model=target, concurrency=4, num_retries=60)
    finally:
        server.kill()
        server.wait()
    lines, expected = read(tmp_path / "out.jsonl"), [json.loads(line) for line in local.splitlines()]
    assert [line["response"] for line in lines] == [line["response"] for line in expected]
    for line, other in zip(lines, expected, strict=True):
        assert line["finish_reason"] == other["finish_reason"] or len(other["response_ids"]) == 12


def test_a_server_that_is_not_there(prompts: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_FIRST_PAUSE", 0.001)
    with pytest.raises(ValueError, match=r"127.0.0.1:9/v1: 3 attempts failed, the last with ConnectError"):
        run(None, prompts, tmp_path / "out.jsonl", server="http://127.0.0.1:9", model="tiny", num_retries=2)
    with pytest.raises(ValueError, match="--server needs --model"):
        run(None, prompts, tmp_path / "out.jsonl", server="http://127.0.0.1:9")
