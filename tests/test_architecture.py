"""Rules about the source as a whole; import directions are checked by import-linter (``make layers``)."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from tests.source_sizes import REPOSITORY, body_lines, file_lines, sources

LIBRARY = sources("dapo_components")
MODULES = [path for path in LIBRARY if path.name != "__init__.py"]
PACKAGES = [path for path in LIBRARY if path.name == "__init__.py"]
RECIPES = [path for path in sources("recipes") if path.name != "__init__.py"]


@pytest.fixture(scope="module")
def exported() -> dict[str, Any]:
    """Every name in an ``__all__``, with its value."""
    values = {}
    for path in PACKAGES:
        module = importlib.import_module(".".join(path.parts[:-1]))
        names = [name for name in getattr(module, "__all__", ()) if not name.startswith("__")]
        values |= {f"{module.__name__}.{name}": getattr(module, name) for name in names}
    assert len(values) >= 60  # guards the tests below against collecting nothing
    return values


def test_every_module_has_its_test_file():
    expected = {path: Path("tests", *path.parts[1:-1], f"test_{path.name}") for path in MODULES}
    assert [f"{path} needs {test}" for path, test in expected.items() if not (REPOSITORY / test).exists()] == []


def test_every_recipe_and_start_up_file_has_its_test_file():
    tests = [*sources("tests/recipes"), *sources("tests/startup"), Path("tests/test_clean_install.py")]
    names = " ".join(test.stem for test in tests)
    shipped = [path for path in RECIPES + sources("startup") if path.name != "hatch_build.py"]
    assert [str(path) for path in shipped if f"test_{path.stem}" not in names] == []


def is_record_or_type(value: Any) -> bool:
    """Constants, type aliases, protocols and records: named in annotations, met as results, seldom built by a user."""
    if inspect.isclass(value):
        return dataclasses.is_dataclass(value) or getattr(value, "_is_protocol", False)
    return not inspect.isfunction(value)


def test_every_exported_name_is_used_in_a_test(exported):
    files = [path for path in sources("tests") if path.name != "test_architecture.py"]
    words = {word for path in files for word in re.findall(r"\w+", (REPOSITORY / path).read_text("utf-8"))}
    untested = [name for name in exported if name.rpartition(".")[2] not in words]
    assert [name for name in untested if not is_record_or_type(exported[name])] == []


def test_every_exported_class_and_function_has_a_runnable_example(exported):
    missing = []
    for name, value in exported.items():
        if is_record_or_type(value) or (inspect.isclass(value) and issubclass(value, BaseException)):
            continue
        # The class's own text: inspect.getdoc would fall back on that of a base class.
        if ">>> " not in (value.__doc__ or ""):
            missing.append(name)
    assert missing == []


def test_every_exported_class_and_function_is_documented(exported):
    documented = {
        name: value for name, value in exported.items() if inspect.isclass(value) or inspect.isfunction(value)
    }
    assert [name for name, value in documented.items() if not (value.__doc__ or "").strip()] == []


def test_files_stay_below_the_hard_limits():
    limits = dict.fromkeys(LIBRARY, 400) | dict.fromkeys(RECIPES, 450)
    lengths = {str(path): file_lines(path) for path, limit in limits.items() if file_lines(path) > limit}
    assert lengths == {}


def test_function_bodies_stay_below_twice_the_soft_limit():
    bodies = {name: count for path in LIBRARY + RECIPES for name, count in body_lines(path).items()}
    assert len(bodies) >= 100
    assert {name: count for name, count in bodies.items() if count > 80} == {}
