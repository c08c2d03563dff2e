"""The table of TupleDict, row by row, and its life as a pytree."""

import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from torch.utils import _pytree as torch_pytree

from fe_runtime.tuple_dict import TupleDict, register_pytrees


@pytest.fixture
def d() -> TupleDict:
    return TupleDict(a=1, b=None, c=3)


class TestReading:
    def test_keys(self, d: TupleDict) -> None:
        assert d["a"] == 1
        assert d.get("b", "absent") is None
        assert "a" in d
        assert 1 not in d  # tests keys, never values

    def test_iteration_yields_values(self, d: TupleDict) -> None:
        x, y, z = d
        assert (x, y, z) == (1, None, 3)
        assert list(d) == [1, None, 3]
        assert tuple(d) == (1, None, 3)
        assert [v for v in d] == [1, None, 3]  # noqa: C416 - the loop itself is what is tested

    def test_positions(self, d: TupleDict) -> None:
        assert (d[0], d[2]) == (1, 3)
        assert d[True] is d[1]
        assert d.get(0) is None  # type: ignore[call-overload]

    @pytest.mark.parametrize("position", [-1, 3])
    def test_positions_out_of_range(self, d: TupleDict, position: int) -> None:
        with pytest.raises(IndexError):
            d[position]

    def test_slices(self, d: TupleDict) -> None:
        with pytest.raises(TypeError):
            d[0:2]  # type: ignore[index]

    def test_missing_key(self, d: TupleDict) -> None:
        with pytest.raises(KeyError, match="no key 'zz'; the keys are a, b, c"):
            d["zz"]
        with pytest.raises(KeyError, match="no key 'zz': the TupleDict is empty"):
            TupleDict()["zz"]
        assert d.get("zz") is None

    def test_dict_views(self, d: TupleDict) -> None:
        assert list(d.keys()) == ["a", "b", "c"]
        assert list(d.values()) == [1, None, 3]
        assert list(d.items()) == [("a", 1), ("b", None), ("c", 3)]
        assert len(d) == 3
        assert list(reversed(d)) == ["c", "b", "a"]

    def test_mapping_conversions(self, d: TupleDict) -> None:
        def keywords(**given: Any) -> dict[str, Any]:
            return given

        plain = {"a": 1, "b": None, "c": 3}
        for result in (dict(d), {**d}, keywords(**d), json.loads(json.dumps(d))):
            assert type(result) is dict
            assert list(result.items()) == list(plain.items())

    def test_equality_ignores_order(self, d: TupleDict) -> None:
        assert d == {"c": 3, "b": None, "a": 1}
        assert d == TupleDict(c=3, b=None, a=1)
        assert d != {"a": 1}

    def test_not_hashable(self, d: TupleDict) -> None:
        with pytest.raises(TypeError):
            hash(d)

    def test_match_sees_a_mapping_and_no_sequence(self, d: TupleDict) -> None:
        match d:
            case [*_]:
                pytest.fail("matched a sequence pattern")
            case {"a": x}:
                assert x == 1
            case _:
                pytest.fail("no mapping pattern matched")

    def test_empty(self) -> None:
        empty = TupleDict()
        assert not empty
        assert list(empty) == []
        with pytest.raises(IndexError):
            empty[0]

    def test_repr_names_the_keys(self, d: TupleDict) -> None:
        assert repr(d) == "TupleDict({'a': 1, 'b': None, 'c': 3})"


class TestMaking:
    def test_every_form_of_dict(self, d: TupleDict) -> None:
        for same in (TupleDict([("a", 1), ("b", None), ("c", 3)]), TupleDict({"a": 1}, b=None, c=3), TupleDict(d)):
            assert list(same.items()) == list(d.items())
            assert list(same) == [1, None, 3]

    def test_fromkeys_has_positions(self) -> None:
        assert list(TupleDict.fromkeys(["a", "b"], 7)) == [7, 7]

    @pytest.mark.parametrize(
        "again", [copy.copy, copy.deepcopy, lambda d: pickle.loads(pickle.dumps(d))], ids=["copy", "deepcopy", "pickle"]
    )
    def test_copies_keep_class_and_order(self, again: Any) -> None:
        original = TupleDict(z=[1], a=[2])
        original["later"] = 3
        result = again(original)
        assert type(result) is TupleDict
        assert list(result.items()) == [("z", [1]), ("a", [2]), ("later", 3)]
        assert list(result) == [[1], [2]]
        assert (result["z"] is original["z"]) == (again is copy.copy)

    def test_dict_operators_give_plain_dicts(self, d: TupleDict) -> None:
        assert type(d.copy()) is dict
        assert type(d | {"e": 5}) is dict
        assert type({"e": 5} | d) is dict
        assert d.copy() == d
        assert d | {"a": 5} == {"a": 5, "b": None, "c": 3}
        assert {"e": 5} | d == {"e": 5, "a": 1, "b": None, "c": 3}


class TestChanging:
    def test_assignment_shows_everywhere(self, d: TupleDict) -> None:
        d["a"] = 7
        assert (d["a"], d[0], next(iter(d))) == (7, 7, 7)

    def test_new_keys_have_no_position(self, d: TupleDict) -> None:
        d["new"] = 9
        assert d["new"] == 9
        assert len(d) == 4
        assert list(d) == [1, None, 3]
        with pytest.raises(IndexError):
            d[3]

    def test_removed_keys_leave_a_gap(self, d: TupleDict) -> None:
        del d["a"]
        assert list(d) == [None, 3]
        assert d[2] == 3
        with pytest.raises(KeyError):
            d[0]

    def test_a_removed_key_comes_back_to_its_position(self, d: TupleDict) -> None:
        d["a"] = d.pop("a") + 1
        assert list(d) == [2, None, 3]


