"""The search server's encoder with real weights: all-MiniLM-L6-v2, a BERT with mean pooling like
E5, from a package."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from conftest import serving
from pretrained import minilm
from transformers import AutoTokenizer, BertModel

from envs.search import Retriever, TransformerEncoder, retrieve

TEXTS = ["a text", "the largest planet of them all, with a spot", "x", "mars " * 600]


@pytest.mark.parametrize("prefixes", [("", ""), ("query: ", "passage: ")])
def test_vectors_are_normalised_means_over_a_text_s_own_tokens(prefixes):
    """In padded batches, against a plain forward pass of one text at a time in float64."""
    folder = minilm()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = BertModel.from_pretrained(folder).double().eval()
    encoder = TransformerEncoder(str(folder), prefixes=any(prefixes))

    for passages, prefix in zip((False, True), prefixes, strict=True):
        # A batch holds 32 texts.
        vectors = encoder.encode(["a text"] * 31 + TEXTS, passages)[31:]
        for vector, text in zip(vectors, TEXTS, strict=True):
            # The package's own limit, which its maker has trained with.
            tokens = tokenizer(prefix + text, truncation=True, max_length=256, return_tensors="pt")
            with torch.no_grad():
                mean = model(**tokens).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)


def test_several_clients_at_once_get_the_best_passages():
    """The query is the passage. The server encodes in a thread per client."""
    passages = [f"Town {k}\nIts bridge has {k} arches." for k in range(200)]
    retriever = Retriever(passages, TransformerEncoder(str(minilm()), prefixes=False))
    with serving(retriever) as url, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda passage: retrieve(url, [passage], 1)[0], passages))
    assert results == [[passage] for passage in passages]
