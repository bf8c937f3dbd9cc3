"""One client of an OpenAI-compatible server: which failures pass by themselves, and what the others mean."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import anyio
import httpx2

# Too many requests, overload, a restart behind a proxy: the same request may succeed later.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504, 529})
_OF_THE_REQUEST = frozenset({400, 413, 422})
_CONNECT_SECONDS = 10.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.5, 30.0  # seconds


class Refused(ValueError):
    """The server understood a request and refuses it for what it holds."""


class Client:
    """Posts JSON and repeats what failed for the moment.

    Requests that time out, lose their connection or meet an overloaded server are repeated after pauses that double
    up to 30 seconds, shortened at random so that many requests do not return at once; longer where the server says so
    (``Retry-After``).

    Args:
        url: address of the server, as users write it.
        api_key: sent as a bearer token; None sends nothing.
        concurrency: connections at a time.
        timeout: seconds to wait for an answer.
        num_retries: times that a request is repeated.
    """

    def __init__(self, url: str, *, api_key: str | None, concurrency: int, timeout: float, num_retries: int) -> None:
        self.url, self.timeout, self.num_retries = base_url(url), timeout, num_retries
        self._http = httpx2.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(timeout, connect=_CONNECT_SECONDS),
            limits=httpx2.Limits(max_connections=concurrency, max_keepalive_connections=concurrency),
        )

    async def __aenter__(self) -> Client:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._http.__aexit__(*error)

    async def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """The server's reply to ``body``, a JSON object.

        Raises:
            Refused: the request itself is at fault.
            ValueError: no request can succeed, or this one failed more often than it may be repeated.
        """
        failure, asked = "", 0.0
        for attempt in range(self.num_retries + 1):
            if attempt:
                await anyio.sleep(max(_pause(attempt), asked))
            asked = 0.0
            try:
                response = await self._http.post(path, json=body)
            except httpx2.TimeoutException as error:
                failure = f"no answer in {_seconds(error, self.timeout):g} s ({type(error).__name__})"
            except httpx2.TransportError as error:
                failure = f"{type(error).__name__}: {error}"
            else:
                if response.status_code not in _PASSING:
                    return self._content(response)
                failure, asked = _reason(response), _retry_after(response)
        raise ValueError(
            f"{self.url}: {self.num_retries + 1} attempts failed, the last with {failure}. What is answered is kept: "
            "run the same command again to go on. A lower --concurrency or a longer --timeout may help."
        )

    def _content(self, response: httpx2.Response) -> dict[str, Any]:
        status = response.status_code
        if status in _OF_THE_REQUEST:
            raise Refused(f"the server refuses the request: {_reason(response)}.")
        if status in (401, 403):
            raise ValueError(
                f"{self.url} refuses access: {_reason(response)}. Give --api_key_env the name of the environment "
                "variable that holds the server's API key."
            )
        if status == 404:
            raise ValueError(
                f"{response.url} was not found: {_reason(response)}. Check --model (`curl {self.url}/models` lists the "
                "names) and --server, whose path usually ends in /v1."
            )
        if not response.is_success:
            raise ValueError(f"{response.url}: {_reason(response)}. Check --server.")
        try:
            content = response.json()
        except ValueError:
            content = None
        if not isinstance(content, dict):
            raise ValueError(
                f"{response.url} does not answer in JSON, but {response.text[:80]!r}. Is --server the address of an "
                "OpenAI-compatible server?"
            )
        return content


def base_url(url: str) -> str:
    """The address under which the endpoints lie, without a name or a password.

    >>> base_url("http://localhost:8000"), base_url("https://host/models/v1/")
    ('http://localhost:8000/v1', 'https://host/models/v1')

    Raises:
        ValueError: it is not an address, or holds a password.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"--server: expected an address such as http://localhost:8000/v1, got {url!r}.")
    if "@" in parts.netloc:
        raise ValueError("--server: leave the password out of the address and give the key by --api_key_env.")
    return urlunsplit((parts.scheme, parts.netloc, parts.path.rstrip("/") or "/v1", "", ""))


def _pause(attempt: int) -> float:
    return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def _seconds(error: httpx2.TimeoutException, timeout: float) -> float:
    return _CONNECT_SECONDS if isinstance(error, httpx2.ConnectTimeout) else timeout


def _retry_after(response: httpx2.Response) -> float:
    value = response.headers.get("Retry-After", "")
    return float(value) if value.isdecimal() else 0.0


def _reason(response: httpx2.Response) -> str:
    """Status and the server's own words: OpenAI's, vLLM's and FastAPI's errors hold them in different places."""
    try:
        found: Any = response.json()
    except ValueError:
        found = response.text
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and found.get(key):
            found = found[key]
    words = " ".join(str(found).split())[:300].rstrip(".")
    return f"{response.status_code} {response.reason_phrase}" + (f" ({words})" if words else "")
