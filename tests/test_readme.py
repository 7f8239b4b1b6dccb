"""What the README says exists: every file, flag and link; every row of its table of differences has its evidence."""

import re
from pathlib import Path

import pytest
from test_reading import exists

from freshper.config import Config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
SECTION = README.split("## Where we differ, and why\n")[1].split("\n## ")[0]
DIFFERENCES = [
    [cell.strip() for cell in line.split("|")[1:-1]] for line in SECTION.splitlines() if line.startswith("| ")
]


@pytest.mark.parametrize("row", DIFFERENCES[1:], ids=lambda row: row[0])
def test_every_difference_has_its_evidence(row):
    *_, why, evidence = row
    assert len(row) == 5 and len(why) > 10
    if found := re.fullmatch(r'RESULTS.md, "(.+)"', evidence):
        assert re.search(rf"(?m)^(#+ |\*\*){re.escape(found[1])}", RESULTS), evidence
    else:
        assert exists(evidence.strip("`")), evidence


def test_every_file_and_flag_named_exists():
    for path in set(re.findall(r"`((?:[a-z_]+/)*[a-z_]+\.(?:py|png|txt|md))`", README)):
        assert (ROOT / path).exists() or path == "curve.png" or path == "diagnostics.png", path
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert link.startswith("http") or (ROOT / link).exists(), link
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", README, flags=re.DOTALL))
    ours = [s for s in spans if not re.match(r"python (-m|compare.py|benchmarks/)", s)]  # flags of train.py
    for flag in {flag for span in ours for flag in re.findall(r"--([a-z_]+)", span)} - {"help", "build", "arm"}:
        assert flag in Config.__dataclass_fields__, flag
