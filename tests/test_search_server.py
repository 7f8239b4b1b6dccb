"""The retrieval server and its client: FAISS and tf-idf against slow oracles, the protocol,
failures."""

import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest.mock import Mock

import faiss
import numpy as np
import pytest
from conftest import write_rows
from safetensors.torch import load_file, save_file

from envs import search_server
from envs.nq_search import MAX_TEXT
from envs.search_server import LocalEncoder, Retriever, SearchServer, retrieve
from freshper.tiny import SHIPPED

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
    np.testing.assert_allclose(scores, np.take_along_axis(products, best, 1), atol=1e-5)


def test_an_index_of_cells_may_find_fewer():
    """A cell of FAISS's IVF index holds few passages: -1 stands for those that are missing."""
    encoder = LocalEncoder(TEXTS, dimension=64)
    vectors = encoder.encode(TEXTS, passages=True)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(64), 64, 3, faiss.METRIC_INNER_PRODUCT)
    index.train(vectors)
    index.add(vectors)
    (passages,), (scores,) = Retriever(TEXTS, encoder, index).search(TEXTS[:1], topk=len(TEXTS))
    assert passages[0] == TEXTS[0] and len(passages) == len(scores) < len(TEXTS)


def test_the_local_encoder_is_tf_idf(monkeypatch):
    """Cosines against counts of words, without hashing. With 2^18 places none collide."""
    monkeypatch.setattr(search_server, "TRIGRAM", 0.0)
    texts = [re.findall(r"\w+", text.lower()) for text in TEXTS]
    words = sorted(set(sum(texts, [])))
    counts = np.array([list(map(text.count, words)) for text in texts])
    vectors = counts * (np.log(7 / (1 + (counts > 0).sum(0))) + 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)

    *hashed, without_words = LocalEncoder(TEXTS, dimension=1 << 18).encode([*TEXTS, "?"])
    np.testing.assert_allclose(np.inner(hashed, hashed), vectors @ vectors.T, atol=1e-5)
    assert not without_words.any()


