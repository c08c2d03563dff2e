"""The tests of this library share naive loops, ``conv_oracle``."""

from __future__ import annotations

import sys
from pathlib import Path

SUPPORT = str(Path(__file__).parent / "support")

if SUPPORT not in sys.path:
    sys.path.append(SUPPORT)
