"""Search passages: with FAISS in this process, or by asking a server.

Paper: appendix D, "NQ Search" ("Retrieved documents are provided via a FAISS index with E5
embeddings", three passages a query). examples/search_server.py is such a server. Generated articles
are searched here instead, by hashed words, which need no download (ours).
"""

import contextlib
import json
import re
import time
import zlib
from http.client import HTTPConnection

import numpy as np

from envs.base import UserError

# Weights of a hashed word in a passage's title (its first line) and of a trigram, where any other
# word counts 1
TITLE = 4.0
TRIGRAM = 0.25
DIMENSION = 2048  # places of hashed words

# Client: its attempts, the seconds for which it waits for the next bytes of an answer, and the
# seconds before the second attempt (twice as many before the third).
ATTEMPTS = 3
TIMEOUT = 30.0
PAUSE = 0.5
MAX_TEXT = 2000  # characters of a passage or a query; Wikipedia's passages have about 600


class SearchError(UserError, ConnectionError):
    """The search server failed."""


class Retriever:
    """Search passages with an exact FAISS index of words and letter trigrams: hashed with a sign
    into DIMENSION places, and weighted by idf over the corpus."""

    def __init__(self, corpus: list[str]):
        import faiss  # takes a quarter of a second, and other tasks do without

        self.corpus = np.array(corpus, dtype=object)
        documents = sum(terms_of(contents) != 0 for contents in corpus)  # [DIMENSION]
        self.idf = np.log((1 + len(corpus)) / (1 + documents)) + 1
        self.index = faiss.IndexFlatIP(DIMENSION)
        self.index.add(self.encode(corpus, passages=True))

    def search(self, queries: list[str], topk: int) -> list[list[str]]:
        """Return the `topk` best passages of each query, best first."""
        _, positions = self.index.search(self.encode(queries), topk)
        return self.corpus[positions].tolist()

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, DIMENSION]. A text without
        words gets zeros."""
        title_weight = TITLE if passages else 1.0
        terms = []
        for text in texts:
            title, _, body = text.partition("\n")
            terms.append(title_weight * terms_of(title) + terms_of(body))

        vectors = self.idf * terms
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.maximum(norms, 1e-12)).astype(np.float32)


def terms_of(text: str) -> np.ndarray:
    """Return the signed number of words and trigrams in each place, float64 [DIMENSION]."""
    counts = np.zeros(DIMENSION)
    for word in re.findall(r"\w+", text.lower()):
        framed = f"#{word}#"
        trigrams = [framed[k : k + 3] for k in range(len(word))]

        for term in [word, *trigrams]:
            weight = 1.0 if term is word else TRIGRAM
            digest = zlib.crc32(term.encode())
            counts[digest % DIMENSION] += weight if digest >> 31 else -weight

    return counts


def harmless(text: str) -> str:
    """Return the beginning of a foreign text, without angle brackets, so that it holds no tag."""
    return text[:MAX_TEXT].replace("<", "‹").replace(">", "›")


def retrieve(url: str, queries: list[str], topk: int) -> list[list[str]]:
    """Ask a server for the `topk` best passages ("Title\\ntext") of each query, best first, without
    angle brackets. Raises SearchError if ATTEMPTS fail: an answer is not there in time, or does
    not follow Search-R1's protocol (examples/search_server.py)."""
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
    with contextlib.closing(HTTPConnection(host, timeout=TIMEOUT)) as connection:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/{path}", body, headers)
        response = connection.getresponse()
        answer = response.read()
    if response.status != 200:
        raise OSError(f"status {response.status}: {answer[:300]!r}")
    return answer
