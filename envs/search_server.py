"""Serve a FAISS index of passages over HTTP, and query such a server: both ends of Search-R1's protocol.

Paper: appendix D, "NQ Search" ("Retrieved documents are provided via a FAISS index with E5 embeddings, k = 3").

    python -m envs.search_server --build --corpus wiki.jsonl --index wiki.faiss --encoder intfloat/e5-base-v2
    python -m envs.search_server         --corpus wiki.jsonl --index wiki.faiss --encoder intfloat/e5-base-v2

    POST /retrieve  {"queries": ["who wrote ..."], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.83}, ...], ...]}
    400             {"error": "one sentence"}

A training run whose server fails ends with one sentence; once it is back, --resume goes on.

Encoders: a transformer such as E5, or hashed words, which are ours and need no download. The index is exact. The 21
million passages of Search-R1's Wikipedia need 64 GB of memory, and 20 GB for their text.
"""

import argparse
import contextlib
import json
import re
import socket
import threading
import time
import zlib
from concurrent.futures import Future
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

BATCH = 64  # texts per forward pass of a transformer
TITLE, TRIGRAM = (
    4.0,
    0.25,
)  # hashed words: weights of the words of a passage's title (its first line), and of trigrams
MOST_BYTES, MOST_QUERIES, MOST_TOPK = 1 << 25, 1024, 100  # of a request
SECONDS = 30.0  # in which a request must arrive, and then a part of its answer be taken
# a client's attempts; the seconds that each may take; seconds before the second, twice that before the third
ATTEMPTS, TIMEOUT, PAUSE = 3, 20.0, 0.5
MOST_ANSWER = 1 << 28  # bytes
FAILURES = OSError, HTTPException, ValueError, TypeError, KeyError, RecursionError, OverflowError
OPENER = build_opener(ProxyHandler({}))  # no proxy: it could not reach a loopback address


