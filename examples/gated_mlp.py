"""A Llama-style gated MLP on ``gemm_swiglu``: a torch module, trained for some steps beside the same in plain torch.

    python examples/gated_mlp.py [--device cuda] [--steps 20] [--hidden 256] [--features 704] [--tokens 512]

Needs torch. On a Hopper GPU kernels do the work of forward and backward, elsewhere the reference. It ends with status 0
only if the gradients agree with those of plain torch in float64 and both MLPs learn alike.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import Tensor, nn

from fe_gemm import gemm_swiglu_wrapper, interleave_gate_up, split_gate_up

DTYPE = torch.bfloat16
TOLERANCE = 2.0**-6
"""Of a gradient, relative to its norm: half a dozen roundings to bf16, of 2^-9 each, lie on its way."""


class GatedMlp(nn.Module):
    """``down(silu(gate(x)) * up(x))``; gate and up are one weight, their rows interleaved in blocks of 32.

    The parameter is kept as the kernel wants it, so no step copies weights. ``interleave_gate_up`` makes it of the two
    matrices of a checkpoint, ``split_gate_up`` gives them back.
    """

    def __init__(self, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(interleave_gate_up(w_gate, w_up))
        self.down = nn.Parameter(w_down.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of (..., hidden)."""
        rows = x.reshape(-1, x.shape[-1], 1)  # (M, K, L) with L = 1
        product = gemm_swiglu_wrapper(rows, self.gate_up[:, :, None], ab12_dtype=x.dtype, c_dtype=x.dtype)
        hidden = product["c_tensor"][:, : self.down.shape[1], 0]
        return nn.functional.linear(hidden, self.down).reshape(x.shape)

    def gradients(self) -> list[Any]:
        """Return the gradients of gate, up and down as a checkpoint would order them."""
        features = self.down.shape[1]
        return [*split_gate_up(self.gate_up.grad, features), self.down.grad]


class PlainMlp(nn.Module):
    """The same in torch alone."""

    def __init__(self, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Parameter(w.clone()) for w in (w_gate, w_up, w_down))

    def forward(self, x: Tensor) -> Tensor:
        """Return the MLP of (..., hidden)."""
        linear = nn.functional.linear
        return linear(nn.functional.silu(linear(x, self.gate)) * linear(x, self.up), self.down)

    def gradients(self) -> list[Any]:
        """Return the gradients of gate, up and down."""
        return [self.gate.grad, self.up.grad, self.down.grad]


def main() -> int:
    """Compare gradients, then train both; return the exit status."""
    options = _options()
    generator = torch.Generator().manual_seed(0)
    weights, teacher = (_weights(options.hidden, options.features, generator, options.device) for _ in range(2))
    x = torch.randn(4, options.tokens // 4, options.hidden, generator=generator).to(options.device, DTYPE)
    target = PlainMlp(*teacher)(x).detach().float()

    ours, plain = GatedMlp(*weights), PlainMlp(*weights)
    compiled: Any = torch.compile(ours, fullgraph=True)
    mine = gradients(ours, compiled, x, target)
    exact = gradients(wide := PlainMlp(*(w.double() for w in weights)), wide, x.double(), target)
    worst = max(float((a.double() - b).norm() / b.norm()) for a, b in zip(mine, exact, strict=True))
    print(f"gradients differ from float64 by at most {worst:.1e} of their norm")

    steps = options.steps
    losses = {"gemm_swiglu": train(compiled, x, target, steps), "torch": train(plain, x, target, steps)}
    print("step " + " ".join(f"{name:>12}" for name in losses))
    for step, row in enumerate(zip(*losses.values(), strict=True)):
        print(f"{step:4} " + " ".join(f"{loss:12.5f}" for loss in row))
    (first, *_, last), (*_, same) = losses["gemm_swiglu"], losses["torch"]
    learnt = last < 0.9 * first and abs(last - same) < 0.05 * first
    return 0 if worst <= TOLERANCE and learnt else 1


def gradients(model: GatedMlp | PlainMlp, call: Any, x: Tensor, target: Tensor) -> list[Any]:
    """Return the gradients of x, gate, up and down; ``call`` is the model or what ``torch.compile`` made of it."""
    given = x.clone().requires_grad_()
    loss(call(given), target).backward()
    return [given.grad, *model.gradients()]


def train(model: Any, x: Tensor, target: Tensor, steps: int) -> list[float]:
    """Return the loss before each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model(x), target)
        value.backward()
        optimizer.step()
        losses.append(float(value.detach()))
    return losses


def loss(y: Tensor, target: Tensor) -> Tensor:
    """Return the mean square error relative to the target's mean square."""
    return (y - target).square().mean() / target.square().mean()


def _weights(hidden: int, features: int, generator: torch.Generator, device: str) -> list[Tensor]:
    shapes = ((features, hidden), (features, hidden), (hidden, features))
    return [(torch.randn(s, generator=generator) * s[1] ** -0.5).to(device, DTYPE) for s in shapes]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--features", type=int, default=704)
    parser.add_argument("--tokens", type=int, default=512)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
