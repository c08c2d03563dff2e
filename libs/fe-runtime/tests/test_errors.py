"""The exception classes and the one sentence."""

import pickle

import pytest

from fe_runtime import errors
from fe_runtime.errors import (
    DeterminismError,
    DtypeError,
    FallbackWarning,
    FeDeprecationWarning,
    InvalidArgumentError,
    NotCompiledError,
    NotSupportedError,
    explain,
)


@pytest.mark.parametrize(
    ("cls", "builtins"),
    [
        (InvalidArgumentError, (ValueError,)),
        (DtypeError, (TypeError,)),
        (NotSupportedError, (NotImplementedError, RuntimeError)),
        (NotCompiledError, (RuntimeError, ValueError)),
        (DeterminismError, (RuntimeError,)),
        (FallbackWarning, (UserWarning,)),
        (FeDeprecationWarning, (FutureWarning,)),
    ],
)
def test_each_class_is_caught_as_the_builtins_that_callers_name(
    cls: type[Exception], builtins: tuple[type[Exception], ...]
) -> None:
    for builtin in builtins:
        with pytest.raises(builtin, match="the text"):
            raise cls("the text")


def test_every_public_class_is_listed() -> None:
    classes = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert classes <= set(errors.__all__) <= set(vars(errors))


def test_not_supported_carries_its_reason() -> None:
    plain = NotSupportedError("no kernel")
    assert (plain.reason, plain.found, plain.supported) == ("no kernel", None, ())
    full = NotSupportedError("text", reason="architecture", found=(8, 0), supported=((9, 0), (10, 0)))
    assert (str(full), full.reason, full.found, full.supported) == ("text", "architecture", (8, 0), ((9, 0), (10, 0)))
    again = pickle.loads(pickle.dumps(full))
    assert (str(again), again.reason, again.found) == ("text", "architecture", (8, 0))


def test_the_sentence() -> None:
    assert explain("op", "x", "have rank 2", 3) == "op: x must have rank 2; got 3."
    assert explain("op", "x", "have rank 2", 3, "Reshape it.") == "op: x must have rank 2; got 3. Reshape it."
