"""examples/search_server.py with real weights: all-MiniLM-L6-v2, a BERT with mean pooling like E5,
from a package."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import torch
from conftest import write_rows
from pretrained import minilm
from transformers import AutoTokenizer, BertModel

from envs import search

TEXTS = [f"Town {k}\nIts bridge has {k} arches." for k in range(200)]


def vectors_of(texts):
    """Return normalised means over each text's own tokens, by plain forward passes in float64."""
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    model = BertModel.from_pretrained(minilm()).double().eval()
    vectors = []
    for text in texts:
        with torch.no_grad():
            mean = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        vectors.append((mean / mean.norm()).numpy())
    return np.array(vectors)


def test_the_first_start_builds_the_index_and_the_second_reads_it(tmp_path):
    """Several clients at once get the passages that brute force finds, with their cosines."""
    corpus = write_rows(tmp_path / "c.jsonl", [{"contents": text} for text in TEXTS])
    index = tmp_path / "c.faiss"
    program = Path(__file__).parents[2] / "examples/search_server.py"
    server = [sys.executable, str(program), corpus, str(index)]
    queries = [f"How many arches has the bridge of town {k}?" for k in range(20)]
    products = vectors_of([f"query: {query}" for query in queries])
    products = products @ vectors_of([f"passage: {text}" for text in TEXTS]).T

    built = set()
    for port in ("8123", "8124"):
        options = ["--model", str(minilm()), "--port", port]
        with subprocess.Popen([*server, *options], stderr=subprocess.PIPE, text=True) as process:
            line = next(line for line in process.stderr if "running on" in line)
            url = re.search(r"http://127\.0\.0\.1:\d+", line)[0] + "/retrieve"
            with ThreadPoolExecutor(8) as pool:
                lists = [[query] for query in queries]
                found = list(pool.map(partial(search.retrieve, url, topk=3), lists))
            body = json.dumps({"queries": queries, "topk": 1}).encode()
            hits = json.loads(search.ask(url, body))["result"]
            process.terminate()
        built.add(index.stat().st_mtime_ns)

        best = np.argsort(-products, axis=1)[:, :3]
        assert [passages for [passages] in found] == np.array(TEXTS)[best].tolist()
        scores = [hit["score"] for [hit] in hits]
        np.testing.assert_allclose(scores, products.max(1), atol=1e-5)
    assert len(built) == 1
