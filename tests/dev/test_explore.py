"""docs/explore.html in headless Chromium shows the numbers of the Python code.

It needs Debian's package chromium-headless-shell. A script is put behind the page's own. It moves
the sliders and clicks as a reader would, and leaves what the page then has in the document.
"""

import html
import itertools
import json
import re
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest
import torch

import train
from docs import explore
from freshper.is_weights import importance_weights
from freshper.priority import exponential_decay, priorities, reward_priority
from freshper.reinforce import policy_loss
from sumtree import SumTree

USER = """
function set(sliders) {
  for (const [name, x] of Object.entries(sliders)) {
    const k = SLIDERS[name].values.findIndex((v) => v === x || (x === "inf" && v === Infinity));
    if (k < 0) throw new Error(`${name} has no ${x}`);
    get(name).value = k;
    get(name).dispatchEvent(new Event("input"));
  }
}
function cells() {
  const numbers = (row) => [...row.cells].slice(1).map((cell) => parseFloat(cell.textContent));
  return [...get("numbers").rows].map(numbers);
}
"""


def in_browser(tmp_path, expression):
    """Return the value of a JavaScript expression after the page has been drawn."""
    script = f"{USER} const result = JSON.stringify({expression});"
    script += "document.body.innerHTML = '<pre></pre>';"
    script += "document.querySelector('pre').textContent = result;"
    page = tmp_path / "page.html"
    page.write_text(f"{explore.PAGE.read_text(encoding='utf-8')}<script>{script}</script>")

    flags = "--headless --no-sandbox --disable-gpu --dump-dom".split()
    words = ["chromium-headless-shell", *flags, f"--user-data-dir={tmp_path}/profile", page]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    (result,) = re.findall("<body><pre>(.*)</pre>", done.stdout)
    return json.loads(html.unescape(result))


@pytest.fixture(scope="module")
def data():
    page = explore.PAGE.read_text(encoding="utf-8")
    return json.loads(explore.DATA.search(page)[0].partition("\n")[2].rpartition("\n")[0])


def tree_of(data, tau, alpha, epsilon):
    """Return the sum tree of the page's episodes at the page's time."""
    base = reward_priority(data["reward"], epsilon)
    p = priorities(base, np.array(data["age"]), partial(exponential_decay, tau=tau))
    tree = SumTree(len(p))
    tree.fill(p**alpha)
    return tree


def test_probabilities_draws_and_weights(tmp_path, data):
    settings = [(20, 0.6, 0.1, 0.4), ("inf", 0.6, 0.1, 1), (5, 1, 1e-6, 0), (100, 0, 1, 0.5)]
    cases = [dict(zip(("tau", "alpha", "epsilon", "beta"), values)) for values in settings]
    act = "(set(sliders), get('draw').click(), {...shown, cells: cells()})"
    results = in_browser(tmp_path, f"{json.dumps(cases)}.map((sliders) => {act})")

    age = np.array(data["age"])
    won = np.array(data["reward"]) > 0
    for (tau, alpha, epsilon, beta), shown in zip(settings, results, strict=True):
        tree = tree_of(data, float(tau), alpha, epsilon)
        p = tree[np.arange(len(age))] / tree.total()
        drawn = shown["drawn"]
        masses = np.array(shown["masses"])
        np.testing.assert_allclose(shown["probabilities"], p, rtol=1e-12)
        assert drawn == tree.find(masses).tolist()
        assert np.floor(32 * masses / tree.total()).tolist() == list(range(32))  # a draw a slice
        weights = importance_weights(p[drawn], beta)
        np.testing.assert_allclose(shown["weights"], weights, rtol=1e-12)

        successes, ages, *_, ess = shown["cells"]
        # Python and JavaScript round a tie in different directions.
        shares = [100 * won.mean(), 100 * p @ won, 100 * won[drawn].mean()]
        assert successes == pytest.approx(shares, abs=0.51)
        assert ages == pytest.approx([age.mean(), p @ age, age[drawn].mean()], abs=0.051)
        assert ess[-1] == pytest.approx(weights.sum() ** 2 / (weights**2).sum(), abs=0.051)


def test_the_walk_to_a_clicked_mass(tmp_path):
    click = "new MouseEvent('click', {clientX: box.x + share * box.width})"
    drawn = "[...get('mass-bar').children].every((bar) => !(bar.getAttribute('width') < 0))"
    act = f"(get('mass-bar').dispatchEvent({click}), {{...showTree(), drawn: {drawn}}})"
    first = "set({tau: 5}); const box = get('mass-bar').getBoundingClientRect();"
    clicks = f"(() => {{ {first} return [0, 0.2, 0.5, 0.8, 0.99].map((share) => {act}); }})()"
    for shown in in_browser(tmp_path, clicks):
        nodes = list(shown["nodes"].values())
        tree = SumTree(8)
        tree.fill(np.array(nodes[8:]))
        np.testing.assert_allclose(nodes, tree.nodes, rtol=1e-15)
        assert shown["drawn"]
        assert shown["leaf"] == tree.find(np.array([shown["mass"]]))[0]


def test_the_loss_of_a_token(tmp_path):
    grid = itertools.product((0.5, 1, 1.3, 4), (-2, -0.5, 1), (0.1, 0.2), (0, 3))
    cases = [dict(zip(("rho", "advantage", "clip", "dual"), values)) for values in grid]
    act = "(set(s), tokenLoss(s.rho, s.advantage, s.clip, s.dual))"
    results = in_browser(tmp_path, f"{json.dumps(cases)}.map((s) => {act})")
    mask = torch.ones(1, 1, dtype=torch.bool)
    for case, shown in zip(cases, results, strict=True):
        log_ratio = torch.tensor([[case["rho"]]], dtype=torch.float64).log().requires_grad_()
        advantage = torch.full((1, 1), float(case["advantage"]), dtype=torch.float64)
        bounds = {"ratio_clip": case["clip"], "dual_clip": float(case["dual"])}
        loss, _ = policy_loss(log_ratio, torch.zeros(1, 1), advantage, mask, **bounds)
        loss.backward()
        assert shown["loss"] == pytest.approx(loss.item(), rel=1e-12)
        slope = -log_ratio.grad.item() / case["rho"]
        assert shown["slope"] == pytest.approx(slope, rel=1e-12), case


def test_data_cannot_end_the_script_and_the_page_loads_nothing(tmp_path, monkeypatch, data):
    hostile = "</script><script>document.title = 1</script>"
    page = tmp_path / "explore.html"
    shutil.copy(explore.PAGE, page)
    monkeypatch.setattr(explore, "PAGE", page)
    explore.write(data | {"run": hostile})
    assert in_browser(tmp_path, "[DATA.run, get('run').textContent]") == [hostile] * 2
    text = page.read_text(encoding="utf-8")
    assert text.count("</script>") == 2
    assert not re.search(r"https?:|\b(?:src|href)=|@import|url\(|fetch\(", text)


def test_columns_of_a_run(tmp_path):
    """While the weights stand still the drift is 0."""
    flags = "--env frozenlake --lr 1e-12 --iterations 2 --rollout_batch_size 8 --batch_size 8"
    flags += f" --eval_episodes 4 --out {tmp_path / 'run'}"
    assert train.main(flags.split()) == 0
    columns = explore.columns(tmp_path / "run")
    assert columns["age"] == [6, 6, 3, 3]
    assert max(columns["drift"]) < 1e-6
