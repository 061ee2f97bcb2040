from __future__ import annotations

import math

import pytest

from dapo_components.data.names import import_object, nearest_name


def test_nearest_name_ignores_case_and_keeps_the_spelling_of_the_option():
    assert nearest_name("ANSWR", ["Answer", "problem"]) == "did you mean 'Answer'? Available: Answer, problem"


def test_nearest_name_of_nothing():
    assert nearest_name("x", []) == "available: nothing"


@pytest.mark.parametrize("path", ["math:sqrt", "math.sqrt"])
def test_import_object(path):
    assert import_object(path) is math.sqrt


def test_import_object_walks_attributes():
    assert import_object("collections:OrderedDict.fromkeys")("ab") == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("sqrt", "must look like 'package.module:name', got 'sqrt'"),
        ("math:", "must look like 'package.module:name', got 'math:'"),
        ("no_such_module_here:f", "cannot import 'no_such_module_here'"),
        ("math:sqr", "'math' has no 'sqr'.*did you mean 'sqrt'"),
    ],
)
def test_import_object_explains(path, message):
    with pytest.raises(ValueError, match=message):
        import_object(path)
