"""Puts ``support`` on the path: the naive loops that references and kernels are compared with."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent / "support")

if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)
