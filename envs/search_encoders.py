"""What turns queries and passages into unit vectors: E5, as in the paper, and a small encoder that needs no download.

Paper: appendix D, "NQ Search" (E5 embeddings).

Where we differ: `LocalEncoder` is ours. It matches words and parts of words, not meanings; it is there so that the
task, its tests and the tiny model run anywhere.
"""

import re
import zlib
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Protocol

import numpy as np


class Encoder(Protocol):
    """Texts to unit vectors, float32 [n, dimension]."""

    dimension: int

    def queries(self, texts: list[str]) -> np.ndarray: ...

    def passages(self, texts: list[str]) -> np.ndarray: ...


class LocalEncoder:
    """Words and letter trigrams, hashed with a sign into `dimension` places and weighted by idf over the corpus.
    Words of a passage's title count `TITLE` times. The same on any machine; nothing is learnt."""

    TITLE, TRIGRAM = 4.0, 0.25

    def __init__(self, corpus: Iterable[str], dimension: int = 2048):
        self.dimension = dimension
        n, documents = 0, np.zeros(dimension)  # in how many of n a place occurs
        for contents in corpus:
            n += 1
            documents[list({_place(term, dimension)[0] for term, _ in _terms(contents)})] += 1
        self.idf = np.log((1 + n) / (1 + documents)) + 1

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._encode([[(text, 1.0)] for text in texts])

    def passages(self, texts: list[str]) -> np.ndarray:
        split = (text.partition("\n") for text in texts)
        return self._encode([[(title, self.TITLE), (body, 1.0)] for title, _, body in split])

    def _encode(self, texts: list[list[tuple[str, float]]]) -> np.ndarray:
        vectors = np.zeros((len(texts), self.dimension))
        for vector, fields in zip(vectors, texts, strict=True):
            for text, weight in fields:
                for term, share in _terms(text):
                    place, sign = _place(term, self.dimension)
                    vector[place] += sign * weight * share
        vectors *= self.idf
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)


def _terms(text: str) -> Iterator[tuple[str, float]]:
    for word in re.findall(r"\w+", text.lower()):
        yield word, 1.0
        padded = f"#{word}#"
        for k in range(len(padded) - 2):
            yield padded[k : k + 3], LocalEncoder.TRIGRAM


@lru_cache(maxsize=1 << 16)
def _place(term: str, dimension: int) -> tuple[int, float]:
    digest = zlib.crc32(term.encode("utf-8", "replace"))
    return digest % dimension, 1.0 if digest >> 31 else -1.0


class E5Encoder:
    """E5 (Wang et al. 2022): a prefix that says query or passage, the mean of the last hidden states over the text's
    own tokens, normalised. `name` is a hub id or a folder; raises OSError where there is no model."""

    def __init__(self, name: str):
        import torch  # not at the head: the local encoder needs neither
        from transformers import AutoModel, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.model = AutoModel.from_pretrained(name, use_safetensors=True).to(self.device).eval()  # nothing pickled
        self.dimension = self.model.config.hidden_size
        self.longest = min(512, self.model.config.max_position_embeddings)

    def queries(self, texts: list[str]) -> np.ndarray:
        return self._encode([f"query: {text}" for text in texts])

    def passages(self, texts: list[str]) -> np.ndarray:
        return self._encode([f"passage: {text}" for text in texts])

    def _encode(self, texts: list[str], batch: int = 64) -> np.ndarray:
        import torch

        vectors = []
        for k in range(0, len(texts), batch):
            options = {"padding": True, "truncation": True, "max_length": self.longest, "return_tensors": "pt"}
            tokens = self.tokenizer(texts[k : k + batch], **options).to(self.device)
            with torch.no_grad():
                hidden = self.model(**tokens).last_hidden_state  # [n, T, dimension]
            own = tokens["attention_mask"][..., None]  # [n, T, 1]: 0 where padded
            mean = (hidden * own).sum(1) / own.sum(1)
            vectors.append(torch.nn.functional.normalize(mean.float(), dim=-1).cpu().numpy())
        return np.concatenate(vectors)


def load_encoder(name: str, corpus: Iterable[str]) -> Encoder:
    """The encoder behind --encoder; the local one counts words in the contents of `corpus`. Raises ValueError where
    there is no model of that name."""
    if name == "local":
        return LocalEncoder(corpus)
    try:
        return E5Encoder(name)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--encoder is {name}, but no model could be loaded from there: {reason}") from error