class LocalEncoder:
    """Hash words and letter trigrams with a sign into `dimension` places, weighted by idf over the corpus."""

    def __init__(self, corpus: list[str], dimension: int = 2048):
        self.dimension = dimension
        documents = sum(
            self._terms(contents) != 0 for contents in corpus
        )  # number of those that have a term there
        self.idf = np.log((1 + len(corpus)) / (1 + documents)) + 1

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]; zeros for a text without words."""
        split = [text.partition("\n")[::2] for text in texts]
        terms = [
            (TITLE if passages else 1.0) * self._terms(title) + self._terms(body)
            for title, body in split
        ]
        vectors = self.idf * np.array(terms).reshape(len(texts), self.dimension)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _terms(self, text: str) -> np.ndarray:
        """Return the signed number of words and trigrams in each place, float64 [dimension]."""
        counts = np.zeros(self.dimension)
        for word in re.findall(r"\w+", text.lower()):
            framed = f"#{word}#"
            for term, share in [
                (word, 1.0),
                *((framed[k : k + 3], TRIGRAM) for k in range(len(word))),
            ]:
                digest = zlib.crc32(term.encode("utf-8", "replace"))
                counts[digest % self.dimension] += share if digest >> 31 else -share
        return counts


class TransformerEncoder:
    """Average the last hidden states over a text's own tokens and normalise, as E5 and all-MiniLM do. A model with "e5"
    in its name gets E5's prefixes, as in Search-R1. Raises ValueError if no model can be loaded."""

    def __init__(self, name: str):
        import torch  # imported here, because the local encoder needs neither
        from transformers import AutoModel, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = (
                AutoModel.from_pretrained(name, use_safetensors=True).to(self.device).eval()
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--encoder is {name}, but no model could be loaded from there"
            ) from error
        self.prefixes = ("query: ", "passage: ") if "e5" in Path(name).name.lower() else ("", "")
        self.dimension = self.model.config.hidden_size
        longest = min(
            512, self.model.config.max_position_embeddings
        )  # tokens; the rest of a text is cut off
        self.options = {
            "padding": True,
            "truncation": True,
            "max_length": longest,
            "return_tensors": "pt",
        }

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]."""
        import torch

        vectors = []
        for k in range(0, len(texts), BATCH):
            batch = [self.prefixes[passages] + text for text in texts[k : k + BATCH]]
            tokens = self.tokenizer(batch, **self.options).to(self.device)
            with torch.no_grad():
                hidden = self.model(**tokens).last_hidden_state  # [n, T, dimension]
            own = tokens["attention_mask"][..., None]  # [n, T, 1], 0 at padding
            mean = (hidden * own).sum(1) / own.sum(1)
            vectors.append(torch.nn.functional.normalize(mean.float(), dim=-1).cpu().numpy())
        return np.concatenate(vectors)


def read_corpus(path: str) -> list[str]:
    """Return the `contents` of each line. Raises ValueError that names file and line if there is none."""
    passages: list[str] = []
    with open(path, "rb") as file:
        for line in file:
            try:
                passages.append(json.loads(line)["contents"])
            except (ValueError, TypeError, KeyError) as error:
                raise ValueError(
                    f"{path}, line {len(passages) + 1}: must be a JSON object with contents"
                ) from error
    return passages


class Retriever:
    """Search passages with a FAISS index, which is built if it is not given. Raises ValueError if they do not fit."""

    def __init__(
        self, corpus: list[str], encoder: LocalEncoder | TransformerEncoder, index: Any = None
    ):
        if index is None:
            import faiss  # here, because clients do without

            index = faiss.IndexFlatIP(encoder.dimension)
            for start in range(0, len(corpus), 1024):
                index.add(encoder.encode(corpus[start : start + 1024], passages=True))
        if (index.ntotal, index.d) != (len(corpus), encoder.dimension):
            raise ValueError(
                f"the index of {index.ntotal} passages is of another corpus or encoder: build it again"
            )
        self.corpus, self.encoder, self.index = corpus, encoder, index

    def search(self, queries: list[str], topk: int) -> list[list[tuple[str, float]]]:
        """Return the `topk` best passages of each query with their scores (cosines), best first."""
        scores, found = self.index.search(self.encoder.encode(queries), min(topk, len(self.corpus)))
        rows = zip(found.tolist(), scores.tolist(), strict=True)
        return [[(self.corpus[i], score) for i, score in zip(*row, strict=True)] for row in rows]


class Handler(BaseHTTPRequestHandler):
    wbufsize = -1  # head and body of an answer leave in one piece
    default_request_version = "HTTP/1.0"  # the answer to what is no HTTP has a head, too
    server: "SearchServer"

    def setup(self) -> None:
        """Start the time of a request. When it is over, what has arrived of it counts as all."""
        super().setup()
        self.connection.settimeout(2 * SECONDS)
        self.late = threading.Timer(SECONDS, self.stop_reading)
        self.late.daemon = True
        self.late.start()

    def stop_reading(self) -> None:
        with contextlib.suppress(OSError):  # the client has left
            self.connection.shutdown(socket.SHUT_RD)

    def finish(self) -> None:
        self.late.cancel()
        super().finish()

    def do_POST(self) -> None:
        try:
            hits = self.hits()
        except (ValueError, RecursionError) as error:
            self.send_error(400, str(error))
        else:
            self.answer(200, {"result": hits})

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer a request that is none, also for the base class."""
        self.answer(400, {"error": message or self.responses[code][0]})

    def answer(self, status: int, content: dict) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def hits(self) -> list[list[dict]]:
        """Return the hits of each query in the request. Raises ValueError with one sentence for the sender."""
        size = int(self.headers.get("Content-Length", 0))
        if not 0 < size <= MOST_BYTES:
            raise ValueError(f"Content-Length must be from 1 to {MOST_BYTES}")

        match json.loads(self.rfile.read(size)):
            case {"queries": [*queries], **options} if all(
                isinstance(query, str) for query in queries
            ):
                topk = options.get("topk", 3)
                if 0 < len(queries) <= MOST_QUERIES and type(topk) is int and 0 < topk <= MOST_TOPK:
                    found = self.server.retriever.search(list(map(encodable, queries)), topk)
                    return [
                        [{"document": {"contents": text}, "score": score} for text, score in row]
                        for row in found
                    ]
        raise ValueError(
            f"send a JSON object with queries, a list of 1 to {MOST_QUERIES} strings, "
            f"and topk, a whole number from 1 to {MOST_TOPK}"
        )

    def log_message(self, *_: object) -> None:
        """Print nothing: a training run makes thousands of requests."""


