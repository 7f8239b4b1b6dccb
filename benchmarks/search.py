"""What the search of a rollout costs: a batch of 128 queries on the 3,328 generated articles of
training, top 3.

Paper: section 1 (thousands of retrieval calls per iteration); appendix D, "NQ Search".

Median milliseconds over rounds in which the rows take turns, after a warm-up: first the time that
passed, then the processor time of all threads, which is the one to trust on a busy machine. All
rows answer the same queries (names, as a policy writes them) and must return the same passages:

- in process: what a rollout on generated questions calls, encoding and FAISS.
- HTTP: what a rollout with --search_url calls, against a server in this process. JSON both ways,
  encoding, FAISS.
- HTTP, one by one: 128 requests of one query each, which is what a rollout without batches would
  send.
- FAISS: `IndexFlatIP.search` on encoded queries. numpy: all inner products and `argpartition`. A
  ratio above 1: FAISS is slower.

    OMP_NUM_THREADS=1 python benchmarks/search.py        fifteen seconds
"""

import sys
import time

import common
import numpy as np

from envs import synthetic_wiki
from envs.search import retrieve
from envs.search_server import serving

BATCH = 128
TOPK = 3
ROUNDS = 50
ALONE_ROUNDS = 5
TARGET = 100.0  # milliseconds of a batch over HTTP


def brute_force(queries: np.ndarray, passages: np.ndarray) -> np.ndarray:
    """Return the numbers of the TOPK best passages of each query, best first."""
    scores = queries @ passages.T
    best = np.argpartition(-scores, TOPK, axis=1)[:, :TOPK]
    order = np.argsort(-np.take_along_axis(scores, best, 1), axis=1)
    return np.take_along_axis(best, order, 1)


def main() -> int:
    with serving(synthetic_wiki.retriever("train")) as url:
        seconds = measure(url)

    ms = {name: 1e3 * np.median(values[1:], axis=0) for name, values in seconds.items()}
    print(f"{BATCH} queries, top {TOPK}; milliseconds")
    for name in ("in process", "HTTP", "HTTP, one by one", "encode", "FAISS", "numpy"):
        print(f"  {name:18}{ms[name][0]:9.2f}{ms[name][1]:9.2f}")

    faiss = ms["FAISS"] / ms["numpy"]
    alone = ms["HTTP, one by one"] / ms["HTTP"]
    print(f"  FAISS / numpy {faiss[0]:.2f} and {faiss[1]:.2f}; ", end="")
    print(f"one by one / batch {alone[0]:.1f} and {alone[1]:.1f}")
    passed = ms["HTTP"][0]
    common.print_verdict(passed < TARGET, f"a batch over HTTP: {passed:.0f} < {TARGET:g} ms")
    return 0


def measure(url: str) -> dict[str, list]:
    """Return the seconds of each row in each round, [(passed, worked)]."""
    people = list(synthetic_wiki.facts("train"))
    retriever = synthetic_wiki.retriever("train")
    encoder = retriever.encoder
    passages = encoder.encode(retriever.corpus, passages=True)
    seconds: dict[str, list] = {}

    def timed(name, function, *arguments):
        passed = time.perf_counter()
        worked = time.process_time()
        result = function(*arguments)
        row = (time.perf_counter() - passed, time.process_time() - worked)
        seconds.setdefault(name, []).append(row)
        return result

    def one_by_one(queries):
        return [retrieve(url, [query], TOPK)[0] for query in queries]

    rng = np.random.default_rng(0)
    for k in range(ROUNDS):
        queries = [people[i] for i in rng.integers(len(people), size=BATCH)]
        vectors = timed("encode", encoder.encode, queries)
        remote = timed("HTTP", retrieve, url, queries, TOPK)
        local = timed("in process", synthetic_wiki.search, "train", queries, TOPK)
        positions = timed("FAISS", retriever.index.search, vectors, TOPK)[1]
        exact = timed("numpy", brute_force, vectors, passages)

        assert remote == local
        for hits, row in zip(remote, positions, strict=True):
            assert hits == [retriever.corpus[i] for i in row]
        assert positions.tolist() == exact.tolist()
        if k < ALONE_ROUNDS:
            assert timed("HTTP, one by one", one_by_one, queries) == remote
    return seconds


if __name__ == "__main__":
    sys.exit(main())
