"""Scalars and arguments of the gated activations for tests: exact in float32, and such that clamps cut."""

from __future__ import annotations

import numpy as np

SCALARS = {
    "linear_offset": 0.5,
    "geglu_alpha": 1.25,
    "glu_clamp_max": 1.5,
    "glu_clamp_min": -1.25,
    "situ_beta1": 2.0,
    "situ_beta2": 3.0,
}

_RANDOM = np.random.default_rng(0)
GATES, UPS = _RANDOM.standard_normal((2, 4000)) * np.geomspace(0.01, 30, 4000)
