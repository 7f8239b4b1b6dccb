"""Search passages with a FAISS index, in this process or on a server.

Paper: appendix D, "NQ Search" ("Retrieved documents are provided via a FAISS index with E5
embeddings", three passages a query). The index is exact. envs/search_server.py builds and serves
one.

There are two encoders: a transformer such as E5, and hashed words, which are ours and need no
download.
"""

import json
import re
import threading
import time
import zlib
from http.client import HTTPConnection
from socket import SHUT_RDWR
from typing import Any

import numpy as np

from envs.base import UserError

# Weights of a hashed word in a passage's title (its first line) and of a trigram, where any other
# word counts 1
TITLE = 4.0
TRIGRAM = 0.25
E5_PREFIXES = {"query": "query: ", "document": "passage: "}

# Client: its attempts, the seconds that the whole answer of one may take, and the seconds before
# the second attempt (twice as many before the third).
ATTEMPTS = 3
TIMEOUT = 30.0
PAUSE = 0.5
MAX_BYTES = 1 << 25  # of a request, and of its answer
MAX_TEXT = 2000  # characters of a passage or a query; Wikipedia's passages have about 600


class SearchError(UserError, ConnectionError):
    """The search server failed."""


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

        vectors = self.idf * terms
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(norms, 1e-12)).astype(np.float32)

    def _terms(self, text: str) -> np.ndarray:
        """Return the signed number of words and trigrams in each place, float64 [dimension]."""
        counts = np.zeros(self.dimension)
        for word in re.findall(r"\w+", text.lower()):
            framed = f"#{word}#"
            trigrams = [framed[k : k + 3] for k in range(len(word))]

            for term in [word, *trigrams]:
                weight = 1.0 if term is word else TRIGRAM
                digest = zlib.crc32(term.encode())
                counts[digest % self.dimension] += weight if digest >> 31 else -weight

        return counts


class TransformerEncoder:
    """Encode with a model of sentence-transformers, such as E5 or all-MiniLM. E5 needs its
    `prefixes` before queries and passages."""

    def __init__(self, name: str, prefixes: bool):
        # The local encoder does without.
        from sentence_transformers import SentenceTransformer

        self.model = SentenceTransformer(name, prompts=E5_PREFIXES if prefixes else None)
        self.dimension = self.encode(["?"]).shape[1]

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]."""
        encode = self.model.encode_document if passages else self.model.encode_query
        return encode(texts, normalize_embeddings=True)


def read_corpus(path: str) -> list[str]:
    """Return the `contents` of each line that is not empty."""
    with open(path, encoding="utf-8-sig") as file:
        return [json.loads(line)["contents"] for line in file if line.strip()]


Encoder = LocalEncoder | TransformerEncoder


def build_index(corpus: list[str], encoder: Encoder) -> Any:
    """Return an exact FAISS index of the passages."""
    # FAISS is imported here, because clients do not need it.
    import faiss

    index = faiss.IndexFlatIP(encoder.dimension)
    for start in range(0, len(corpus), 1024):
        index.add(encoder.encode(corpus[start : start + 1024], passages=True))
    return index


class Retriever:
    """Search passages with a FAISS index, which is built if it is None. Raises ValueError if the
    index has another number of passages, or vectors of another dimension."""

    def __init__(self, corpus: list[str], encoder: Encoder, index: Any = None):
        self.corpus = np.array(corpus, dtype=object)
        self.encoder = encoder
        self.index = index or build_index(corpus, encoder)
        if (self.index.ntotal, self.index.d) != (len(corpus), encoder.dimension):
            raise ValueError(
                f"the index of {self.index.ntotal} texts has another corpus or encoder"
            )

    def search(self, queries: list[str], topk: int) -> tuple[list[list[str]], list[list[float]]]:
        """Return the `topk` best passages of each query, best first, and their scores (cosines). It
        may find fewer passages than scores."""
        vectors = self.encoder.encode(queries)
        scores, positions = self.index.search(vectors, topk)
        # Behind the passages that the index found, it says -1.
        passages = [self.corpus[row[row >= 0]].tolist() for row in positions]
        return passages, scores.tolist()


def harmless(text: str) -> str:
    """Return the beginning of a foreign text, without angle brackets, so that it holds no tag."""
    return text[:MAX_TEXT].replace("<", "‹").replace(">", "›")


def retrieve(url: str, queries: list[str], topk: int) -> list[list[str]]:
    """Ask a server for the `topk` best passages ("Title\\ntext") of each query, best first, without
    angle brackets. Raises SearchError if ATTEMPTS fail: an answer takes longer than TIMEOUT or
    more than MAX_BYTES, or does not follow the protocol (envs/search_server.py)."""
    body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()

    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE * attempt)
        try:
            rows = json.loads(ask(url, body))["result"]
            passages = []
            for _, hits in zip(queries, rows, strict=True):
                passages.append([harmless(hit["document"]["contents"]) for hit in hits[:topk]])
            return passages
        # What a server sends may break any part of this.
        except Exception as error:
            reason = f"{error!r:.300}"

    raise SearchError(
        f"the search server {url} failed {ATTEMPTS} times, for up to {TIMEOUT:g} s each, "
        f"at last with {reason}"
    )


def ask(url: str, body: bytes) -> bytes:
    """Return the body of a server's answer to a POST. No proxy is used, which could not reach a
    loopback address, and no redirect is followed. Raises an error if there is none."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = HTTPConnection(host, timeout=TIMEOUT)
    connection.connect()
    # A server can send a byte at a time for ever: then this ends the reading.
    timer = threading.Timer(TIMEOUT, connection.sock.shutdown, [SHUT_RDWR])
    timer.start()
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/{path}", body, headers)
        response = connection.getresponse()
        answer = response.read(MAX_BYTES + 1)
    finally:
        timer.cancel()
        connection.close()
    if response.status != 200 or len(answer) > MAX_BYTES:
        raise OSError(f"status {response.status}: {answer[:300]!r}")
    return answer
