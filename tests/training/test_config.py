"""Every fault of a config is named before anything is built."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Literal

import pytest

from dapo_components.training.config import ConfigError, build, component_faults, locate, nearest, parse_config

PAIR = f"{__name__}.Pair"


@dataclass
class Pair:
    """A component: two numbers, the first of which the caller may add by position."""

    left: int
    right: int = 2


def explode() -> None:
    raise TypeError("from inside")


def accepts_anything(**arguments: Any) -> dict[str, Any]:
    return arguments


@dataclass(kw_only=True)
class Inner:
    every: int = 0
    names: list[str] = field(default_factory=list)
    size: int


@dataclass(kw_only=True)
class Config:
    num_steps: int
    learning_rate: float = 1e-6
    mode: Literal["raise", "skip"] = "raise"
    verbose: bool = False
    limit: int | None = None
    inner: Inner | None = None
    model: dict[str, Any] | None = None
    others: list[dict[str, Any]] = field(default_factory=list)


def fault(values: dict[str, Any], schema: Any = Config) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values, schema)
    return str(caught.value)


class TestParse:
    def test_values_defaults_and_nested_dataclasses(self):
        parsed = parse_config(
            {"num_steps": 3, "limit": 7, "mode": "skip", "inner": {"size": 5, "names": ["a", "b"]}}, Config
        )
        inner = Inner(size=5, names=["a", "b"])
        assert parsed == Config(num_steps=3, limit=7, mode="skip", inner=inner)

    def test_an_int_is_a_float_and_becomes_one(self):
        parsed = parse_config({"num_steps": 1, "learning_rate": 1}, Config)
        assert isinstance(parsed.learning_rate, float)

    def test_unknown_key_names_the_nearest(self):
        assert fault({"num_steps": 1, "learning_rat": 0.1}) == (
            "unknown config key 'learning_rat'; did you mean 'learning_rate'?"
        )
        assert fault({"num_steps": 1, "zzz": 0.1}) == "unknown config key 'zzz'"
        assert fault({"num_steps": 1, 5: 0.1}) == "unknown config key '5'"  # type: ignore[dict-item]

    def test_missing_key_names_its_type(self):
        assert fault({}) == "missing config key 'num_steps' (int)"

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("num_steps", "3", "config key 'num_steps' must be int, got '3' (str)"),
            ("num_steps", 3.0, "config key 'num_steps' must be int, got 3.0 (float)"),
            ("num_steps", True, "config key 'num_steps' must be int, got True (bool)"),
            ("num_steps", None, "config key 'num_steps' must be int, got None (NoneType)"),
            ("learning_rate", True, "config key 'learning_rate' must be float, got True (bool)"),
            ("learning_rate", "1e-6", "config key 'learning_rate' must be float, got '1e-6' (str)"),
            ("verbose", 1, "config key 'verbose' must be bool, got 1 (int)"),
            ("mode", "rais", "config key 'mode' must be one of raise, skip, got 'rais'"),
            ("limit", "x", "config key 'limit' must be int or null, got 'x' (str)"),
            ("inner", 3, "config key 'inner' must be Inner or null, got 3 (int)"),
            ("model", "x", "config key 'model' must be dict or null, got 'x' (str)"),
            ("others", {"a": 1}, "config key 'others' must be list, got {'a': 1} (dict)"),
            ("others", [3], "config key 'others[0]' must be dict, got 3 (int)"),
        ],
    )
    def test_wrong_type_names_key_type_and_value(self, key, value, message):
        assert fault({"num_steps": 1, key: value}) == message

    def test_faults_of_a_nested_dataclass_carry_its_name(self):
        assert fault({"num_steps": 1, "inner": {"evry": 2, "names": ["a", 3]}}).splitlines() == [
            "unknown config key 'inner.evry'; did you mean 'every'?",
            "config key 'inner.names[1]' must be str, got 3 (int)",
            "missing config key 'inner.size' (int)",
        ]

    def test_all_faults_are_listed_at_once(self):
        values = {
            "num_step": 1,
            "verbose": "yes",
            "inner": {},
            "model": {"_component_": PAIR, "middle": 1},
            "others": [{"_component_": "math.square"}],
        }
        assert fault(values).splitlines() == [
            "unknown config key 'num_step'; did you mean 'num_steps'?",
            "missing config key 'num_steps' (int)",
            "config key 'verbose' must be bool, got 'yes' (str)",
            "missing config key 'inner.size' (int)",
            f"model: {PAIR} has no argument 'middle'",
            "others[0]: _component_ 'math.square': math has no 'square'; did you mean 'sqrt'?",
        ]


class TestComponents:
    @pytest.mark.parametrize(
        ("path", "message"),
        [
            ("nosuchpackage.thing", "'nosuchpackage.thing' cannot be imported: there is no module 'nosuchpackage'"),
            ("plain", "'plain' cannot be imported: there is no module 'plain'"),
            ("fractions.Fracton", "'fractions.Fracton': fractions has no 'Fracton'; did you mean 'Fraction'?"),
            ("email.mime.nothing.X", "'email.mime.nothing.X': email.mime has no 'nothing'"),
            ("a..b", "must be a dotted path such as 'package.module.Name', got 'a..b'"),
            ("", "must be a dotted path such as 'package.module.Name', got ''"),
            (3, "must be a dotted path such as 'package.module.Name', got 3"),
        ],
    )
    def test_a_path_that_does_not_exist(self, path, message):
        with pytest.raises(ConfigError) as caught:
            locate(path)
        assert message in str(caught.value)
        assert component_faults({"_component_": path}, "model") == [f"model: {caught.value}"]

    def test_a_package_that_a_module_needs_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "needs_something.py").write_text("import needs\n")  # its own name begins with the missing one's
        monkeypatch.syspath_prepend(tmp_path)
        with pytest.raises(ConfigError, match="cannot be imported: No module named 'needs'"):
            locate("needs_something.function")

    def test_attributes_of_attributes_are_found(self):
        assert locate("fractions.Fraction.limit_denominator") is Fraction.limit_denominator

    def test_unknown_argument_names_the_nearest(self):
        assert component_faults({"_component_": PAIR, "rigth": 1}, "loss") == [
            f"loss: {PAIR} has no argument 'rigth'; did you mean 'right'?"
        ]
        assert component_faults({"_component_": f"{__name__}.accepts_anything", "rigth": 1}, "loss") == []

    def test_components_are_found_at_any_depth(self):
        tree = {"a": [{"b": {"_component_": PAIR, "c": {"_component_": PAIR, "x": 1}, "left": 1}}]}
        assert component_faults(tree, "top") == [
            f"top.a[0].b.c: {PAIR} has no argument 'x'",
            f"top.a[0].b: {PAIR} has no argument 'c'",
        ]

    def test_nearest(self):
        assert nearest("sed", ["seed", "steps"]) == "; did you mean 'seed'?"
        assert nearest("qqq", ["seed"]) == ""


class TestBuild:
    def test_nested_components_are_built_first(self):
        node = {
            "_component_": PAIR,
            "left": {"_component_": PAIR, "left": 3},
            "right": [{"_component_": "fractions.Fraction", "numerator": 1, "denominator": 3}, {"plain": 1}],
        }
        built: Any = build(node)
        assert built == Pair(Pair(3), [Fraction(1, 3), {"plain": 1}])  # type: ignore[arg-type]

    def test_the_caller_adds_arguments_and_overrides(self):
        assert build({"_component_": PAIR, "right": 5}, 4) == Pair(4, 5)
        assert build({"_component_": PAIR, "left": 1, "right": 5}, right=6) == Pair(1, 6)

    def test_nothing_builds_nothing(self):
        assert build(None) is None

    def test_the_node_stays_as_it_was(self):
        node = {"_component_": PAIR, "left": {"_component_": PAIR, "left": 3}}
        before = {"_component_": PAIR, "left": {"_component_": PAIR, "left": 3}}
        build(node)
        assert node == before

    @pytest.mark.parametrize(
        ("node", "message"),
        [
            ({"left": 1}, r"a component needs the key '_component_', got the keys \['left'\]"),
            ({"_component_": PAIR}, rf"{PAIR}: missing a required argument: 'left'; given \[\]"),
            ({"_component_": PAIR, "left": 1, "rigt": 1}, "got an unexpected keyword argument 'rigt'; given"),
            ({"_component_": "math.pi"}, "math.pi: .* is not a callable object"),
        ],
    )
    def test_refusals(self, node, message):
        with pytest.raises(ConfigError, match=message):
            build(node)

    def test_a_constructor_that_chokes_on_a_value_is_named_with_its_arguments(self):
        with pytest.raises(ConfigError, match=r"explode cannot be built with \{\}: TypeError: from inside") as caught:
            build({"_component_": f"{__name__}.explode"})
        assert isinstance(caught.value.__cause__, TypeError)


def test_the_schema_may_be_any_dataclass():
    made = dataclasses.make_dataclass("Made", [("seed", int, 3)])
    assert parse_config({}, made) == made(3)


def test_a_component_can_be_switched_off_on_the_command_line():
    """`key=null` arrives from torchtune as a component without a path."""
    made = dataclasses.make_dataclass("Made", [("penalty", dict[str, Any] | None, None)])
    assert parse_config({"penalty": {"_component_": None, "max_length": 8}}, made).penalty is None
