"""The bridges are tested through a small library of one operation, ``fe_toy``, built as every domain library is."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = str(Path(__file__).parent)

if HERE not in sys.path:
    sys.path.append(HERE)
