"""The search server's encoder with real weights: all-MiniLM-L6-v2, a BERT with mean pooling like E5, from a package."""

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from pretrained import minilm
from transformers import AutoTokenizer, BertModel

from envs.search_server import Retriever, SearchServer, TransformerEncoder, retrieve


def test_vectors_are_the_normalised_mean_over_a_text_s_own_tokens_and_only_e5_has_prefixes(
    tmp_path,
):
    """In padded batches, against a plain forward pass of one text at a time in float64."""
    (tmp_path / "e5-small").symlink_to(folder := minilm())
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        BertModel.from_pretrained(folder).double().eval(),
    )
    texts = ["a text"] * 64 + [
        "the largest planet of them all, with a spot",
        "x",
        "mars " * 600,
    ]  # more than a batch
    for name, prefixes in ((folder, ("", "")), (tmp_path / "e5-small", ("query: ", "passage: "))):
        encoder = TransformerEncoder(str(name))
        for passages, prefix in enumerate(prefixes):
            for vector, text in list(
                zip(encoder.encode(texts, bool(passages)), texts, strict=True)
            )[-4:]:
                tokens = tokenizer(
                    prefix + text, truncation=True, max_length=512, return_tensors="pt"
                )
                with torch.no_grad():
                    mean = model(**tokens).last_hidden_state[0].mean(0)
                np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


FACTS = [  # a passage about a town, and a query that it answers
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
    """Recall@3 of 50 queries over HTTP, of eight clients at once, is 1.0: padded batches and FAISS against plain passes
    and cosines in float64."""
    folder, passages, queries, answers = minilm(), [], [], []
    for k, (*syllables, (passage, query)) in enumerate(itertools.product(*NAMES, FACTS)):
        town = "".join(syllables)
        passages.append(passage.format(town, COLOURS[k % 7], TRADES[k % 5]))
        if k % 20 == k // 20 % 4:  # each kind of fact in turn
            queries.append(query.format(town))
            answers.append(passages[-1])
    assert (len(set(passages)), len(queries)) == (1000, 50)
    with (
        SearchServer(Retriever(passages, TransformerEncoder(str(folder)))) as server,
        ThreadPoolExecutor(8) as pool,
    ):
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = [
            row for (row,) in pool.map(lambda query: retrieve(server.url, [query], 3), queries)
        ]
        server.shutdown()
    tokenizer, model = (
        AutoTokenizer.from_pretrained(folder),
        BertModel.from_pretrained(folder).eval(),
    )
    texts, vectors = tokenizer([*passages, *queries])["input_ids"], np.zeros((1050, 384))
    for length in set(map(len, texts)):  # texts of equal lengths need no padding
        rows = [k for k, text in enumerate(texts) if len(text) == length]
        with torch.no_grad():
            vectors[rows] = model(torch.tensor([texts[k] for k in rows])).last_hidden_state.mean(1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    best = np.argsort(-vectors[1000:] @ vectors[:1000].T)[:, :3]
    assert found == [[passages[k] for k in row] for row in best]
    assert np.mean([answer in three for answer, three in zip(answers, found, strict=True)]) > 0.9
