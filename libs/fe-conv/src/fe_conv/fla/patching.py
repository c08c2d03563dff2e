"""Replace functions of the flash-linear-attention package in the running process, and put them back."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .targets import TARGETS, Target, select

__all__ = ["accelerate_fla", "is_accelerated", "restore_fla"]

_lock = threading.RLock()
_patches: dict[Target, Patch] = {}


def accelerate_fla(verbose: bool = True, *, targets: object = None) -> None:
    """Let these libraries serve selected functions of the flash-linear-attention package where they can.

    Each replaced function serves a call natively, or hands it unchanged to the function it replaced;
    ``last_path()`` and its siblings tell which. The effect is on the whole process, and on modules that have imported
    such a function under its own name.

    Parameters
    ----------
    verbose
        Print one line that names what was replaced.
    targets
        ``None``: ``"gated_delta_rule"`` (``"gdn"``) and ``"kda"``, as far as the installed package has them.
        Otherwise one name or several, also of ``"gated_mlp"`` (``"mlp"``) and ``"short_conv"`` (``"shortconv"``):
        then all of them, or none and an ``ImportError``.

    Raises
    ------
    ImportError
        The package, or what was asked for, is not there, or not as the replacement needs it.
    TypeError, ValueError
        ``targets`` is no name or iterable of names, or names nothing known.

    Notes
    -----
    What is replaced already stays so; a function that somebody else has replaced since is replaced afresh, on top.
    ``gated_delta_rule`` and ``kda`` have no native kernel yet: every call goes to the original.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: flash-linear-attention integration, activation rules.
    """
    wanted = select(targets, tuple(target for target in TARGETS if target.is_default))
    with _lock:
        fresh, problems = _prepare(wanted)
        if problems and (targets is not None or len(problems) == len(wanted)):
            reasons = "; ".join(f"{target.name}: {reason}" for target, reason in problems.items())
            fix = "Install flash-linear-attention 0.5.2 to 0.6, or leave these targets out."
            raise ImportError(f"accelerate_fla: nothing was replaced. {reasons}. {fix}")
        for patch in fresh:
            patch.apply()
            _patches[patch.target] = patch
    if verbose and fresh:
        print(f"accelerate_fla: replaced {', '.join(patch.target.name for patch in fresh)}", file=sys.stdout)


def restore_fla(*, targets: object = None) -> None:
    """Put the original functions back, wherever our replacement is still in place.

    Parameters
    ----------
    targets
        ``None``: everything that is replaced; otherwise as in :func:`accelerate_fla`.

    Raises
    ------
    TypeError, ValueError
        ``targets`` is no name or iterable of names, or names nothing known.

    Source
    ------
    Contract of cuDNN Frontend OSS 1.32: flash-linear-attention integration, activation rules.
    """
    with _lock:
        for target in select(targets, TARGETS):
            patch = _patches.pop(target, None)
            if patch is not None:
                patch.undo()


def is_accelerated(target: str | None = None) -> bool:
    """Return whether a target is replaced and nobody has replaced it since; with ``None``, whether any is.

    Raises
    ------
    TypeError, ValueError
        ``target`` is no name, or not a known one.
    """
    with _lock:
        return any(_is_live(known) for known in select(target, TARGETS))


@dataclass(frozen=True)
class Patch:
    """A replacement: what it replaces, where, and by what."""

    target: Target
    holder: Any
    original: Callable[..., Any]
    replacement: Callable[..., Any]

    def is_live(self) -> bool:
        """Whether the replacement is where it was put."""
        return vars(self.holder).get(self.target.attribute) is self.replacement

    def apply(self) -> None:
        """Put the replacement in place of the original."""
        self._exchange(self.original, self.replacement)

    def undo(self) -> None:
        """Put the original in place of the replacement, wherever that still is."""
        self._exchange(self.replacement, self.original)

    def _exchange(self, old: object, new: object) -> None:
        if vars(self.holder).get(self.target.attribute) is old:
            setattr(self.holder, self.target.attribute, new)
        if self.target.owner is None:
            _rebind(self.target.names, old, new)


def _is_live(target: Target) -> bool:
    return target in _patches and _patches[target].is_live()


def _prepare(wanted: Sequence[Target]) -> tuple[list[Patch], dict[Target, str]]:
    """Return the patches to apply, and the targets that cannot be replaced, with the reason."""
    fresh: list[Patch] = []
    problems: dict[Target, str] = {}
    for target in wanted:
        if _is_live(target):
            continue
        stale = _patches.pop(target, None)
        if stale is not None:
            stale.undo()  # somebody took the place; modules that hold ours still get the function it replaced
        try:
            holder = target.find()
            original = vars(holder)[target.attribute]
            fresh.append(Patch(target, holder, original, target.replacement(original, holder)))
        except ImportError as error:
            problems[target] = str(error)
    return fresh, problems


def _rebind(names: Sequence[str], old: object, new: object) -> None:
    """Set the attributes of these names that are ``old`` to ``new``, in every module that was imported."""
    for module in list(sys.modules.values()):
        for name in names:
            try:
                # Only what is there: asking a lazy module for a name may import anything.
                if vars(module).get(name) is old:
                    setattr(module, name, new)
            except Exception:  # whatever somebody put among the modules is not our business
                continue
