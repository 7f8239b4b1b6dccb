"""Encode queries and passages as unit vectors: a transformer (E5, as in appendix D, "NQ Search"), or hashed words.

The hashed words are ours. They match words and parts of words, not meanings, and need no download.
"""

import re
import zlib
from pathlib import Path

import numpy as np

BATCH = 64  # texts per forward pass of a transformer


class LocalEncoder:
    """Hash words and letter trigrams with a sign into `dimension` places, weighted by idf over the corpus.

    Words of a passage's title (its first line) count `TITLE` times, trigrams count `TRIGRAM`. Nothing is learned.
    """

    TITLE, TRIGRAM = 4.0, 0.25

    def __init__(self, corpus: list[str], dimension: int = 2048):
        self.dimension = dimension
        documents = sum(self._terms(contents) != 0 for contents in corpus)  # number of those that have a term there
        self.idf = np.log((1 + len(corpus)) / (1 + documents)) + 1

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]; zeros for a text without words."""
        vectors = np.zeros((len(texts), self.dimension))
        for vector, text in zip(vectors, texts, strict=True):
            title, _, body = text.partition("\n")
            vector += self.idf * ((self.TITLE if passages else 1.0) * self._terms(title) + self._terms(body))
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _terms(self, text: str) -> np.ndarray:
        """Return the signed number of words and trigrams in each place, float64 [dimension]."""
        counts = np.zeros(self.dimension)
        for word in re.findall(r"\w+", text.lower()):
            trigrams = [(f"#{word}#"[k : k + 3], self.TRIGRAM) for k in range(len(word))]
            for term, share in [(word, 1.0), *trigrams]:
                digest = zlib.crc32(term.encode("utf-8", "replace"))
                counts[digest % self.dimension] += share if digest >> 31 else -share
        return counts


class TransformerEncoder:
    """Average the last hidden states over a text's own tokens and normalise, as E5 and all-MiniLM do.

    E5 was trained with prefixes that tell queries from passages (Wang et al. 2022). As in Search-R1, a model gets them
    if its name (the last part of a hub id or of a folder) contains "e5". Raises ValueError if no model can be loaded.
    """

    def __init__(self, name: str):
        import torch  # imported here, because the local encoder needs neither
        from transformers import AutoModel, AutoTokenizer

        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(name)
            self.model = AutoModel.from_pretrained(name, use_safetensors=True).to(self.device).eval()
        except (OSError, ValueError) as error:
            raise ValueError(f"--encoder is {name}, but no model could be loaded from there") from error
        self.prefixes = ("query: ", "passage: ") if "e5" in Path(name).name.lower() else ("", "")
        self.dimension = self.model.config.hidden_size
        self.longest = min(512, self.model.config.max_position_embeddings)  # tokens; the rest of a text is cut off

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]."""
        import torch

        vectors = []
        options = {"padding": True, "truncation": True, "max_length": self.longest, "return_tensors": "pt"}
        for k in range(0, len(texts), BATCH):
            batch = [self.prefixes[passages] + text for text in texts[k : k + BATCH]]
            tokens = self.tokenizer(batch, **options).to(self.device)
            with torch.no_grad():
                hidden = self.model(**tokens).last_hidden_state  # [n, T, dimension]
            own = tokens["attention_mask"][..., None]  # [n, T, 1], 0 at padding
            mean = (hidden * own).sum(1) / own.sum(1)
            vectors.append(torch.nn.functional.normalize(mean.float(), dim=-1).cpu().numpy())
        return np.concatenate(vectors)
