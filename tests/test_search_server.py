"""The retrieval server: FAISS and encoders against slow ones, the protocol over real HTTP, limits, bad input."""

import http.client
import json
import math
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import BertConfig, BertModel, BertTokenizerFast

from envs import search_server
from envs.search_client import retrieve
from envs.search_encoders import E5Encoder, LocalEncoder
from envs.search_server import MAX_BYTES, MAX_QUERIES, Corpus, Retriever, SearchServer, build_index, parse_request

ROOT = Path(__file__).parent.parent
TEXTS = [
    "Mercury\nthe smallest planet, closest to the Sun",
    "Venus\nsecond planet from the Sun, hotter than Mercury",
    "Ceres\na dwarf planet between Mars and Jupiter",
    "Jupiter\nthe largest planet, with a great red spot",
    "Naïve café\nünïcode 水星 text",
    "Mars\n",
]


def write_corpus(path, texts):
    path.write_text("".join(json.dumps({"id": str(k), "contents": text}) + "\n" for k, text in enumerate(texts)))
    return str(path)


@pytest.fixture(scope="module")
def retriever(tmp_path_factory):
    corpus = Corpus(write_corpus(tmp_path_factory.mktemp("corpus") / "planets.jsonl", TEXTS))
    encoder = LocalEncoder(corpus.contents())
    return Retriever(corpus, encoder, build_index(corpus, encoder))


