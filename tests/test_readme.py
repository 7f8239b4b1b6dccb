"""What the README says exists: every symbol of the paper-to-code table, every file, every flag."""

import importlib
import re
from pathlib import Path

import pytest

from freshper.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def table(heading):
    section = README.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    return rows[2:]


@pytest.mark.parametrize(
    "symbol", sorted({s for row in table("Paper ↔ code") for s in re.findall(r"`([a-z][\w.]+)`", row[1])})
)
def test_every_symbol_of_the_table_exists(symbol):
    if (ROOT / symbol).is_file() or symbol in Config.__dataclass_fields__:
        return
    parts = symbol.split(".")
    for n in range(len(parts), 0, -1):
        if (ROOT / Path(*parts[:n])).with_suffix(".py").is_file():
            found = importlib.import_module(".".join(parts[:n]))
            for name in parts[n:]:
                found = getattr(found, name)
            return
    pytest.fail(f"{symbol} is nowhere")


def test_the_table_covers_the_paper():
    """Every equation of sections 3.2 to 3.5, every line of Algorithm 1 that does something, every table."""
    text = " ".join(cell for row in table("Paper ↔ code") for cell in row[:1])
    for label in (
        "objective", "per_sampling", "is_weights", "importance_ratio", "age_decay", "fresh_priority", "is_correction",
        "weighted_loss", "ess_def", "ess_decay_final", "var_chi2", "main_results", "env_details", "config_comparison",
        "training_config", "replay_config", "llm_main", "vlm_main", "tau_ablation", "is_ablation",
    ):  # fmt: skip
        assert label in text, label
    for line in (2, 3, 4, 5, 6, 8, 9, 10, 12):
        assert re.search(rf"\blines? [^|]*\b{line}\b", text), line


def test_every_file_and_flag_named_exists():
    for path in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|png|txt|md))`", README)):
        assert (ROOT / path).exists() or path == "curve.png" or path == "diagnostics.png", path
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    ours = [s for s in spans if not re.match(r"python (-m|compare.py|benchmarks/)", s)]  # flags of train.py
    for flag in {flag for span in ours for flag in re.findall(r"--([a-z_]+)", span)} - {"help", "build", "arm"}:
        assert flag in Config.__dataclass_fields__, flag
