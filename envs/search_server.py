"""A retrieval server of our own: dense passages in a FAISS index behind the protocol of Search-R1.

Paper: appendix D, "NQ Search" ("Retrieved documents are provided via a FAISS index with E5 embeddings, k = 3").

    python -m envs.search_server --build --corpus wiki.jsonl --index wiki.faiss --encoder intfloat/e5-base-v2
    python -m envs.search_server         --corpus wiki.jsonl --index wiki.faiss --encoder intfloat/e5-base-v2

    POST /retrieve  {"queries": ["who wrote ..."], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.83}, ...], ...]}
    400, 413        {"error": "one sentence"}; 503 while there are too many connections

The corpus is JSON lines with a string `contents`, the title on its first line. The index is exact (inner product
over normalised vectors) and lies in memory: the 21 million passages of Search-R1's Wikipedia need 64 GB.

Where we differ: `--encoder local` (the default) needs no download (envs/search_encoders.py). The size of a request and
the number of its queries and of connections are limited, and the server listens on the loopback interface unless told
otherwise: it has no authentication.
"""

import argparse
import contextlib
import json
import mmap
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import faiss
import numpy as np

from envs.search_encoders import Encoder, load_encoder

MAX_BYTES, MAX_QUERIES, MAX_TOPK = 1 << 20, 512, 100
_DRAIN = 16 << 20  # bytes of an oversized request that are read and dropped, so that its sender can read our answer
_BUILD_BATCH = 1024


class Corpus:
    """The documents of a JSON lines file, read from disk one by one: only the places of the lines are in memory.

    Raises ValueError, with file and line, for an empty file or a line that is no object with a string `contents`.
    """

    def __init__(self, path: str):
        self.path = path
        with open(path, "rb") as file:
            lengths = np.fromiter((len(line) for line in file), dtype=np.int64)
            if not lengths.sum():
                raise ValueError(f"{path} is empty, but must hold a JSON object on every line")
            self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._ends = np.cumsum(lengths)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> dict[str, Any]:
        line = self._text[self._ends[i - 1] if i else 0 : self._ends[i]]
        with contextlib.suppress(ValueError, RecursionError):  # bad JSON, bad UTF-8, a thousand brackets: said below
            document = json.loads(line)
            if isinstance(document, dict) and isinstance(document.get("contents"), str):
                return document
        raise ValueError(f"{self.path}, line {i + 1}: must be a JSON object with a string under contents")

    def contents(self) -> Iterator[str]:
        return (self[i]["contents"] for i in range(len(self)))


def build_index(corpus: Corpus, encoder: Encoder) -> faiss.IndexFlatIP:
    """The exact inner-product index of a corpus, filled a batch at a time."""
    index = faiss.IndexFlatIP(encoder.dimension)
    for start in range(0, len(corpus), _BUILD_BATCH):
        stop = min(start + _BUILD_BATCH, len(corpus))
        index.add(encoder.passages([corpus[i]["contents"] for i in range(start, stop)]))
    return index


def read_index(path: str) -> faiss.Index:
    """Raises ValueError where there is no index."""
    try:
        return faiss.read_index(path)
    except RuntimeError as error:
        raise ValueError(f"--index is {path}, but must be an index that FAISS can read; --build makes one") from error


@dataclass
class Retriever:
    """Raises ValueError where the index does not belong to corpus and encoder."""

    corpus: Corpus
    encoder: Encoder
    index: faiss.Index

    def __post_init__(self) -> None:
        if (self.index.ntotal, self.index.d) != (len(self.corpus), self.encoder.dimension):
            raise ValueError(
                f"the index holds {self.index.ntotal} vectors of {self.index.d} numbers, but {self.corpus.path} has "
                f"{len(self.corpus)} documents and the encoder makes {self.encoder.dimension} numbers: build it again"
            )

    def search(self, queries: list[str], topk: int) -> list[list[tuple[dict, float]]]:
        """The `topk` best documents of each query with their scores (cosine), best first; fewer in a small corpus,
        or where the index is approximate and finds fewer."""
        readable = [query.encode("utf-8", "replace").decode() for query in queries]  # lone surrogates out
        scores, found = self.index.search(self.encoder.queries(readable), min(topk, len(self.corpus)))
        return [
            [(self.corpus[int(i)], float(score)) for i, score in zip(*row, strict=True) if i >= 0]  # -1: none found
            for row in zip(found, scores, strict=True)
        ]


