"""Serve a FAISS index of passages over HTTP, and query such a server: both ends of Search-R1's
protocol.

Paper: appendix D, "NQ Search" ("Retrieved documents are provided via a FAISS index with E5
embeddings, k = 3"). To build an index, and then to serve it:

    files="--corpus wiki.jsonl --index wiki.faiss --encoder intfloat/e5-base-v2"
    python -m envs.search_server --build $files
    python -m envs.search_server $files

The protocol is one kind of request and two kinds of answers. 500 means that the search failed:

    POST /retrieve  {"queries": ["who wrote ..."], "topk": 3, "return_scores": true}
    200             {"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.8}, ...]]}
    400, 500        {"error": "one sentence"}; other methods than POST get 501

A training run whose server fails ends with one sentence. Once the server is back, --resume goes on.

There are two encoders: a transformer such as E5, and hashed words, which are ours and need no
download. The index is exact. The 21 million passages of Search-R1's Wikipedia need 64 GB of memory,
and 20 GB for their text.
"""

import argparse
import contextlib
import json
import os
import re
import time
import zlib
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

import numpy as np

# Encoders: texts per forward pass of a transformer. Weights of a hashed word in a passage's title
# (its first line) and of a trigram, where any other word counts 1.
BATCH = 64
TITLE = 4.0
TRIGRAM = 0.25

# What reading JSON or HTTP of others can raise.
FAILURES = (ValueError, TypeError, KeyError, RecursionError, OverflowError, OSError, HTTPException)

# Passages that are encoded again to check an index, and the largest distance of a vector to the
# stored one, which may have been computed in half precision.
CHECKED = 8
CLOSE = 0.3

MOST_BYTES = 1 << 28  # of a request
REQUEST_FORM = (
    "send a JSON object with queries, a list of strings, and topk, a whole number above 0"
)

# Client: its attempts, the seconds of silence after which one fails, and the seconds before the
# second attempt (twice as many before the third).
ATTEMPTS = 3
TIMEOUT = 20.0
PAUSE = 0.5
# No proxy is used: it could not reach a loopback address.
OPENER = build_opener(ProxyHandler({}))


class LocalEncoder:
    """Hash words and letter trigrams with a sign into `dimension` places, weighted by idf over the
    corpus."""

    def __init__(self, corpus: list[str], dimension: int = 2048):
        self.dimension = dimension
        documents = sum(self._terms(contents) != 0 for contents in corpus)  # [dimension]
        self.idf = np.log((1 + len(corpus)) / (1 + documents)) + 1

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]. A text without
        words gets zeros."""
        title_weight = TITLE if passages else 1.0
        terms = []
        for text in texts:
            title, _, body = text.partition("\n")
            terms.append(title_weight * self._terms(title) + self._terms(body))

        return unit_vectors(self.idf * terms)

    def _terms(self, text: str) -> np.ndarray:
        """Return the signed number of words and trigrams in each place, float64 [dimension]."""
        counts = np.zeros(self.dimension)
        for word in re.findall(r"\w+", text.lower()):
            framed = f"#{word}#"
            trigrams = [framed[k : k + 3] for k in range(len(word))]

            for term in [word, *trigrams]:
                weight = 1.0 if term is word else TRIGRAM
                digest = zlib.crc32(term.encode("utf-8", "replace"))
                counts[digest % self.dimension] += weight if digest >> 31 else -weight

        return counts


class TransformerEncoder:
    """Average the last hidden states over a text's own tokens and normalise, as E5 and all-MiniLM
    do. A model with "e5" in its name gets E5's prefixes, as in Search-R1. Raises ValueError if no
    model can be loaded."""

    def __init__(self, name: str):
        # These are imported here, because the local encoder needs neither.
        import torch
        from transformers import AutoModel, AutoTokenizer

        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model, loaded = AutoModel.from_pretrained(
                name, use_safetensors=True, output_loading_info=True
            )
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--encoder is {name}, but no model could be loaded from there"
            ) from error
        # transformers would make random ones. The pooler is not used.
        lacking = [key for key in loaded["missing_keys"] if not key.startswith("pooler.")]
        if lacking:
            raise ValueError(f"--encoder is {name}, but must have the weights {min(lacking)}")

        self.model.to("cuda" if torch.cuda.is_available() else "cpu")
        self.model.requires_grad_(False)
        self.has_prefixes = "e5" in Path(name).name.lower()
        self.dimension = self.model.config.hidden_size
        # The rest of a text is cut off.
        self.tokenizer.model_max_length = min(512, self.model.config.max_position_embeddings)

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]."""
        if self.has_prefixes:
            prefix = "passage: " if passages else "query: "
            texts = [prefix + text for text in texts]

        sums = []
        for start in range(0, len(texts), BATCH):
            batch = texts[start : start + BATCH]
            tokens = self.tokenizer(batch, padding=True, truncation=True, return_tensors="pt")
            tokens = tokens.to(self.model.device)
            hidden = self.model(**tokens).last_hidden_state  # [n, T, dimension]
            mask = tokens["attention_mask"][..., None]  # [n, T, 1], 0 at padding
            # The sum has the direction of the mean.
            sums.append((hidden.float() * mask).sum(1).cpu().numpy())

        return unit_vectors(np.concatenate(sums))


