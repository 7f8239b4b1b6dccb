"""What the search of a rollout costs: a batch of 128 queries on the 2,560 generated articles of training, top 3.

Paper: section 1 (thousands of retrieval calls per iteration); appendix D, "NQ Search".

Median milliseconds over rounds in which the rows take turns, after a warm-up: first the time that passed, then the
processor time of all threads, which is the one to trust on a busy machine. All rows answer the same queries (names, as
a policy writes them) and must return the same passages:

- in process: what a rollout on generated questions calls, encoding and FAISS.
- HTTP: what a rollout with --search_url calls, against a server in this process. JSON both ways, encoding, FAISS.
- HTTP, one by one: 128 requests of one query each, which is what a rollout without batches would send.
- FAISS: `IndexFlatIP.search` on encoded queries. numpy: all inner products and `argpartition`. A ratio above 1:
  FAISS is slower.

    OMP_NUM_THREADS=1 python benchmarks/search.py        fifteen seconds
"""

import sys
import threading
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from envs import synthetic_wiki
from envs.search_server import SearchServer, retrieve

BATCH, TOPK, ROUNDS, ALONE_ROUNDS = 128, 3, 50, 5
MILLISECONDS = 100.0  # target of a batch over HTTP


def brute_force(queries: np.ndarray, passages: np.ndarray, topk: int) -> np.ndarray:
    """Return the numbers of the `topk` best passages of each query, best first."""
    scores = queries @ passages.T
    best = np.argpartition(-scores, topk, axis=1)[:, :topk]
    return np.take_along_axis(best, np.argsort(-np.take_along_axis(scores, best, 1), axis=1), 1)


def main() -> int:
    people = list(synthetic_wiki.facts("train"))
    retriever = synthetic_wiki.retriever("train")
    articles, encoder, index = retriever.corpus, retriever.encoder, retriever.index
    passages = encoder.encode(articles, passages=True)
    server = SearchServer(retriever)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    rng, seconds = np.random.default_rng(0), {}  # name: [(passed, worked)]

    def timed(name, action):
        began = time.perf_counter(), time.process_time()
        result = action()
        seconds.setdefault(name, []).append(
            (time.perf_counter() - began[0], time.process_time() - began[1])
        )
        return result

    for k in range(ROUNDS):
        batch = [people[i] for i in rng.integers(len(people), size=BATCH)]
        vectors = timed("encode", lambda batch=batch: encoder.encode(batch))
        found = timed("HTTP", lambda batch=batch: retrieve(server.url, batch, TOPK))
        inside = timed(
            "in process", lambda batch=batch: synthetic_wiki.search("train", batch, TOPK)
        )
        rows = timed("FAISS", lambda vectors=vectors: index.search(vectors, TOPK)[1])
        exact = timed("numpy", lambda vectors=vectors: brute_force(vectors, passages, TOPK))
        if k < ALONE_ROUNDS:
            singles = timed(
                "HTTP, one by one",
                lambda batch=batch: [retrieve(server.url, [q], TOPK)[0] for q in batch],
            )
            assert singles == found
        assert found == inside == [[articles[i] for i in row] for row in rows]
        assert rows.tolist() == exact.tolist()
    ms = {name: 1e3 * np.median(values[1:], axis=0) for name, values in seconds.items()}
    batch, alone = ms["HTTP"], ms["HTTP, one by one"]
    print(
        f"{BATCH} queries, {len(articles)} passages of {encoder.dimension} numbers, top {TOPK}; milliseconds"
    )
    for name in ("in process", "HTTP", "HTTP, one by one", "encode", "FAISS", "numpy"):
        print(f"  {name:18}{ms[name][0]:9.2f}{ms[name][1]:9.2f}")
    ratios = [*ms["FAISS"] / ms["numpy"], *alone / batch]
    print("  FAISS / numpy {:.2f} and {:.2f}; one by one / batch {:.1f} and {:.1f}".format(*ratios))
    verdict = "met" if batch[0] < MILLISECONDS else "missed in time passed"
    print(f"  target of a batch over HTTP: {MILLISECONDS:g} ms, {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