class TooLargeError(ValueError):
    """More than this server takes in one request."""


def parse_request(body: bytes) -> tuple[list[str], int, bool]:
    """(queries, topk, return_scores) of a request. Raises ValueError with one sentence for the sender."""
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError("the body must be JSON in UTF-8, nested no deeper than the protocol needs") from error
    if not isinstance(request, dict):
        raise ValueError("the body must be a JSON object with the fields queries, topk and return_scores")
    queries, topk, scores = request.get("queries"), request.get("topk", 3), request.get("return_scores", False)
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ValueError("queries must be a list of at least one string")
    if len(queries) > MAX_QUERIES:
        raise TooLargeError(f"queries holds {len(queries)} entries, but at most {MAX_QUERIES} are allowed")
    if not isinstance(topk, int) or isinstance(topk, bool) or not 1 <= topk <= MAX_TOPK:
        raise ValueError(f"topk must be a whole number from 1 to {MAX_TOPK}")
    if not isinstance(scores, bool):
        raise ValueError("return_scores must be true or false")
    return queries, topk, scores


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = 30  # seconds of silence after which a connection is dropped
    wbufsize, disable_nagle_algorithm = -1, True  # an answer leaves at once, and in one piece
    server: "SearchServer"

    def do_POST(self) -> None:
        if self.path != "/retrieve":
            self._error(404, "the only address here is POST /retrieve")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            self._error(400, "Content-Length must be given, in bytes")
            return
        if len(length) > 18 or int(length) > MAX_BYTES:
            self._drain(min(int(length[:18]), _DRAIN))
            self._error(413, f"the body must have at most {MAX_BYTES} bytes")
            return
        try:
            queries, topk, return_scores = parse_request(self.rfile.read(int(length)))
        except ValueError as error:
            self._error(413 if isinstance(error, TooLargeError) else 400, str(error))
            return
        found = self.server.retriever.search(queries, topk)
        if return_scores:
            self._reply(200, {"result": [[{"document": d, "score": s} for d, s in row] for row in found]})
        else:
            self._reply(200, {"result": [[document for document, _ in row] for row in found]})

    def _drain(self, length: int) -> None:
        while length > 0 and (part := self.rfile.read(min(length, 1 << 16))):
            length -= len(part)

    def _error(self, status: int, sentence: str) -> None:
        self.close_connection = True  # whatever is left of the body is not a request
        self._reply(status, {"error": sentence})

    def _reply(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing: a training run makes thousands of requests."""


class SearchServer(ThreadingHTTPServer):
    """Serves a retriever at http://host:port/retrieve, a thread a connection; port 0 takes a free one."""

    daemon_threads = True
    request_queue_size = 128
    max_connections = 256  # at a time

    def __init__(self, retriever: Retriever, host: str = "127.0.0.1", port: int = 0):
        super().__init__((host, port), Handler)
        self.retriever = retriever
        self.free = threading.BoundedSemaphore(self.max_connections)
        self.url = f"http://{host}:{self.server_port}/retrieve"

    def process_request(self, request: Any, client_address: Any) -> None:
        """In the thread that listens: a thread for the new connection, or a refusal where there are too many."""
        if self.free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            request.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is no news; anything else is printed with its traceback."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done or interrupted, 2 where a file, a model or an address is no good."""
    parser = argparse.ArgumentParser(description="Build a FAISS index of a corpus, or serve it (Search-R1's protocol).")
    parser.add_argument("--build", action="store_true", help="write the index and stop")
    parser.add_argument("--corpus", required=True, help='JSON lines: {"contents": "Title\\ntext"}')
    parser.add_argument("--index", required=True, help="FAISS index, read or (with --build) written")
    parser.add_argument("--encoder", default="local", help="local, or an E5 model: a hub id or a folder")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    args = parser.parse_args(argv)
    try:
        corpus = Corpus(args.corpus)
        encoder = load_encoder(args.encoder, corpus.contents())
        if args.build:
            faiss.write_index(build_index(corpus, encoder), args.index)
            print(f"{args.index}: {len(corpus)} documents, {encoder.dimension} numbers each")
            return 0
        server = SearchServer(Retriever(corpus, encoder, read_index(args.index)), args.host, args.port)
    except (ValueError, OSError, OverflowError) as error:  # no file, no model, no such port
        print(f"search_server: error: {str(error).splitlines()[0]}", file=sys.stderr)
        return 2
    print(f"{len(corpus)} documents at {server.url}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
