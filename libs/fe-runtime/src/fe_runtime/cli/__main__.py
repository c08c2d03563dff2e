"""``python -m fe_runtime.cli``: the ``fe`` command where the libraries are on the path without being installed."""

from __future__ import annotations

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
