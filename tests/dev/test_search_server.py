"""The retrieval server and its client: FAISS and tf-idf against slow oracles, the protocol,
failures."""

import contextlib
import http.server
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import serving, write_rows
from sklearn.feature_extraction.text import TfidfVectorizer

from envs import search, search_server
from envs.search import MAX_TEXT, LocalEncoder, Retriever, ask, build_index, retrieve

TEXTS = [
    "Mercury\nthe smallest planet, closest to the Sun",
    "Venus\nsecond planet from the Sun, hotter than Mercury",
    "Ceres\na dwarf planet between Mars and Jupiter",
    "Jupiter\nthe largest planet, with a great red spot",
    "Naïve café\nünïcode 水星 text",
    "Mars\n",
]
CORPUS = [{"contents": text} for text in TEXTS]


def test_faiss_finds_what_brute_force_finds():
    """Passages and scores of the index, built in several batches, against a float64 sort of all
    inner products."""
    encoder = LocalEncoder(TEXTS, dimension=64)
    numbers = np.random.default_rng(0).integers(1000, size=(2500, 9))
    texts = [" ".join(map(str, row)) for row in numbers]
    vectors = encoder.encode(texts, passages=True).astype(float)
    products = encoder.encode(texts[:40]) @ vectors.T
    passages, scores = Retriever(texts, encoder).search(texts[:40], topk=7)
    best = np.argsort(-products)[:, :7]
    assert passages == np.array(texts)[best].tolist()
    np.testing.assert_allclose(scores, np.take_along_axis(products, best, 1), atol=1e-5)


def test_an_index_is_of_its_passages_and_its_encoder():
    encoder = LocalEncoder(TEXTS, dimension=64)
    index = build_index(TEXTS, encoder)
    for corpus, other in ((TEXTS[:4], encoder), (TEXTS, LocalEncoder(TEXTS, dimension=32))):
        with pytest.raises(ValueError, match="has another corpus or encoder"):
            Retriever(corpus, other, index)


def test_the_local_encoder_is_tf_idf(monkeypatch):
    """Cosines against those of scikit-learn. With 2^18 places no words collide."""
    monkeypatch.setattr(search, "TRIGRAM", 0)
    *hashed, without_words = LocalEncoder(TEXTS, dimension=1 << 18).encode([*TEXTS, "?"])
    vectors = TfidfVectorizer(token_pattern=r"\w+").fit_transform(TEXTS).toarray()
    np.testing.assert_allclose(np.inner(hashed, hashed), vectors @ vectors.T, atol=1e-5)
    assert not without_words.any()


RETRIEVER = Retriever(TEXTS, LocalEncoder(TEXTS))


@pytest.fixture(scope="module")
def url():
    with serving(RETRIEVER) as url:
        yield url


def test_requests_as_search_r1_s_client_makes_them(url):
    """Its trainer posts an empty list in every step without a search, and reads `result`."""
    queries = ["largest planet", "Mars", "水星"]
    passages, scores = RETRIEVER.search(queries, 3)
    scored = []
    for row in zip(passages, scores):
        hits = [{"document": {"contents": text}, "score": score} for text, score in zip(*row)]
        scored.append(hits)
    documents = [[hit["document"] for hit in hits] for hits in scored]
    for request, result in (
        ({}, documents),
        ({"topk": 3, "return_scores": False}, documents),
        *(({"topk": topk, "return_scores": True}, scored) for topk in (3, None, 0)),
        ({"queries": []}, []),
    ):
        body = json.dumps({"queries": queries} | request).encode()
        assert json.loads(ask(url, body)) == {"result": result}

    assert retrieve(url, queries * 900, 3) == passages * 900  # 512 prompts of 5 replies each
    assert len(retrieve(url, ["sun"], 10)[0]) == len(TEXTS)
    # The paper's 128 queries, as long as can be, of characters that JSON writes longest.
    assert len(retrieve(url, ["🙂" * MAX_TEXT] * 128, 1)) == 128


