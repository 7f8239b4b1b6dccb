"""NQ Search with a search server: an episode, and runs that lose it."""

import contextlib
import json
import re
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from conftest import QUESTION, contents
from test_nq_search import NO_SERVER

import train
from envs import nq_search, search
from envs.base import EVAL_SEEDS
from envs.nq_search import NQSearch
from envs.search import Retriever
from freshper.engine_hf import HFEngine

PASSAGES = [
    "Wilhelm Röntgen\nThe first Nobel Prize in Physics.",
    "Physics\nA science.",
    "Nobel Prize\nA prize.",
]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = Retriever(PASSAGES).search(request["queries"], request["topk"])
        result = [[{"document": {"contents": text}} for text in texts] for texts in found]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"result": result}).encode())


@contextlib.contextmanager
def serve(port=0):
    """Serve the passages while the block runs. Yields the address."""
    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()


def test_an_episode_with_data_and_a_server(questions):
    with serve() as url:
        env = NQSearch(style="full", data=questions, search_url=url)
        first, _ = env.reset(seed=EVAL_SEEDS)
        search = "<think>hm</think><search>Wilhelm Röntgen physics</search>"
        observation, *results, info = env.step(search)
    assert re.search(rf"Question: {QUESTION} \d+\?", first.text)
    passages = "\n\n".join(PASSAGES)
    assert f"<information>\n{passages}\n</information>\n" in observation.text
    assert (results, info["valid"]) == ([0.0, False, False], True)

    _, *results, info = env.step("<Answer>wilhelm conrad röntgen.</Answer>")
    assert (results, info["success"]) == ([1.0, True, False], True)
    assert info["metrics"] == {"searches": 1.0}


SHORT = """--env nq_search --preset small --iterations 3 --save_every 1 --eval_every 3
--eval_episodes 2 --rollout_batch_size 4 --batch_size 4 --max_turns 2 --max_tokens 4000
--max_new_tokens 8 --dtype float32""".split()


@pytest.fixture
def run(questions, model_folder, tmp_path, monkeypatch):
    """Return a function that runs train.py on these questions. The model has random weights, and
    each of its replies is a search."""
    monkeypatch.setattr(search, "PAUSE", 0.01)
    monkeypatch.setattr(nq_search, "parse_action", lambda reply: ("search", f"physics {reply}"))
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda *args, **kwargs: None)
    model = shutil.copytree(model_folder["text"], tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"freshper_tiny": False}))
    flags = [*SHORT, "--model", str(model), "--data", questions]

    def run(address, out):
        return train.main([*flags, "--search_url", address, "--out", str(tmp_path / out)])

    return run


def test_a_run_stops_with_its_server_and_goes_on_with_it(run, tmp_path, monkeypatch, capsys):
    calls = []
    generate = HFEngine.generate
    server = contextlib.ExitStack()
    url = server.enter_context(serve())
    assert run(url, "plain") == 0

    def generate_and_kill(engine, *args):
        calls.append(1)
        # Calls 1 and 2 are the turns of the evaluation, 3 and 4 those of iteration 1.
        if len(calls) == 6:
            server.close()
        return generate(engine, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", generate_and_kill)
        assert run(url, "stopped") == 1
    sentence = f"stopped after iteration 1: the search server {url} failed 3 times"
    assert sentence in capsys.readouterr().out
    stopped = tmp_path / "stopped"

    assert train.main(["--resume", str(stopped)]) == 2
    assert f"train.py: error: the search server {url} failed 3 times" in capsys.readouterr().err
    with serve(int(re.search(r":(\d+)/", url)[1])):
        assert train.main(["--resume", str(stopped)]) == 0
    assert contents(stopped) == contents(tmp_path / "plain")


def test_a_run_without_a_server_or_passages_does_not_begin(run, tmp_path, monkeypatch, capsys):
    with serve() as url, monkeypatch.context() as patch:
        patch.setattr(Retriever, "search", lambda *_: [[]])
        assert run(url, "run") == 2
        assert f"--search_url is {url}, whose server finds nothing" in capsys.readouterr().err
    for address in (NO_SERVER, "http://[", "http://127.0.0.1:99999999/", "http://"):
        assert run(address, "run") == 2
        sentence = capsys.readouterr().err.splitlines()[-1]
        assert sentence.startswith("train.py: error: ") and address in sentence
    assert not (tmp_path / "run").exists()
