"""The retrieval server and its client: FAISS and tf-idf against slow oracles, the protocol,
failures."""

import contextlib
import http.client
import itertools
import json
import re
import socketserver
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from conftest import serving, write_rows

from envs import search, search_server
from envs.search import MAX_TEXT, LocalEncoder, Retriever, build_index, retrieve

TEXTS = [
    "Mercury\nthe smallest planet, closest to the Sun",
    "Venus\nsecond planet from the Sun, hotter than Mercury",
    "Ceres\na dwarf planet between Mars and Jupiter",
    "Jupiter\nthe largest planet, with a great red spot",
    "Naïve café\nünïcode 水星 text",
    "Mars\n",
]
CORPUS = [{"id": str(k), "contents": text} for k, text in enumerate(TEXTS)]


@pytest.mark.parametrize("n", [1, 2500])
def test_faiss_finds_what_brute_force_finds(n):
    """Passages and scores of the index, built in several batches, against a float64 sort of all
    inner products."""
    rng = np.random.default_rng(n)
    encoder = LocalEncoder(TEXTS, dimension=64)
    texts = [" ".join(map(str, rng.integers(1000, size=9))) for _ in range(n)]
    queries = texts[:: max(1, n // 40)]
    vectors = encoder.encode(texts, passages=True).astype(np.float64)
    products = encoder.encode(queries).astype(np.float64) @ vectors.T
    best = np.argsort(-products, axis=1)[:, :7]

    passages, scores = Retriever(texts, encoder).search(queries, topk=7)
    assert passages == np.array(texts)[best].tolist()
    scores = np.array(scores)[:, : best.shape[1]]
    np.testing.assert_allclose(scores, np.take_along_axis(products, best, 1), atol=1e-5)


def test_an_index_is_of_its_passages_and_its_encoder():
    encoder = LocalEncoder(TEXTS, dimension=64)
    index = build_index(TEXTS, encoder)
    for corpus, other in ((TEXTS[:4], encoder), (TEXTS, LocalEncoder(TEXTS, dimension=32))):
        with pytest.raises(ValueError, match="has another corpus or encoder"):
            Retriever(corpus, other, index)


def test_the_local_encoder_is_tf_idf(monkeypatch):
    """Cosines against counts of words, without hashing. With 2^18 places none collide."""
    monkeypatch.setattr(search, "TRIGRAM", 0.0)
    texts = [re.findall(r"\w+", text.lower()) for text in TEXTS]
    words = sorted(set(sum(texts, [])))
    counts = np.array([list(map(text.count, words)) for text in texts])
    vectors = counts * (np.log(7 / (1 + (counts > 0).sum(0))) + 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    *hashed, without_words = LocalEncoder(TEXTS, dimension=1 << 18).encode([*TEXTS, "?"])
    np.testing.assert_allclose(np.inner(hashed, hashed), vectors @ vectors.T, atol=1e-5)
    assert not without_words.any()


@pytest.fixture(scope="module")
def retriever():
    return Retriever(TEXTS, LocalEncoder(TEXTS))


@pytest.fixture(scope="module")
def url(retriever):
    with serving(retriever) as url:
        yield url


def post(url, body):
    """Return the status of an answer, and its body, from JSON if it is any."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection(url.split("/")[2], timeout=20)
    connection.request("POST", "/retrieve", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    text = response.read()
    return response.status, json.loads(text) if response.status == 200 else text


def test_requests_as_search_r1_s_client_makes_them(url, retriever):
    """Its trainer posts an empty list in every step without a search, and reads `result`."""
    queries = ["largest planet", "Mars", "水星"]
    passages, scores = retriever.search(queries, 3)
    documents = [[{"contents": text} for text in texts] for texts in passages]
    scored = []
    for texts, cosines in zip(documents, scores, strict=True):
        pairs = zip(texts, cosines, strict=True)
        scored.append([{"document": text, "score": cosine} for text, cosine in pairs])

    request = {"queries": queries, "topk": 3, "return_scores": True}
    for topk in (3, None, 0):
        assert post(url, request | {"topk": topk}) == (200, {"result": scored})
    assert post(url, {"queries": queries}) == (200, {"result": documents})
    assert post(url, request | {"return_scores": False}) == (200, {"result": documents})
    assert post(url, request | {"queries": []}) == (200, {"result": []})

    assert retrieve(url, queries * 900, 3) == passages * 900  # 512 prompts of 5 replies each
    assert len(retrieve(url, ["sun"], 10)[0]) == len(TEXTS)
    # The paper's 128 queries, as long as can be, of characters that JSON writes longest.
    assert len(retrieve(url, ["🙂" * MAX_TEXT] * 128, 1)) == 128


def test_bad_and_unbounded_requests_are_refused_and_the_server_lives_on(url):
    bodies = [b"\xff\xfe", b"[" * 100_000, {}, {"queries": ["a", 3]}, {"queries": ["x" * 2**25]}]
    bodies += [{"queries": ["a"], "topk": topk} for topk in (-1, 1.5, 10**400)]
    bodies += [{"queries": ["a"], "topk": 11}, {"queries": ["a"] * 5000, "topk": 1}]
    for body in bodies:
        assert 400 <= post(url, body)[0] < 500, str(body)[:60]
    assert retrieve(url, ["Mars"], 1) == [[TEXTS[5]]]


def answer(body, status="200 OK", header=""):
    """Return the bytes of an answer."""
    return f"HTTP/1.1 {status}\r\n{header}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def drip(*parts):
    """Yield the first part, and then the last one for ever, a byte at a time."""
    yield from parts[:-1]
    for byte in itertools.cycle(parts[-1]):
        time.sleep(0.01)
        yield bytes([byte])


OK = b"HTTP/1.1 200 OK\r\n"
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
GOOD = '{"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.5}]]}'
FAILURES = {  # what a server sends, piece by piece
    "error": [answer("no", "500 Error")],
    "redirect": [answer("", "307 Elsewhere", "Location: http://localhost:9/retrieve\r\n")],
    "no json": [answer("<html>")],
    "too few": [answer('{"result": []}')],
    "no text": [answer(GOOD.replace('"Title\\ntext"', "7"))],
    "drips of a body": partial(drip, OK + b"Content-Length: 99999\r\n\r\n", b"[ "),
    "drips of a header": partial(drip, OK + b"X: ", b"x"),
    "an endless body": lambda: itertools.chain([OK + b"\r\n"], itertools.repeat(b" " * 4096)),
    "endless continue": lambda: itertools.repeat(CONTINUE),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_a_request_that_fails_is_sent_again_and_given_up_after_three_attempts(failure, monkeypatch):
    """A limit of time and of bytes holds for the whole answer."""
    monkeypatch.setattr(search, "PAUSE", 0.01)
    monkeypatch.setattr(search, "TIMEOUT", 0.3)
    monkeypatch.setattr(search, "MAX_BYTES", 1 << 20)
    answers = [FAILURES[failure], [answer(GOOD)], *[FAILURES[failure]] * 3]
    received = []

    class Failing(socketserver.StreamRequestHandler):
        def handle(self):
            head = iter(self.rfile.readline, b"\r\n")
            (length,) = (int(line[15:]) for line in head if line.lower().startswith(b"content-len"))
            received.append(json.loads(self.rfile.read(length)))
            pieces = answers.pop(0)
            with contextlib.suppress(OSError):
                for piece in pieces() if callable(pieces) else pieces:
                    self.wfile.write(piece)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}/retrieve"
        assert retrieve(url, ["a"], 3) == [["Title\ntext"]]
        began = time.monotonic()
        sentence = r"failed 3 times, for up to 0.3 s each, at last with .{9}"
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
    files = ["--corpus", str(corpus), "--index", str(index)]
    command = [sys.executable, "-m", "envs.search_server", *files, "--port", "0"]
    built = set()
    for _ in range(2):
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            line = next(line for line in process.stderr if "running on" in line)
            url = re.search(r"http://127\.0\.0\.1:\d+", line)[0] + "/retrieve"
            assert retrieve(url, TEXTS[:2], 1) == [[TEXTS[0]], [TEXTS[1]]]
            built.add(index.stat().st_mtime_ns)
            process.terminate()
    assert len(built) == 1


REFUSED = {  # arguments: a part of the error
    "--index c.jsonl": "not recognized",
    "--corpus bad.jsonl": "contents",
    "--corpus empty.jsonl": "--corpus is empty.jsonl, but must have a passage",
}


def test_what_cannot_be_served_is_refused_and_no_file_is_overwritten(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "c.jsonl", CORPUS)
    write_rows(tmp_path / "bad.jsonl", [{"contents": "fine"}, {"text": "x"}])
    Path("empty.jsonl").write_text("\n \n")

    files = ["--corpus", "c.jsonl", "--index", "c.faiss"]
    before = Path("c.jsonl").read_bytes()
    for arguments, sentence in REFUSED.items():
        with pytest.raises((Exception, SystemExit), match=re.escape(sentence)):
            search_server.main([*files, *arguments.split()])
    assert Path("c.jsonl").read_bytes() == before


def test_a_transformer_needs_to_be_told_its_prefixes(capsys):
    """A folder's name does not say which model it holds."""
    files = ["--corpus", "c.jsonl", "--index", "c.faiss"]
    with pytest.raises(SystemExit):
        search_server.main([*files, "--encoder", "models--intfloat--e5-base/snapshots/f5"])
    assert "--prefixes must be given" in capsys.readouterr().err