class SearchServer(ThreadingHTTPServer):
    """Serve a retriever at http://host:port/retrieve, one thread per connection. Port 0 takes a free one."""

    request_queue_size = 256  # clients that wait for a thread

    def __init__(self, retriever: Retriever, host: str = "127.0.0.1", port: int = 0):
        super().__init__((host, port), Handler)
        self.retriever, self.url = retriever, f"http://{host}:{self.server_port}/retrieve"

    def close_request(self, request: Any) -> None:
        """Wait for the client to close: the system drops an answer if a part of the request was
        never read."""
        end = time.monotonic() + SECONDS
        request.settimeout(SECONDS)
        with contextlib.suppress(OSError):
            while time.monotonic() < end and request.recv(1 << 20):
                pass
        super().close_request(request)


def encodable(text: str) -> str:
    """Return text with "?" for lone surrogates, which JSON can hold and no tokenizer reads."""
    return text.encode("utf-8", "replace").decode()


def retrieve(url: str, queries: list[str], topk: int) -> list[list[str]]:
    """Ask a server for the `topk` best passages ("Title\\ntext") of each query, best first. Raises
    ConnectionError if ATTEMPTS fail: no answer within TIMEOUT seconds, or none of the protocol."""
    passages = []
    for start in range(0, len(queries), MOST_QUERIES):
        batch = queries[start : start + MOST_QUERIES]
        body = json.dumps({"queries": batch, "topk": topk, "return_scores": True}).encode()

        for attempt in range(ATTEMPTS):
            time.sleep(PAUSE * attempt)
            try:
                hits = _ask(Request(url, body, {"Content-Type": "application/json"}))["result"]
                rows = [row[:topk] for _, row in zip(batch, hits, strict=True)]
                passages += [[_contents(hit) for hit in row] for row in rows]
                break
            except FAILURES as error:
                reason = f"{error!r:.300}"
        else:
            attempts = f"{ATTEMPTS} times, for up to {TIMEOUT:g} s each"
            raise ConnectionError(
                f"the search server {url} failed {attempts}, at last with {reason}"
            )
    return passages


def _ask(request: Request) -> Any:
    """Return an answer's JSON. Raises TimeoutError if it is not complete after TIMEOUT seconds: the
    timeout of a socket begins anew with every byte."""
    answer: Future = Future()

    def work() -> None:
        try:
            with OPENER.open(request, timeout=TIMEOUT) as response:
                answer.set_result(json.loads(response.read(MOST_ANSWER)))
        except Exception as error:  # raised in the other thread
            answer.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return answer.result(TIMEOUT)


def _contents(hit: Any) -> str:
    """Return the passage of a hit. Raises TypeError if it is none."""
    contents = hit["document"]["contents"]
    if not isinstance(contents, str):
        raise TypeError(f"contents must be a string, but is {contents!r:.30}")
    return encodable(contents)


def main(argv: list[str] | None = None) -> None:
    """Build or serve an index. Exits with status 2 and one sentence if a file, a model or an address is no good."""
    parser = argparse.ArgumentParser(
        description="Build a FAISS index of a corpus, or serve it (Search-R1's protocol)."
    )
    parser.add_argument("--build", action="store_true", help="write the index and stop")
    parser.add_argument("--corpus", required=True, help='JSON lines: {"contents": "Title\\ntext"}')
    parser.add_argument(
        "--index", required=True, help="FAISS index, read or (with --build) written"
    )
    parser.add_argument(
        "--encoder",
        default="local",
        help="local, or a hub id or folder; e5 in its name adds prefixes",
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; there is no authentication"
    )
    parser.add_argument("--port", type=int, default=8000, help="0: any free one")
    args = parser.parse_args(argv)
    import faiss

    try:
        corpus = read_corpus(args.corpus)
        encoder = (
            LocalEncoder(corpus) if args.encoder == "local" else TransformerEncoder(args.encoder)
        )
        if args.build:
            open(
                args.index, "ab"
            ).close()  # if it cannot be written, say so before the corpus is encoded
            faiss.write_index(Retriever(corpus, encoder).index, args.index)
            return
        server = SearchServer(
            Retriever(corpus, encoder, faiss.read_index(args.index)), args.host, args.port
        )
    except (
        ValueError,
        OSError,
        OverflowError,
        RuntimeError,
    ) as error:  # of a file, the model, the port, FAISS
        parser.error(f"corpus {args.corpus}, index {args.index}: {error}")
    print(f"{len(corpus)} documents at {server.url}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