@pytest.fixture(scope="module")
def server():
    with SearchServer(Retriever(TEXTS, LocalEncoder(TEXTS))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def post(server, body, **headers):
    """Return the status of an answer and its JSON."""
    if not isinstance(body, bytes):
        body = json.dumps(body).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request("POST", "/retrieve", body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_the_protocol(server):
    queries = ["largest planet", "Mars", "水星"]
    status, answer = post(server, {"queries": queries, "return_scores": True})
    assert (status, set(answer)) == (200, {"result"})
    # Without "topk" the server returns three passages.
    passages, scores = server.retriever.search(queries, 3)
    for row, texts, cosines in zip(answer["result"], passages, scores, strict=True):
        assert [hit["document"]["contents"] for hit in row] == texts
        assert [hit["score"] for hit in row] == cosines

    best = [[TEXTS[3]], [TEXTS[5]], [TEXTS[4]]]
    assert retrieve(server.url, queries * 500, 1) == best * 500
    assert len(retrieve(server.url, ["sun"], 100)[0]) == len(TEXTS)


def test_bad_requests_get_one_sentence_and_the_server_lives_on(server):
    bodies = [
        b"{",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b"[" * 100_000,
        {},
    ]
    bodies += [{"queries": queries} for queries in ("planet", ["a", 3], [])]

    for body in bodies:
        status, answer = post(server, body)
        assert (status, list(answer)) == (400, ["error"])
    for topk in (0, -1, True, "3", None, 1.5):
        sentence = post(server, {"queries": ["a"], "topk": topk})[1]["error"]
        assert "topk, a whole number above 0" in sentence
    for length in ("-5", "five", "0", "9" * 13, "9" * 5000):
        assert post(server, {}, **{"Content-Length": length})[0] == 400
    assert post(server, {"queries": ["Mars \ud800"]})[0] == 200


def test_a_request_that_never_ends_gets_an_answer(server, monkeypatch):
    monkeypatch.setattr(search_server.Handler, "timeout", 0.3)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(b"POST /retrieve HTTP/1.0\r\nContent-Length: 9\r\n\r\n{")
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert json.loads(body)["error"] == search_server.REQUEST_FORM


def test_two_hundred_clients_at_once_and_slow_ones_besides(server):
    """The slow ones keep their connections open and send nothing."""
    address = ("127.0.0.1", server.server_port)
    slow = [socket.create_connection(address) for _ in range(20)]
    queries = [TEXTS[k % 6] for k in range(200)]

    with ThreadPoolExecutor(200) as pool:
        answers = list(pool.map(lambda query: retrieve(server.url, [query], 1), queries))
    assert answers == [[[query]] for query in queries]
    assert server.request_queue_size >= len(queries)
    for connection in slow:
        connection.close()


def test_a_long_query_takes_time_in_proportion():
    """Eight times the letters take eight times as long, not 64 times as if trigrams copied them."""
    encoder = LocalEncoder(TEXTS)
    seconds = []
    for letters in (40_000, 320_000):
        began = time.process_time()
        assert encoder.encode(["x" * letters]).any()
        seconds.append(time.process_time() - began)
    assert seconds[1] < 24 * seconds[0]


def test_the_largest_batch_of_nq_search_is_answered(server):
    """The paper's 128 queries, as long as can be, of characters that JSON writes longest."""
    queries = ["🙂" * MAX_TEXT] * 128
    assert len(retrieve(server.url, [*queries, "Mars"], 1)) == 129


@pytest.mark.parametrize("error", [RuntimeError, OSError, KeyError])
def test_a_search_that_fails_is_answered_and_the_server_lives_on(server, error, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.retriever, "search", Mock(side_effect=error("no memory")))
        status, answer = post(server, {"queries": ["Mars"]})
        sentence = f"the search failed: {error.__name__}('no memory')"
        assert (status, answer) == (500, {"error": sentence})
        with pytest.raises(ConnectionError, match=f"500: .*the search failed: {error.__name__}"):
            retrieve(server.url, ["Mars"], 1)
    assert retrieve(server.url, ["Mars"], 1) == [[TEXTS[5]]]


GOOD = b'{"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.5}]]}'
# Status and body of an answer.
FAILURES = {
    "error": (500, b""),
    "redirect": (307, b""),
    "silent": (200, None),
    "no json": (200, b"<html>"),
    "null": (200, b"null"),
    "too few": (200, b'{"result": []}'),
    "two rows": (200, b'{"result": [[], []]}'),
    "cut short": (200, GOOD[:-9]),
    "deep": (200, b"[" * 100_000),
}
for contents in ("7", "null", '["a"]'):
    FAILURES[f"contents {contents}"] = (200, GOOD.replace(b'"Title\\ntext"', contents.encode()))


@pytest.mark.parametrize("failure", FAILURES)
def test_a_request_that_fails_is_sent_again_and_given_up_after_three_attempts(failure, monkeypatch):
    monkeypatch.setattr(search_server, "PAUSE", 0.01)
    monkeypatch.setattr(search_server, "TIMEOUT", 0.3)
    answers = [FAILURES[failure], (200, GOOD), *[FAILURES[failure]] * 3]
    requests = []
    released = threading.Event()

    class Failing(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers.pop(0)
            if body is None:
                released.wait(5)
                return

            length = len(GOOD) if failure == "cut short" else len(body)
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        assert retrieve(url, ["a"], 3) == [["Title\ntext"]]
        sentence = r"failed 3 times, for up to 0.3 s each, at last with .{9}"
        with pytest.raises(ConnectionError, match=sentence):
            retrieve(url, ["a"], 3)
        assert requests == [{"queries": ["a"], "topk": 3, "return_scores": True}] * 5
        released.set()
        server.shutdown()


def test_build_and_serve_from_the_command_line(tmp_path):
    corpus = write_rows(tmp_path / "c.jsonl", CORPUS)
    files = ["--corpus", corpus, "--index", str(tmp_path / "c.faiss")]
    search_server.main(["--build", *files])
    command = [sys.executable, "-m", "envs.search_server", *files, "--port", "0"]
    # A shell's background jobs ignore Ctrl-C: the server must not inherit that.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    pipe = {"stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipe, preexec_fn=heed) as process:
        line = process.stdout.readline()
        url = re.fullmatch(r"6 documents at (http://127\.0\.0\.1:\d+/retrieve)\n", line)[1]
        assert retrieve(url, TEXTS[:2], 1) == [[TEXTS[0]], [TEXTS[1]]]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


REFUSED = {  # arguments: a part of the sentence
    "--index bad.faiss": "bad.faiss",
    "--index no/c.faiss --build": "no/c.faiss",
    "--corpus d.jsonl": "the index of 6 passages is of another corpus or encoder",
    "--corpus e.jsonl": "the index of 6 passages is of another corpus or encoder",
    "--corpus bad.jsonl": "bad.jsonl, line 2: must be a JSON object",
    "--corpus deep.jsonl": "deep.jsonl, line 1: must be a JSON object",
    "--encoder .": "--encoder is ., but no model",
    "--encoder half": "--encoder is half, but must have the weights layers.0.mlp.up_proj.weight",
    "--corpus none.jsonl --build": "the corpus must have documents",
    "--index c.jsonl --build": "the index a file of its own",
    "--build --port 80": "--port is 80, but has no effect with --build",
}


def files_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "c.jsonl", CORPUS)
    write_rows(tmp_path / "d.jsonl", CORPUS[:4])
    write_rows(tmp_path / "e.jsonl", CORPUS[::-1])
    (tmp_path / "bad.faiss").write_bytes(b"no index at all")
    write_rows(tmp_path / "bad.jsonl", [{"contents": "fine"}, {"text": "x"}])
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "none.jsonl").write_text("")
    shutil.copytree(SHIPPED / "frozenlake", "half")
    weights = load_file("half/model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, "half/model.safetensors", {"format": "pt"})
    files = ["--corpus", "c.jsonl", "--index", "c.faiss"]
    search_server.main(["--build", *files])
    made = files_of(tmp_path)

    for arguments, sentence in REFUSED.items():
        with pytest.raises(SystemExit, match="2"):
            search_server.main([*files, *arguments.split()])
        assert sentence in capsys.readouterr().err
        # Nothing is lost, and nothing half-written.
        assert files_of(tmp_path) == made

    def full_disk(index, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("No space left on device")

    monkeypatch.setattr(faiss, "write_index", full_disk)
    with pytest.raises(SystemExit, match="2"):
        search_server.main([*files, "--build"])
    assert "No space left" in capsys.readouterr().err
    assert files_of(tmp_path) == made