def unit_vectors(vectors: np.ndarray) -> np.ndarray:
    """Divide each row by its norm, float32 [n, dimension]. Rows of zeros stay."""
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(norms, 1e-12)).astype(np.float32)


def encodable(text: Any) -> str:
    """Return a string with "?" for lone surrogates, which JSON can hold and no tokenizer reads.
    Raises TypeError if it is no string."""
    if not isinstance(text, str):
        raise TypeError(f"must be a string, but is {text!r:.30}")
    return text.encode("utf-8", "replace").decode()


def read_corpus(path: str) -> list[str]:
    """Return the `contents` of each line. Raises ValueError that names file and line if a line has
    none."""
    passages = []
    with open(path, "rb") as file:
        for line in file:
            try:
                passages.append(encodable(json.loads(line)["contents"]))
            except FAILURES as error:
                raise ValueError(
                    f"{path}, line {len(passages) + 1}: must be a JSON object with contents"
                ) from error
    return passages


Encoder = LocalEncoder | TransformerEncoder


def build_index(corpus: list[str], encoder: Encoder) -> Any:
    """Return an exact FAISS index of the passages."""
    # FAISS is imported here, because clients do not need it.
    import faiss

    index = faiss.IndexFlatIP(encoder.dimension)
    for start in range(0, len(corpus), 1024):
        index.add(encoder.encode(corpus[start : start + 1024], passages=True))
    return index


def fits(index: Any, corpus: list[str], encoder: Encoder) -> bool:
    """Return whether an index is of these passages, in this order, and of this encoder. Of an exact
    index, a few passages are encoded again."""
    if (index.ntotal, index.d) != (len(corpus), encoder.dimension):
        return False
    if not type(index).__name__.startswith("IndexFlat"):
        return True

    rows = np.linspace(0, len(corpus) - 1, CHECKED, dtype=int).tolist()
    stored = np.stack([index.reconstruct(row) for row in rows])  # [CHECKED, dimension]
    encoded = encoder.encode([corpus[row] for row in rows], passages=True)
    return bool(np.linalg.norm(stored - encoded, axis=1).max() < CLOSE)


class Retriever:
    """Search passages with a FAISS index, which is built if it is None. Raises ValueError if index
    and passages do not fit."""

    def __init__(self, corpus: list[str], encoder: Encoder, index: Any = None):
        if index is None:
            index = build_index(corpus, encoder)
        elif not fits(index, corpus, encoder):
            raise ValueError(
                f"the index of {index.ntotal} passages is of another corpus or encoder: "
                "build it again"
            )
        self.corpus = np.array(corpus, dtype=object)
        self.encoder = encoder
        self.index = index

    def search(self, queries: list[str], topk: int) -> tuple[list[list[str]], list[list[float]]]:
        """Return the `topk` best passages of each query, best first, and their scores (cosines)."""
        vectors = self.encoder.encode(queries)
        scores, positions = self.index.search(vectors, min(topk, len(self.corpus)))
        # An index of cells may find fewer, and says -1.
        found = [row[row >= 0] for row in positions]
        passages = [self.corpus[row].tolist() for row in found]
        return passages, [row[: len(k)].tolist() for row, k in zip(scores, found, strict=True)]


class Handler(BaseHTTPRequestHandler):
    """Answer one HTTP request. Its parts must each arrive within `timeout` seconds."""

    timeout = 30.0
    server: "SearchServer"

    def do_POST(self) -> None:
        """Search for the queries of the request, or say what a request must be."""
        try:
            queries, topk = self.read_request()
        except FAILURES:
            self.send(400, error=REQUEST_FORM)
            return
        try:
            passages, scores = self.server.retriever.search(queries, topk)
        except Exception as error:
            self.send(500, error=f"the search failed: {error!r:.300}")
            raise  # The server prints it and goes on.

        result = []
        for texts, cosines in zip(passages, scores):
            hits = zip(texts, cosines)
            result.append(
                [{"document": {"contents": text}, "score": score} for text, score in hits]
            )
        self.send(200, result=result)

    def read_request(self) -> tuple[list[str], int]:
        """Return `queries` and `topk`. Raises one of several errors if there are none."""
        size = int(self.headers["Content-Length"])
        if not 0 < size <= MOST_BYTES:
            raise ValueError
        request = json.loads(self.rfile.read(size))
        queries = request["queries"]
        topk = request.get("topk", 3)
        if not (isinstance(queries, list) and queries and type(topk) is int and topk > 0):
            raise ValueError
        return [encodable(query) for query in queries], topk

    def send(self, status: int, **content: Any) -> None:
        """Send a JSON object, unless the client has left."""
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        with contextlib.suppress(OSError):
            self.end_headers()
            self.wfile.write(body)

    def log_request(self, *_: object) -> None:
        """Print nothing."""