class TestPytrees:
    @pytest.fixture(autouse=True)
    def registered(self) -> None:
        register_pytrees()
        register_pytrees()  # a second time is allowed

    def test_jax_flattens_in_insertion_order(self) -> None:
        tree = TupleDict(z=1, b=None, a=2)
        tree["later"] = 3
        leaves, structure = jax.tree_util.tree_flatten(tree)
        assert leaves == [1, 2, 3]  # jax has no leaf for None
        result = jax.tree_util.tree_unflatten(structure, leaves)
        assert type(result) is TupleDict
        assert list(result.items()) == [("z", 1), ("b", None), ("a", 2), ("later", 3)]

    def test_jax_paths_name_the_keys(self) -> None:
        (path, _), *_ = jax.tree_util.tree_flatten_with_path(TupleDict(z=1, a=2))[0]
        assert jax.tree_util.keystr(path) == "['z']"

    def test_jax_transformations(self) -> None:
        def f(tree: TupleDict) -> TupleDict:
            z, a = tree
            return TupleDict(z=z * 2, none=None, a=a + 1)

        tree = TupleDict(z=jnp.ones(2), a=jnp.zeros(2))
        for transformed in (jax.jit(f), jax.vmap(f)):
            result = transformed(tree)
            assert type(result) is TupleDict
            assert list(result.keys()) == ["z", "none", "a"]
            assert (result[0].tolist(), result[1], result[2].tolist()) == ([2.0, 2.0], None, [1.0, 1.0])
        gradient = jax.grad(lambda t: (t["z"] ** 2).sum() + t["a"].sum())(tree)
        assert type(gradient) is TupleDict
        assert [g.tolist() for g in gradient] == [[2.0, 2.0], [1.0, 1.0]]

    def test_torch_flattens_in_insertion_order(self) -> None:
        tree = TupleDict(z=1, b=None, a=2)
        leaves, structure = torch_pytree.tree_flatten(tree)
        assert leaves == [1, None, 2]
        result = torch_pytree.tree_unflatten(leaves, structure)
        assert type(result) is TupleDict
        assert list(result.items()) == [("z", 1), ("b", None), ("a", 2)]
        assert torch_pytree.treespec_loads(torch_pytree.treespec_dumps(structure)) == structure

    def test_torch_paths_name_the_keys(self) -> None:
        (path, _), *_ = torch_pytree.tree_flatten_with_path(TupleDict(z=1, a=2))[0]
        assert torch_pytree.keystr(path) == "['z']"

    def test_torch_func(self) -> None:
        result = torch.vmap(lambda x: TupleDict(double=x * 2, same=x))(torch.ones(3))
        assert type(result) is TupleDict
        assert result["double"].tolist() == [2.0, 2.0, 2.0]
        gradient = torch.func.grad(lambda t: (t["z"] ** 2).sum())(TupleDict(z=torch.ones(2)))
        assert type(gradient) is TupleDict
        assert gradient[0].tolist() == [2.0, 2.0]

    def test_torch_export(self) -> None:
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> TupleDict:
                return TupleDict(y=x + 1, amax=None)

        x = torch.ones(2)
        result = torch.export.export(Model(), (x,)).module()(x)
        assert type(result) is TupleDict
        assert (result["y"].tolist(), result["amax"]) == ([2.0, 2.0], None)


class TestCompiled:
    """A function compiled without graph breaks may make, unpack, index, take and return a TupleDict."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> None:
        torch._dynamo.reset()

    def test_returned(self) -> None:
        def f(x: torch.Tensor) -> TupleDict:
            register_pytrees()
            return TupleDict(y=x + 1, amax=None, z=x * 2)

        result = torch.compile(f, fullgraph=True, backend="eager")(torch.ones(2))
        assert type(result) is TupleDict
        assert list(result.keys()) == ["y", "amax", "z"]
        y, amax, z = result
        assert (y.tolist(), amax, z.tolist()) == ([2.0, 2.0], None, [2.0, 2.0])

    def test_made_and_read_inside(self) -> None:
        def f(x: torch.Tensor) -> torch.Tensor:
            result = TupleDict(y=x + 1, z=x * 2)
            y, _ = result
            return y + result["z"] + result[0]

        assert torch.compile(f, fullgraph=True, backend="eager")(torch.ones(2)).tolist() == [6.0, 6.0]

    def test_passed_in(self) -> None:
        def f(tree: TupleDict) -> torch.Tensor:
            return tree["y"] + tree[1]

        tree = TupleDict(y=torch.ones(2), z=torch.ones(2))
        assert torch.compile(f, fullgraph=True, backend="eager")(tree).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_framework_imported_later_is_registered_by_the_next_call(framework: str) -> None:
    check = {
        "torch": "import torch; assert torch.utils._pytree.tree_map(str, d) == {'a': '1'}, 'a leaf'",
        "jax": "import jax; assert jax.tree_util.tree_map(str, d) == {'a': '1'}, 'a leaf'",
    }[framework]
    program = f"""
import sys
from fe_runtime.tuple_dict import TupleDict, register_pytrees
d = TupleDict(a=1)
register_pytrees()
assert not {{"torch", "jax"}} & set(sys.modules)
import {framework}
register_pytrees()
{check}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_registration_races_are_harmless() -> None:
    program = """
import threading, torch, jax
from fe_runtime.tuple_dict import TupleDict, register_pytrees
errors = []
def work():
    try:
        register_pytrees()
    except BaseException as error:
        errors.append(error)
threads = [threading.Thread(target=work) for _ in range(16)]
[t.start() for t in threads]; [t.join() for t in threads]
assert not errors, errors
assert jax.tree_util.tree_map(str, TupleDict(a=1)) == {"a": "1"}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
