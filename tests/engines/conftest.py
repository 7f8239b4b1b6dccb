"""One sentence where vLLM or DeepSpeed is missing: these tests run both for real, and none is skipped."""

import importlib.util

import pytest


def pytest_sessionstart(session):
    missing = [name for name in ("vllm", "deepspeed") if importlib.util.find_spec(name) is None]
    if missing:
        pytest.exit(f"tests/engines needs {' and '.join(missing)}: see requirements-cpu-engines.txt", returncode=1)