def test_bad_and_unbounded_requests_are_refused_and_the_server_lives_on(url):
    bodies = [{}, {"queries": ["a", 3]}, {"queries": ["x" * 2**25]}, {"queries": ["a"] * 5000}]
    bodies += [{"queries": ["a"], "topk": topk} for topk in (-1, 1.5, 11, 10**400)]
    for body in (b"\xff\xfe", b"[" * 100_000, *map(str.encode, map(json.dumps, bodies))):
        with pytest.raises(OSError, match="status 4"):
            ask(url, body)
    assert retrieve(url, ["Mars"], 1) == [[TEXTS[5]]]


OK = b"HTTP/1.1 200 OK\r\n"
GOOD = b'\r\n{"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.5}]]}'
FAILURES = {  # what a server sends first, and what it then sends for ever
    "error": (b"HTTP/1.1 500 Error\r\n" + GOOD, b""),
    "redirect": (b"HTTP/1.1 307 Elsewhere\r\nLocation: /retrieve\r\n" + GOOD, b""),
    "no json": (OK + b"\r\n<html>", b""),
    "too few": (OK + b'\r\n{"result": []}', b""),
    "no text": (OK + GOOD.replace(b'"Title\\ntext"', b"7"), b""),
    "drips of a body": (OK + b"Content-Length: 99999\r\n\r\n", b"["),
    "drips of a header": (OK + b"X: ", b"x"),
    "an endless body": (OK + b"\r\n", b" " * (1 << 16)),
    "endless continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_request_that_fails_is_sent_again_and_given_up_after_three_attempts(failure, monkeypatch):
    """A limit of time and of bytes holds for the whole answer."""
    monkeypatch.setattr(search, "PAUSE", 0.01)
    monkeypatch.setattr(search, "TIMEOUT", 0.3)
    monkeypatch.setattr(search, "MAX_BYTES", 1 << 20)
    received = []

    class Failing(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            first, more = (OK + GOOD, b"") if len(received) == 2 else FAILURES[failure]
            self.wfile.write(first)
            with contextlib.suppress(OSError):
                while more:
                    self.wfile.write(more)
                    time.sleep(0.001)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Failing)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/retrieve"
    assert retrieve(url, ["a"], 3) == [["Title\ntext"]]
    began = time.monotonic()
    sentence = "failed 3 times, for up to 0.3 s each, at last with .{9}"
    with pytest.raises(ConnectionError, match=sentence):
        retrieve(url, ["a"], 3)
    assert time.monotonic() - began < 3
    assert received == [{"queries": ["a"], "topk": 3, "return_scores": True}] * 5
    server.shutdown()


def test_build_and_serve_from_the_command_line(tmp_path):
    """The first start builds the index, the second reads it. The corpus begins with a byte
    order mark and ends with empty lines."""
    corpus = Path(write_rows(tmp_path / "c.jsonl", CORPUS))
    corpus.write_bytes(b"\xef\xbb\xbf" + corpus.read_bytes() + b"\n \n")
    index = tmp_path / "c.faiss"
    command = [sys.executable, "-m", "envs.search_server", "--port=0"]
    command += [f"--corpus={corpus}", f"--index={index}"]
    built = set()
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            line = next(line for line in process.stderr if "running on" in line)
            url = re.search(r"http://[\d.:]+", line)[0] + "/retrieve"
            assert retrieve(url, TEXTS[:2], 1) == [[TEXTS[0]], [TEXTS[1]]]
            built.add(index.stat().st_mtime_ns)
            process.terminate()
    assert len(built) == 1


REFUSED = {  # arguments: a part of the error
    "--index c.jsonl": "not recognized",
    "--corpus bad.jsonl": "contents",
    "--corpus empty.jsonl": "--corpus is empty.jsonl, but must have a passage",
    # A folder's name does not say which model it holds.
    "--encoder models--intfloat--e5-base/snapshots/f5": "--prefixes must be given",
}


def test_what_cannot_be_served_is_refused_and_no_file_is_overwritten(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    corpus = Path(write_rows(Path("c.jsonl"), CORPUS))
    write_rows(Path("bad.jsonl"), [{"contents": "fine"}, {"text": "x"}])
    Path("empty.jsonl").write_text("\n \n")
    before = corpus.read_bytes()
    for arguments, sentence in REFUSED.items():
        with pytest.raises((Exception, SystemExit)) as error:
            search_server.main(f"--corpus c.jsonl --index c.faiss {arguments}".split())
        assert sentence in f"{error.value} {capsys.readouterr().err}"
    assert corpus.read_bytes() == before
