"""The client of the retrieval server: one request for a batch of queries, and an end to every wait.

Paper: section 1 (a batch of 128 prompts makes thousands of retrievals an iteration) and appendix D, "NQ Search".

A server may be slow, gone, or talk nonsense; training must go on. Every attempt has a deadline for the whole of it, not
only for each packet, and a bound on what is read; after the last one a single `SearchError` says what was wrong.
"""

import contextlib
import http.client
import json
import socket
import threading
import time
from typing import Any, cast
from urllib.parse import urlsplit

MAX_QUERIES = 128  # in one request; a larger batch is split
MAX_RESPONSE = 32 << 20  # bytes
PAUSE = 0.2  # seconds before the second attempt, doubled before each further one


class SearchError(Exception):
    """The server did not answer as the protocol says, however often it was asked."""


def check_url(url: str) -> str:
    """The address of a server with its path, `/retrieve` where none is given. Raises ValueError for anything else."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and url.isascii()
    except ValueError:  # a port that is no number
        good = False
    if not good or any(character.isspace() for character in url):
        raise ValueError(f"--search_url is {url}, but must look like http://127.0.0.1:8000/retrieve")
    return url if parts.path.strip("/") else f"{url.rstrip('/')}/retrieve"


def retrieve(url: str, queries: list[str], topk: int, timeout: float = 30.0, attempts: int = 3) -> list[list[str]]:
    """For each query its at most `topk` best passages ("Title\\ntext"), best first.

    `timeout` is in seconds and bounds one attempt, from connecting to the last byte. Raises SearchError after
    `attempts` of them; at once where the server says (4xx) that the request itself is at fault.
    """
    found: list[list[str]] = []
    for start in range(0, len(queries), MAX_QUERIES):
        part = queries[start : start + MAX_QUERIES]
        body = json.dumps({"queries": part, "topk": topk, "return_scores": True}).encode()
        found += _ask(url, body, len(part), topk, timeout, attempts)
    return found


def _ask(url: str, body: bytes, n: int, topk: int, timeout: float, attempts: int) -> list[list[str]]:
    reason = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            status, content = _post(url, body, timeout)
        except (OSError, http.client.HTTPException) as error:
            reason = f"{type(error).__name__}: {error}"
            continue
        if 400 <= status < 500:
            raise SearchError(f"{url} refuses the request with status {status}: {_excerpt(content)}")
        if status != 200:
            reason = f"status {status}: {_excerpt(content)}"
            continue
        try:
            return _passages(json.loads(content), n, topk)
        except (ValueError, RecursionError) as error:
            reason = f"not the protocol's answer ({error}): {_excerpt(content)}"
    raise SearchError(f"{url} failed {attempts} times in a row, the last time with {reason}")


def _excerpt(content: bytes) -> str:
    return repr(content[:200].decode("utf-8", "replace"))


def _post(url: str, body: bytes, timeout: float) -> tuple[int, bytes]:
    """Status and body. Raises OSError or HTTPException, also when `timeout` seconds have passed."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=timeout)
    began = time.monotonic()
    try:
        connection.connect()
        # a socket's own timeout starts anew with every byte that arrives: this one does not
        left = max(0.0, began + timeout - time.monotonic())  # connecting took its part
        deadline = threading.Timer(left, _hang_up, [connection.sock])
        deadline.daemon = True
        deadline.start()
        try:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            headers = {"Content-Type": "application/json", "Connection": "close"}
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            content = response.read(MAX_RESPONSE + 1)
        finally:
            deadline.cancel()
    finally:
        connection.close()
    if len(content) > MAX_RESPONSE:
        raise http.client.HTTPException(f"an answer of more than {MAX_RESPONSE} bytes")
    if response.length:  # what was announced and did not come
        raise http.client.IncompleteRead(content, response.length)
    return response.status, content


def _hang_up(connected: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        connected.shutdown(socket.SHUT_RDWR)


def _passages(answer: Any, n: int, topk: int) -> list[list[str]]:
    """The passages in an answer to n queries. Raises ValueError where it is not the protocol's."""
    rows = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(rows, list) or len(rows) != n or not all(isinstance(row, list) for row in rows):
        raise ValueError(f"result must be a list of {n} lists")
    found = []
    for row in rows:
        documents = [hit.get("document") if isinstance(hit, dict) else None for hit in row[:topk]]
        contents = [d.get("contents") if isinstance(d, dict) else None for d in documents]
        if not all(isinstance(text, str) for text in contents):
            raise ValueError("every hit must hold a document with a string under contents")
        found.append(cast(list[str], contents))
    return found
