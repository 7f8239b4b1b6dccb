"""The retrieval server and its client: FAISS and tf-idf against slow oracles, the protocol, failures."""

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from conftest import write_rows

from envs import search_server
from envs.search_server import LocalEncoder, Retriever, SearchServer, retrieve

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
    """Passages and scores of the index, built in several batches, against a float64 sort of all inner products."""
    rng, encoder = np.random.default_rng(n), LocalEncoder(TEXTS, dimension=64)
    texts = [" ".join(map(str, rng.integers(1000, size=9))) for _ in range(n)]
    asked = texts[:: max(1, n // 40)]
    products = (
        encoder.encode(asked).astype(np.float64)
        @ encoder.encode(texts, passages=True).astype(np.float64).T
    )
    best = np.argsort(-products, axis=1)[:, :7]
    for row, hits in enumerate(Retriever(texts, encoder).search(asked, topk=7)):
        assert [text for text, _ in hits] == [texts[k] for k in best[row]]
        np.testing.assert_allclose(
            [score for _, score in hits], products[row, best[row]], atol=1e-5
        )


def test_the_local_encoder_is_tf_idf(monkeypatch):
    """Cosines against counts of words, without hashing. With 2^18 places none collide."""
    monkeypatch.setattr(search_server, "TRIGRAM", 0.0)
    texts = [re.findall(r"\w+", text.lower()) for text in TEXTS]
    words = sorted({word for text in texts for word in text})
    counts = np.array([[text.count(word) for word in words] for text in texts])
    vectors = counts * (np.log(7 / (1 + (counts > 0).sum(0))) + 1)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = LocalEncoder(TEXTS, dimension=1 << 18).encode([*TEXTS, "?"])
    np.testing.assert_allclose(found[:-1] @ found[:-1].T, vectors @ vectors.T, atol=1e-5)
    assert not found[-1].any()  # no words: zeros, not NaN


@pytest.fixture(scope="module")
def server():
    with SearchServer(Retriever(TEXTS, LocalEncoder(TEXTS))) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.shutdown()


def post(server, body, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.request(
        "POST", "/retrieve", body if isinstance(body, bytes) else json.dumps(body).encode(), headers
    )
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_the_protocol(server):
    queries = ["largest planet", "Mars", "水星"]
    status, answer = post(server, {"queries": queries, "return_scores": True})
    assert (status, set(answer)) == (200, {"result"})
    assert [row[0]["document"]["contents"] for row in answer["result"]] == [
        TEXTS[3],
        TEXTS[5],
        TEXTS[4],
    ]
    for row, found in zip(
        answer["result"], server.retriever.search(queries, 3), strict=True
    ):  # 3 is the default
        assert [(hit["document"]["contents"], hit["score"]) for hit in row] == found
    assert len(retrieve(server.url, ["sun"], 100)[0]) == len(TEXTS)
    assert retrieve(server.url, queries * 500, 1) == [[TEXTS[3]], [TEXTS[5]], [TEXTS[4]]] * 500


def test_bad_requests_get_one_sentence_and_the_server_lives_on(server):
    bodies = [
        b"{",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b"[" * 100_000,
        bytes(search_server.MOST_BYTES + 1),
        {},
    ]
    bodies += [{"queries": queries} for queries in ("planet", ["a", 3], [], ["a"] * 1025)]
    for body in bodies:
        status, answer = post(server, body)
        assert (status, list(answer)) == (400, ["error"])
    for topk in (0, -1, 101, True, "3", None, 1.5):
        sentence = post(server, {"queries": ["a"], "topk": topk})[1]["error"]
        assert "topk, a whole number from 1 to 100" in sentence
    for length in ("-5", "five", "0", "9" * 5000):
        assert post(server, {}, **{"Content-Length": length})[0] == 400
    assert post(server, {"queries": ["Mars \ud800"]})[0] == 200


HALF = b"POST /retrieve HTTP/1.0\r\nContent-Length: 9\r\n\r\n{"
REQUESTS = [
    b"hello\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST / HTTP/9.9\r\n\r\n",
    b"POST /re",
    HALF,
    HALF[:-4],
]


@pytest.mark.parametrize("request_text", REQUESTS)
def test_requests_that_are_none_or_never_end_get_an_answer(server, request_text, monkeypatch):
    monkeypatch.setattr(search_server, "SECONDS", 0.3)
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(request_text)
        answer = connection.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    assert json.loads(body)["error"]


def test_two_hundred_clients_at_once_and_slow_ones_besides(server):
    """The slow ones keep their connections open and send nothing."""
    address = ("127.0.0.1", server.server_port)
    slow = [socket.create_connection(address) for _ in range(20)]
    with ThreadPoolExecutor(200) as pool:
        found = list(pool.map(lambda k: retrieve(server.url, [TEXTS[k % 6]], 1), range(200)))
    assert found == [[[TEXTS[k % 6]]] for k in range(200)]
    for connection in slow:
        connection.close()


def test_a_long_query_takes_time_in_proportion():
    """A million letters: half a minute if each trigram copied the word, a second now."""
    began = time.perf_counter()
    assert LocalEncoder(TEXTS).encode(["x" * 1_000_000]).any()
    assert time.perf_counter() - began < 15


GOOD = b'{"result": [[{"document": {"contents": "Title\\ntext"}, "score": 0.5}]]}'
FAILURES = {  # status and body of an answer
    "error": (500, b""), "redirect": (307, b""), "silent": (200, None), "no json": (200, b"<html>"),
    "null": (200, b"null"), "too few": (200, b'{"result": []}'), "cut short": (200, GOOD[:-9]),
    "a byte at a time": (200, GOOD), "deep": (200, b"[" * 100_000), "two rows": (200, b'{"result": [[], []]}'),
    **{kind: (200, GOOD.replace(b'"Title\\ntext"', kind.encode())) for kind in ("7", "null", '["a"]')},
}  # fmt: skip


@pytest.mark.parametrize("failure", FAILURES)
def test_a_request_that_fails_is_sent_again_and_given_up_after_three_attempts(failure, monkeypatch):
    monkeypatch.setattr(search_server, "PAUSE", 0.01)
    monkeypatch.setattr(search_server, "TIMEOUT", 0.3)
    answers, requests, released = (
        [FAILURES[failure], (200, GOOD), *[FAILURES[failure]] * 3],
        [],
        threading.Event(),
    )

    class Failing(BaseHTTPRequestHandler):
        def do_POST(self):
            requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            status, body = answers.pop(0)
            if body is None:
                released.wait(5)
                return
            self.send_response(status)
            self.send_header(
                "Content-Length", str(len(GOOD) if failure == "cut short" else len(body))
            )
            self.end_headers()
            trickles = failure == "a byte at a time" and len(requests) != 2
            for part in [bytes([byte]) for byte in body] if trickles else [body]:
                self.wfile.write(part)
                released.wait(0.01 * trickles)

    with ThreadingHTTPServer(("127.0.0.1", 0), Failing) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/retrieve"
        assert retrieve(url, ["a"], 3) == [["Title\ntext"]]
        with pytest.raises(
            ConnectionError, match=r"failed 3 times, for up to 0.3 s each, at last with .{9}"
        ):
            retrieve(url, ["a"], 3)
        assert requests == [{"queries": ["a"], "topk": 3, "return_scores": True}] * 5
        released.set()
        server.shutdown()


def test_build_and_serve_from_the_command_line(tmp_path):
    files = [
        "--corpus",
        write_rows(tmp_path / "c.jsonl", CORPUS),
        "--index",
        str(tmp_path / "c.faiss"),
    ]
    search_server.main(["--build", *files])
    command = [sys.executable, "-m", "envs.search_server", *files, "--port", "0"]
    heeding = partial(
        signal.signal, signal.SIGINT, signal.SIG_DFL
    )  # a shell's background jobs ignore Ctrl-C
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, preexec_fn=heeding
    ) as process:
        url = re.fullmatch(
            r"6 documents at (http://127\.0\.0\.1:\d+/retrieve)\n", process.stdout.readline()
        )[1]
        assert retrieve(url, TEXTS[:2], 1) == [[TEXTS[0]], [TEXTS[1]]]
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


REFUSED = {  # arguments: a part of the sentence
    "--index bad.faiss": "bad.faiss",
    "--index no/c.faiss --build": "no/c.faiss",
    "--corpus d.jsonl": "the index of 6 passages is of another corpus or encoder",
    "--corpus bad.jsonl": "bad.jsonl, line 2: must be a JSON object",
    "--encoder .": "--encoder is ., but no model",
}


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    search_server.main(
        ["--build", "--corpus", write_rows(tmp_path / "c.jsonl", CORPUS), "--index", "c.faiss"]
    )
    write_rows(tmp_path / "d.jsonl", CORPUS[:4])
    (tmp_path / "bad.faiss").write_bytes(b"no index at all")
    write_rows(tmp_path / "bad.jsonl", [{"contents": "fine"}, {"text": "x"}])
    for arguments, sentence in REFUSED.items():
        with pytest.raises(SystemExit, match="2"):
            search_server.main(["--corpus", "c.jsonl", "--index", "c.faiss", *arguments.split()])
        assert sentence in capsys.readouterr().err
