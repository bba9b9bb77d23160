"""Python imports this at its start where its folder is in PYTHONPATH: see ``tests/harness/eager.py``.

That file is loaded by its path: a program that runs elsewhere does not find the package.
"""

import importlib.util
from pathlib import Path

_spec = importlib.util.spec_from_file_location(
    "hvd_adaptive_tests_eager", Path(__file__).resolve().parents[1] / "eager.py"
)
assert _spec is not None
assert _spec.loader is not None
_eager = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_eager)
_eager.without_compiler()
