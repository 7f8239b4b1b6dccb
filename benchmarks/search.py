"""What the search of a rollout costs: a batch of 128 queries on the generated encyclopaedia, top 3.

Paper: section 1 (thousands of retrieval calls an iteration); appendix D, "NQ Search".

Median milliseconds over rounds in which the rows take turns, after a warm-up; on the left what passed, on the right
what the processor worked (all threads), which is the one to trust on a busy machine. All rows answer the same
queries, of names as a policy would write them, and must return the same passages:

- HTTP: `retrieve` against the server in this process, as a rollout calls it: JSON both ways, encoding, FAISS.
- HTTP, one by one: 128 requests of one query each, which is what a rollout without batches would send.
- FAISS: `IndexFlatIP.search` on encoded queries. numpy: all inner products and `argpartition`. A ratio above 1:
  FAISS is slower.

    OMP_NUM_THREADS=1 python benchmarks/search.py        ten seconds
"""

import sys
import time
from pathlib import Path

import faiss
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import encyclopaedia
from envs.search_client import retrieve
from envs.search_encoders import LocalEncoder

BATCH, TOPK, ROUNDS, ALONE_ROUNDS = 128, 3, 50, 5
MILLISECONDS = 100.0  # target of a batch over HTTP


def brute_force(queries: np.ndarray, passages: np.ndarray, topk: int) -> np.ndarray:
    """Numbers of the `topk` best passages of each query, best first."""
    scores = queries @ passages.T
    best = np.argpartition(-scores, topk, axis=1)[:, :topk]
    return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)


def main() -> int:
    people = list(encyclopaedia.facts())
    articles = [encyclopaedia.article(person) for person in people]
    url, encoder = encyclopaedia.server_url(), LocalEncoder(articles)
    passages = encoder.passages(articles)
    index = faiss.IndexFlatIP(encoder.dimension)
    index.add(passages)
    rng, seconds = np.random.default_rng(0), {}  # name: [(passed, worked)]

    def timed(name, action):
        began = time.perf_counter(), time.process_time()
        result = action()
        seconds.setdefault(name, []).append((time.perf_counter() - began[0], time.process_time() - began[1]))
        return result

    for k in range(ROUNDS):
        batch = [people[i] for i in rng.integers(len(people), size=BATCH)]
        vectors = timed("encode", lambda batch=batch: encoder.queries(batch))
        found = timed("HTTP", lambda batch=batch: retrieve(url, batch, TOPK))
        rows = timed("FAISS", lambda vectors=vectors: index.search(vectors, TOPK)[1])
        exact = timed("numpy", lambda vectors=vectors: brute_force(vectors, passages, TOPK))
        if k < ALONE_ROUNDS:
            singles = timed("HTTP, one by one", lambda batch=batch: [retrieve(url, [q], TOPK)[0] for q in batch])
            assert singles == found
        assert found == [[articles[i] for i in row] for row in rows]
        assert rows.tolist() == exact.tolist()
    ms = {name: 1e3 * np.median(values[1:], axis=0) for name, values in seconds.items()}
    batch, alone = ms["HTTP"], ms["HTTP, one by one"]
    print(f"{BATCH} queries, {len(articles)} passages of {encoder.dimension} numbers, top {TOPK}; milliseconds")
    for name in ("HTTP", "HTTP, one by one", "encode", "FAISS", "numpy"):
        print(f"  {name:18}{ms[name][0]:9.2f}{ms[name][1]:9.2f}")
    ratios = [*ms["FAISS"] / ms["numpy"], *alone / batch]
    print("  FAISS / numpy {:.2f} and {:.2f}; one by one / batch {:.1f} and {:.1f}".format(*ratios))
    verdict = "met" if batch[0] < MILLISECONDS else "missed in time passed"
    print(f"  target of a batch over HTTP: {MILLISECONDS:g} ms, {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