class SearchServer(ThreadingHTTPServer):
    """Serve a retriever at http://host:port/retrieve, with a thread per connection. Port 0 takes a
    free one."""

    # Clients that wait for a thread.
    request_queue_size = 256

    def __init__(self, retriever: Retriever, host: str = "127.0.0.1", port: int = 0):
        super().__init__((host, port), Handler)
        self.retriever = retriever
        self.url = f"http://{host}:{self.server_port}/retrieve"


def retrieve(url: str, queries: list[str], topk: int) -> list[list[str]]:
    """Ask a server for the `topk` best passages ("Title\\ntext") of each query, best first. Raises
    ConnectionError if ATTEMPTS fail: nothing arrives for TIMEOUT seconds, or the answer does not
    follow the protocol."""
    body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()

    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        try:
            rows = ask(url, body)["result"]
            passages = []
            for _, hits in zip(queries, rows, strict=True):
                passages.append([encodable(hit["document"]["contents"]) for hit in hits[:topk]])
            return passages
        except FAILURES as error:
            reason = f"{error!r:.300}"

    raise ConnectionError(
        f"the search server {url} failed {ATTEMPTS} times, for up to {TIMEOUT:g} s each, "
        f"at last with {reason}"
    )


def ask(url: str, body: bytes) -> Any:
    """Return the JSON of a server's answer. Raises TimeoutError if nothing arrives for TIMEOUT
    seconds."""
    request = Request(url, body, {"Content-Type": "application/json"})
    try:
        with OPENER.open(request, timeout=TIMEOUT) as response:
            return json.loads(response.read())
    except HTTPError as error:
        # Its body says why.
        raise OSError(f"{error!r}: {error.read(300)!r}") from error


def main(argv: list[str] | None = None) -> None:
    """Build or serve an index. Exits with status 2 and one sentence if a file, a model or an
    address cannot be used."""
    parser = argparse.ArgumentParser(
        description="Build a FAISS index of a corpus, or serve it (Search-R1's protocol)."
    )
    add = parser.add_argument
    add("--build", action="store_true", help="write the index and stop")
    add("--corpus", required=True, help='JSON lines: {"contents": "Title\\ntext"}')
    add("--index", required=True, help="FAISS index, read or (with --build) written")
    add("--encoder", default="local", help="local, or a hub id or folder; e5 in it adds prefixes")
    add("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    add("--port", type=int, default=8000, help="0: any free one")
    args = parser.parse_args(argv)
    for flag in ("host", "port"):
        if args.build and getattr(args, flag) != parser.get_default(flag):
            parser.error(f"--{flag} is {getattr(args, flag)}, but has no effect with --build")
    import faiss

    try:
        corpus = read_corpus(args.corpus)
        if not corpus or os.path.realpath(args.index) == os.path.realpath(args.corpus):
            raise ValueError("the corpus must have documents, and the index a file of its own")
        is_local = args.encoder == "local"
        encoder: Encoder = LocalEncoder(corpus) if is_local else TransformerEncoder(args.encoder)
        if args.build:
            # A file that cannot be written is refused before the corpus is encoded.
            unfinished = Path(f"{args.index}.{os.getpid()}.new")
            unfinished.touch()
            try:
                faiss.write_index(build_index(corpus, encoder), str(unfinished))
                unfinished.replace(args.index)
            finally:
                unfinished.unlink(missing_ok=True)
            return

        retriever = Retriever(corpus, encoder, faiss.read_index(args.index))
        server = SearchServer(retriever, args.host, args.port)
    # These errors are of a file, the model, the port, FAISS.
    except (ValueError, OSError, OverflowError, RuntimeError) as error:
        served = f"corpus {args.corpus}, index {args.index}, {args.host}:{args.port}"
        parser.error(f"{served}: {error}")

    print(f"{len(corpus)} documents at {server.url}", flush=True)
    with server, contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
