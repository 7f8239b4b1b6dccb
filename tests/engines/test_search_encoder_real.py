"""The search server's encoder with real weights: all-MiniLM-L6-v2, a BERT with mean pooling like
E5, from a package."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from pretrained import minilm
from transformers import AutoTokenizer, BertModel

from envs.search import Retriever, TransformerEncoder, retrieve
from envs.search_server import serving

TEXTS = ["a text", "the largest planet of them all, with a spot", "x", "mars " * 600]


@pytest.mark.parametrize("prefixes", [("", ""), ("query: ", "passage: ")])
def test_vectors_are_normalised_means_over_a_text_s_own_tokens(prefixes):
    """In padded batches, against a plain forward pass of one text at a time in float64."""
    folder = minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).double().eval()
    encoder = TransformerEncoder(str(folder), prefixes=any(prefixes))

    for passages, prefix in zip((False, True), prefixes, strict=True):
        # A batch holds 64 texts.
        vectors = encoder.encode(["a text"] * 63 + TEXTS, passages)[63:]
        for vector, text in zip(vectors, TEXTS, strict=True):
            tokens = tokenizer(prefix + text, truncation=True, max_length=512, return_tensors="pt")
            with torch.no_grad():
                mean = model(**tokens).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


# A passage about a town, and a query that it answers.
FACTS = [
    ("{}\nIts {} bridge over the river was built by the {}s.", "who made the bridge of {}?"),
    ("{}\nEvery winter its market is lit with {} lanterns by the {}s.", "lights of {} in December"),
    ("{}\nThe mayor wears a {} hat and was once a {}.", "what did the head of {} work as"),
    (
        "{}\nAn old song tells of a {} dog and a {} who fell into the well.",
        "animal in a song from {}",
    ),
]
NAMES = (
    "Ar Brin Cas Dun Est Fal Gor Hol Ilm Kes".split(),
    "a er il om u".split(),
    "dale ford ham ton wick".split(),
)
COLOURS, TRADES = (
    "red blue green white yellow golden black".split(),
    "baker weaver miner sailor farmer".split(),
)


def test_the_three_best_of_1000_passages_are_those_of_exact_cosines():
    """Recall@3 of 50 queries over HTTP, of eight clients at once, is 1.0: padded batches and FAISS
    against plain passes and cosines in float64."""
    folder = minilm()
    passages = []
    queries = []
    answers = []
    for k, (*syllables, (passage, query)) in enumerate(itertools.product(*NAMES, FACTS)):
        town = "".join(syllables)
        passages.append(passage.format(town, COLOURS[k % 7], TRADES[k % 5]))
        # Each kind of fact is asked for in turn.
        if k % 20 == k // 20 % 4:
            queries.append(query.format(town))
            answers.append(passages[-1])
    assert (len(set(passages)), len(queries)) == (1000, 50)

    retriever = Retriever(passages, TransformerEncoder(str(folder), prefixes=False))
    with serving(retriever) as url, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda query: retrieve(url, [query], 3)[0], queries))

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).eval()
    texts = tokenizer([*passages, *queries])["input_ids"]
    vectors = np.zeros((1050, 384))
    # Texts of equal lengths need no padding.
    for length in set(map(len, texts)):
        rows = [k for k, text in enumerate(texts) if len(text) == length]
        with torch.no_grad():
            vectors[rows] = model(torch.tensor([texts[k] for k in rows])).last_hidden_state.mean(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    best = np.argsort(-vectors[1000:] @ vectors[:1000].T)[:, :3]

    assert results == np.array(passages)[best].tolist()
    pairs = zip(answers, results, strict=True)
    assert np.mean([answer in three for answer, three in pairs]) > 0.9
