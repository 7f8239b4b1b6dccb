"""Encode queries and passages as unit vectors: a transformer (E5, as in appendix D, "NQ Search"), or hashed words,
which are ours. They match words and parts of words, not meanings, and need no download."""

import re
import zlib
from pathlib import Path

import numpy as np

BATCH = 64  # texts per forward pass of a transformer
TITLE, TRIGRAM = 4.0, 0.25  # hashed words: weights of the words of a passage's title (its first line), and of trigrams


class LocalEncoder:
    """Hash words and letter trigrams with a sign into `dimension` places, weighted by idf over the corpus."""

    def __init__(self, corpus: list[str], dimension: int = 2048):
        self.dimension = dimension
        documents = sum(self._terms(contents) != 0 for contents in corpus)  # number of those that have a term there
        self.idf = np.log((1 + len(corpus)) / (1 + documents)) + 1

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]; zeros for a text without words."""
        split = [text.partition("\n")[::2] for text in texts]
        terms = [(TITLE if passages else 1.0) * self._terms(title) + self._terms(body) for title, body in split]
        vectors = self.idf * np.array(terms).reshape(len(texts), self.dimension)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return (vectors / np.where(norms > 0, norms, 1)).astype(np.float32)

    def _terms(self, text: str) -> np.ndarray:
        """Return the signed number of words and trigrams in each place, float64 [dimension]."""
        counts = np.zeros(self.dimension)
        for word in re.findall(r"\w+", text.lower()):
            for term, share in [(word, 1.0), *((f"#{word}#"[k : k + 3], TRIGRAM) for k in range(len(word)))]:
                digest = zlib.crc32(term.encode("utf-8", "replace"))
                counts[digest % self.dimension] += share if digest >> 31 else -share
        return counts


class TransformerEncoder:
    """Average the last hidden states over a text's own tokens and normalise, as E5 and all-MiniLM do. A model with "e5"
    in its name gets E5's prefixes, as in Search-R1. Raises ValueError if no model can be loaded."""

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
        longest = min(512, self.model.config.max_position_embeddings)  # tokens; the rest of a text is cut off
        self.options = {"padding": True, "truncation": True, "max_length": longest, "return_tensors": "pt"}

    def encode(self, texts: list[str], passages: bool = False) -> np.ndarray:
        """Return unit vectors of queries or of passages, float32 [n, dimension]."""
        import torch

        vectors = []
        for k in range(0, len(texts), BATCH):
            batch = [self.prefixes[passages] + text for text in texts[k : k + BATCH]]
            tokens = self.tokenizer(batch, **self.options).to(self.device)
            with torch.no_grad():
                hidden = self.model(**tokens).last_hidden_state  # [n, T, dimension]
            own = tokens["attention_mask"][..., None]  # [n, T, 1], 0 at padding
            mean = (hidden * own).sum(1) / own.sum(1)
            vectors.append(torch.nn.functional.normalize(mean.float(), dim=-1).cpu().numpy())
        return np.concatenate(vectors)