@pytest.fixture(scope="module")
def server(retriever):
    with SearchServer(retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def post(server, body, path="/retrieve", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, body, headers)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response.status, json.loads(content)


# -- search --------------------------------------------------------------------------------------------------


class FixedVectors:
    """An encoder of texts that are numbers of rows."""

    def __init__(self, vectors):
        self.vectors, self.dimension = vectors, vectors.shape[1]

    def queries(self, texts):
        return self.vectors[[int(text) for text in texts]]

    passages = queries


@pytest.mark.parametrize("n", [1, 2, 2500])
def test_faiss_finds_what_brute_force_finds(n, tmp_path):
    """Documents and scores of the index, built in several batches, against a float64 sort of all inner products."""
    vectors = np.random.default_rng(n).normal(size=(n, 24)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    corpus = Corpus(write_corpus(tmp_path / "c.jsonl", map(str, range(n))))
    encoder = FixedVectors(vectors)
    retriever = Retriever(corpus, encoder, build_index(corpus, encoder))
    asked = list(range(0, n, max(1, n // 40)))
    found = retriever.search([str(k) for k in asked], topk=7)
    products = vectors[asked].astype(np.float64) @ vectors.astype(np.float64).T
    best = np.argsort(-products, axis=1)[:, :7]
    for row, hits in enumerate(found):
        assert [int(document["contents"]) for document, _ in hits] == best[row].tolist()
        np.testing.assert_allclose([score for _, score in hits], products[row, best[row]], atol=1e-5)
        assert len(hits) == min(7, n)


def test_an_approximate_index_that_finds_fewer_serves_fewer(tmp_path):
    """An inverted file looks into one of two lists only, and FAISS fills up with -1."""
    vectors = np.repeat(np.eye(2, dtype=np.float32), [3, 5], axis=0)
    index = faiss.IndexIVFFlat(faiss.IndexFlatIP(2), 2, 2, faiss.METRIC_INNER_PRODUCT)
    index.quantizer.add(np.eye(2, dtype=np.float32))
    index.train(vectors)
    index.add(vectors)
    retriever = Retriever(Corpus(write_corpus(tmp_path / "c.jsonl", map(str, range(8)))), FixedVectors(vectors), index)
    (found,) = retriever.search(["0"], topk=5)
    assert sorted(document["contents"] for document, _ in found) == ["0", "1", "2"]


def test_the_local_encoder_is_tf_idf():
    """Cosines against a dictionary of terms, without hashing; 2^20 places leave next to no collisions."""

    def terms(text, weight, into):
        for word in re.findall(r"\w+", text.lower()):
            into[word] += weight
            for k in range(len(word)):
                into[f"#{word}#"[k : k + 3]] += weight * LocalEncoder.TRIGRAM

    bags, asked = [], Counter()
    for text in TEXTS:
        title, body = text.split("\n")
        bags.append(Counter())
        terms(title, LocalEncoder.TITLE, bags[-1])
        terms(body, 1.0, bags[-1])
    terms("The red planet near Jupiters", 1.0, asked)
    idf = {t: math.log((1 + len(bags)) / (1 + sum(t in b for b in bags))) + 1 for t in set(asked).union(*bags)}

    def cosine(a, b):
        def norm(c):
            return math.sqrt(sum((v * idf[t]) ** 2 for t, v in c.items()))

        return sum(v * b.get(t, 0) * idf[t] ** 2 for t, v in a.items()) / (norm(a) * norm(b))

    encoder = LocalEncoder(TEXTS, dimension=1 << 20)
    ours = encoder.passages(TEXTS) @ encoder.queries(["The red planet near Jupiters"])[0]
    np.testing.assert_allclose(ours, [cosine(asked, bag) for bag in bags], atol=1e-5)
    assert ours.argmax() == 3


@settings(deadline=None)
@given(st.lists(st.text(max_size=60), min_size=1, max_size=4))
def test_local_vectors_have_length_one_or_zero(texts):
    encoder = LocalEncoder(TEXTS)
    for vectors in (encoder.queries(texts), encoder.passages(texts)):
        norms = np.linalg.norm(vectors, axis=1)
        words = [bool(re.search(r"\w", text)) for text in texts]
        np.testing.assert_allclose(norms, np.where(words, 1.0, 0.0), atol=1e-5)


@pytest.fixture(scope="module")
def tiny_bert(tmp_path_factory):
    """A BERT with random weights in a folder, as a stand-in of the same class as intfloat/e5-base-v2."""
    folder = tmp_path_factory.mktemp("bert")
    letters = "abcdefghijklmnopqrstuvwxyz:,"
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters), "query", "passage"]
    (folder / "vocab.txt").write_text("\n".join(pieces))
    tokenizer = BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    BertModel(BertConfig(vocab_size=len(tokenizer), **size, initializer_range=0.5)).save_pretrained(folder)
    return folder


def test_e5_is_the_normalised_mean_over_a_text_s_own_tokens(tiny_bert):
    """In a padded batch, against one text at a time in float64; and the prefixes are those of E5."""
    encoder = E5Encoder(str(tiny_bert))
    assert encoder.dimension == 32
    model, tokenizer = BertModel.from_pretrained(tiny_bert).double().eval(), encoder.tokenizer
    texts = ["planet", "the largest planet of them all, with a spot", "x", "mars " * 600]
    for ours, prefix in ((encoder.queries(texts), "query: "), (encoder.passages(texts), "passage: ")):
        assert ours.dtype == np.float32
        for vector, text in zip(ours, texts, strict=True):
            ids = tokenizer(prefix + text, truncation=True, max_length=512, return_tensors="pt").input_ids
            with torch.no_grad():
                mean = model(ids).last_hidden_state[0].mean(0)
            np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    many = [f"text {'abcdefg'[k % 7] * (k % 11 + 1)}" for k in range(150)]  # more than a batch
    np.testing.assert_allclose(encoder.queries(many)[-20:], encoder.queries(many[-20:]), atol=1e-5)


# -- protocol ------------------------------------------------------------------------------------------------


def test_the_protocol(server, retriever):
    queries = ["largest planet", "Mars", "水星"]
    status, answer = post(server, {"queries": queries, "topk": 3, "return_scores": True})
    assert status == 200
    assert set(answer) == {"result"}
    assert [row[0]["document"]["contents"] for row in answer["result"]] == [TEXTS[3], TEXTS[5], TEXTS[4]]
    for row, found in zip(answer["result"], retriever.search(queries, 3), strict=True):
        assert [(hit["document"], hit["score"]) for hit in row] == found
        scores = [hit["score"] for hit in row]
        assert scores == sorted(scores, reverse=True)
        assert len(row) == 3
    bare = post(server, {"queries": queries, "topk": 3, "return_scores": False})[1]["result"]
    assert bare == [[hit["document"] for hit in row] for row in answer["result"]]
    assert post(server, {"queries": queries})[1]["result"] == bare  # the defaults
    assert len(post(server, {"queries": ["sun"], "topk": 100})[1]["result"][0]) == len(TEXTS)


REFUSED = {
    b"": (400, "JSON"),
    b"{": (400, "JSON"),
    b"\xff\xfe": (400, "JSON"),
    b"[" * 100_000: (400, "JSON"),
    b"[]": (400, "JSON object"),
    b"null": (400, "JSON object"),
    b"{}": (400, "queries"),
    b'{"queries": []}': (400, "queries"),
    b'{"queries": "planet"}': (400, "queries"),
    b'{"queries": ["a", 3]}': (400, "queries"),
    b'{"queries": ["a"], "topk": 0}': (400, "topk"),
    b'{"queries": ["a"], "topk": 101}': (400, "topk"),
    b'{"queries": ["a"], "topk": true}': (400, "topk"),
    b'{"queries": ["a"], "topk": "3"}': (400, "topk"),
    b'{"queries": ["a"], "topk": 1e400}': (400, "topk"),
    b'{"queries": ["a"], "return_scores": 1}': (400, "return_scores"),
    json.dumps({"queries": ["a"] * (MAX_QUERIES + 1)}).encode(): (413, "at most 512"),
    b'{"queries": ["' + b"x" * MAX_BYTES + b'"]}': (413, "at most 1048576 bytes"),
    b" " * (5 * MAX_BYTES): (413, "at most 1048576 bytes"),
}


@pytest.mark.parametrize("body", REFUSED, ids=lambda body: repr(body[:30]))
def test_bad_requests_get_one_sentence_and_the_server_lives_on(server, body):
    status, answer = post(server, body)
    assert (status, list(answer)) == (REFUSED[body][0], ["error"])
    assert REFUSED[body][1] in answer["error"]
    assert "\n" not in answer["error"]
    assert post(server, {"queries": ["Mars"]})[0] == 200


def test_what_is_at_the_limit_is_served(server):
    assert len(post(server, {"queries": ["Mars"] * MAX_QUERIES, "topk": 1})[1]["result"]) == MAX_QUERIES
    body = b'{"queries": ["Mars"]}'
    assert post(server, body + b" " * (MAX_BYTES - len(body)))[0] == 200


def test_other_addresses_and_lengths(server):
    assert post(server, {"queries": ["Mars"]}, path="/search")[0] == 404
    for header in ("Content-Length: -5", "Content-Length: five", "Transfer-Encoding: chunked", "X-Nothing: 1"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
            raw.sendall(f"POST /retrieve HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
            assert raw.recv(1 << 16).startswith(b"HTTP/1.1 400")


def test_a_client_that_hangs_up_is_no_news(server, capsys):
    for part in (b"POST", b"POST /retrieve HTTP/1.1\r\nContent-Length: 50\r\n\r\n{", b"\x16\x03\x01\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset, no farewell
            raw.sendall(part)
    assert post(server, {"queries": ["Mars"]})[0] == 200
    assert "Traceback" not in capsys.readouterr().err


def test_more_connections_than_allowed_are_refused_until_one_ends(retriever):
    class Small(SearchServer):
        max_connections = 3

    with Small(retriever) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            idle = [socket.create_connection(("127.0.0.1", server.server_port)) for _ in range(3)]
            with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as one_more:
                assert one_more.recv(100).startswith(b"HTTP/1.1 503")
            for connection in idle:
                connection.close()
            assert retrieve(server.url, ["largest planet"], 1, 20.0, 5) == [[TEXTS[3]]]
        finally:
            server.shutdown()


def test_queries_that_are_no_unicode_are_searched_all_the_same(server):
    assert post(server, b'{"queries": ["\\ud800 Mars", "", "\\u0000"]}')[0] == 200


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
                        st.sampled_from(["queries", "topk", "return_scores"]), inner, max_size=3), max_leaves=8)
       )  # fmt: skip
def test_arbitrary_requests_are_read_or_refused(request_):
    try:
        queries, topk, scores = parse_request(json.dumps(request_).encode())
    except ValueError as error:
        assert str(error)
    else:
        assert queries == request_["queries"]
        assert all(isinstance(query, str) for query in queries)
        assert 1 <= topk <= 100
        assert isinstance(scores, bool)


# -- command line --------------------------------------------------------------------------------------------


def test_build_and_serve_from_the_command_line(tmp_path):
    corpus, index = write_corpus(tmp_path / "c.jsonl", TEXTS), str(tmp_path / "c.faiss")
    files = ["--corpus", corpus, "--index", index]
    assert search_server.main(["--build", *files]) == 0
    command = [sys.executable, "-m", "envs.search_server", *files, "--port", "0"]
    # where the tests run in the background, a shell has them ignore Ctrl-C, and their children inherit that
    heeding = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, preexec_fn=heeding)
    try:
        line = process.stdout.readline()
        host, port = re.fullmatch(r"6 documents at http://(.+):(\d+)/retrieve\n", line).groups()
        assert host == "127.0.0.1"
        connection = http.client.HTTPConnection(host, int(port), timeout=20)
        connection.request("POST", "/retrieve", json.dumps({"queries": TEXTS[:2], "topk": 1}))
        result = json.loads(connection.getresponse().read())["result"]
        assert [row[0]["contents"] for row in result] == TEXTS[:2]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0


def test_an_index_of_e5_vectors(tmp_path, tiny_bert):
    corpus, index = write_corpus(tmp_path / "c.jsonl", TEXTS), str(tmp_path / "c.faiss")
    assert search_server.main(["--build", "--corpus", corpus, "--index", index, "--encoder", str(tiny_bert)]) == 0
    encoder = E5Encoder(str(tiny_bert))
    found = Retriever(Corpus(corpus), encoder, search_server.read_index(index)).search(["red planet"], 6)[0]
    scores = encoder.passages(TEXTS).astype(np.float64) @ encoder.queries(["red planet"])[0].astype(np.float64)
    assert [TEXTS.index(document["contents"]) for document, _ in found] == np.argsort(-scores).tolist()
    np.testing.assert_allclose([score for _, score in found], np.sort(scores)[::-1], atol=1e-5)


def test_what_cannot_be_served_is_said_in_one_sentence(tmp_path, capsys):
    corpus, index = write_corpus(tmp_path / "c.jsonl", TEXTS), str(tmp_path / "c.faiss")
    assert search_server.main(["--build", "--corpus", corpus, "--index", index]) == 0
    shorter = write_corpus(tmp_path / "d.jsonl", TEXTS[:4])
    (tmp_path / "bad.faiss").write_bytes(b"no index at all")
    (tmp_path / "empty.jsonl").write_text("")
    capsys.readouterr()
    cases = [
        (["--index", str(tmp_path / "none.faiss"), "--corpus", corpus], "none.faiss, but must be an index"),
        (["--index", str(tmp_path / "bad.faiss"), "--corpus", corpus], "bad.faiss, but must be an index"),
        (["--index", index, "--corpus", shorter], "6 vectors of 2048 numbers, but"),
        (["--index", index, "--corpus", str(tmp_path / "none.jsonl")], "none.jsonl"),
        (["--index", index, "--corpus", str(tmp_path / "empty.jsonl")], "empty.jsonl is empty"),
        (["--index", index, "--corpus", corpus, "--port", "70000"], "port"),
        (["--index", index, "--corpus", corpus, "--encoder", str(tmp_path)], f"--encoder is {tmp_path}, but no model"),
    ]
    for arguments, sentence in cases:
        assert search_server.main(arguments) == 2, arguments
        lines = capsys.readouterr().err.strip().splitlines()
        assert len(lines) == 1, lines
        assert sentence in lines[0]


@pytest.mark.parametrize("line", ["{", "[]", '{"text": "x"}', '{"contents": 3}', "", "\udcff"])
def test_a_bad_line_of_the_corpus_is_named(line, tmp_path):
    path = tmp_path / "c.jsonl"
    path.write_text(f'{{"contents": "fine"}}\n{line}\n{{"contents": "fine"}}\n', errors="surrogateescape")
    corpus = Corpus(str(path))
    assert (corpus[0]["contents"], corpus[2]["contents"], len(corpus)) == ("fine", "fine", 3)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 2: must be a JSON object")):
        list(corpus.contents())
