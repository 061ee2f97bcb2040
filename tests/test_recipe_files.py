from __future__ import annotations

from pathlib import Path

import pytest

from dapo_components.recipe_files import (
    RecipeFileError,
    copy_recipe_file,
    list_configs,
    list_recipes,
    recipe_root,
    runnable_path,
    shadowing_package,
)

REPOSITORY = Path(__file__).parents[1]


def test_root_is_the_checkouts_recipes():
    assert recipe_root() == REPOSITORY / "recipes"


def test_every_recipe_and_config_is_listed_with_a_summary():
    assert {file.path for file in list_recipes()} == set((REPOSITORY / "recipes").glob("[!_]*.py"))
    assert {file.path for file in list_configs()} == set((REPOSITORY / "recipes/configs").rglob("*.yaml"))
    assert [file.name for file in list_recipes() + list_configs() if not file.summary] == []


def test_names_are_unique_so_that_cp_is_unambiguous():
    names = [file.name for file in list_recipes() + list_configs()]
    assert sorted(names) == sorted(set(names))


def test_copy_names_itself_in_its_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    copy = copy_recipe_file("dapo_full", "mine/my_dapo.py")
    text = copy.read_text("utf-8")
    assert "tune run mine/my_dapo.py --config" in text
    assert "recipes/dapo_full.py" not in text
    original = (REPOSITORY / "recipes/dapo_full.py").read_text("utf-8")
    assert text.replace("mine/my_dapo.py", "recipes/dapo_full.py") == original


@pytest.mark.parametrize("name", ["dapo_full", "dapo_full.py", "recipes/dapo_full.py"])
def test_a_folder_keeps_the_file_name(tmp_path, name):
    assert copy_recipe_file(name, tmp_path) == tmp_path / "dapo_full.py"


def test_a_folder_that_does_not_exist_yet_is_made(tmp_path):
    assert copy_recipe_file("tiny_cpu", f"{tmp_path}/new/") == tmp_path / "new/tiny_cpu.yaml"


def test_nothing_is_overwritten_unless_forced(tmp_path):
    target = tmp_path / "my_dapo.py"
    target.write_text("mine")
    with pytest.raises(RecipeFileError, match=r"my_dapo\.py exists; choose another name or add --force"):
        copy_recipe_file("dapo_full", target)
    assert target.read_text() == "mine"
    copy_recipe_file("dapo_full", target, force=True)
    assert "DAPORecipe" in target.read_text("utf-8")


def test_unknown_name_suggests_the_nearest(tmp_path):
    with pytest.raises(RecipeFileError, match="'dapo_ful'; did you mean 'dapo_full'"):
        copy_recipe_file("dapo_ful", tmp_path)


def test_a_copy_keeps_its_kind(tmp_path):
    with pytest.raises(RecipeFileError, match=r"tiny_cpu is a \.yaml file; name the copy mine\.yaml"):
        copy_recipe_file("tiny_cpu", tmp_path / "mine.py")


def test_runnable_path_leaves_the_working_directory_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert runnable_path(tmp_path / "a/b.py") == Path("a/b.py")
    assert runnable_path(Path("../b.py")) == Path("b.py")


def test_a_folder_named_like_a_package_is_shadowed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shadowing_package("torch/my_dapo.py") == "torch"
    assert shadowing_package("recipes/my_dapo.py") is None
    assert shadowing_package("my-dapo.py") is None
    assert shadowing_package("my_experiments/dapo.py") is None
