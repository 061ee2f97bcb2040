"""README and docs: their Python runs, their commands name files and sub-commands that exist."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest

from dapo_components.cli import build_parser
from dapo_components.losses import PolicyLossOutput
from dapo_components.recipe_files import list_configs, list_recipes

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
FENCE = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[tuple[int, str]]:
    """Code blocks of a page with the line number of their first line."""
    text = page.read_text("utf-8")
    found = [match for match in FENCE.finditer(text) if match[2] == language]
    return [(text.count("\n", 0, match.start(3)) + 1, match[3]) for match in found]


def commands() -> list[tuple[Path, str]]:
    """Shell lines of all pages, comments removed."""
    lines = [(page, line) for page in PAGES for _, block in blocks(page, "bash") for line in block.splitlines()]
    return [(page, command) for page, line in lines if (command := line.partition(" #")[0].strip())]


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=lambda page: page.stem)
def test_python_of_a_page_runs_from_top_to_bottom(page):
    namespace: dict[str, object] = {"__name__": page.stem}
    for line, block in blocks(page, "python"):
        # Blank lines in front make a traceback show the page's own line number.
        exec(compile("\n" * (line - 1) + block, str(page), "exec"), namespace)


def test_python_is_found_in_readme_and_concepts():
    with_code = {page.stem for page in PAGES if blocks(page, "python")}
    concepts = {page.stem for page in (REPOSITORY / "docs/concepts").glob("*.md")}
    assert {"README", "index"} | concepts <= with_code


def test_repository_paths_in_commands_exist():
    paths = {path for _, command in commands() for path in re.findall(r"\b(?:recipes|benchmarks)/[\w./]+", command)}
    assert len(paths) >= 3
    assert [path for path in sorted(paths) if not (REPOSITORY / path).exists()] == []


def test_dapo_commands_parse_and_name_what_exists():
    known = {file.name for file in list_recipes() + list_configs()}
    lines = [command for _, command in commands() if command.startswith("dapo ")]
    assert len(lines) >= 5
    for line in lines:
        arguments = build_parser().parse_args(shlex.split(line)[1:])
        assert getattr(arguments, "name", "dapo_full") in known


def test_make_targets_in_commands_exist():
    targets = set(re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text("utf-8"), re.MULTILINE))
    used = {shlex.split(command)[1] for _, command in commands() if command.startswith("make ")}
    assert {"demo", "test"} <= used <= targets


def test_configs_listed_in_the_recipe_page_are_those_there_are():
    page = (REPOSITORY / "docs/recipes/dapo.md").read_text("utf-8")
    names = {
        file.path.relative_to(REPOSITORY / "recipes/configs").with_suffix("").as_posix() for file in list_configs()
    }
    listed = set(re.findall(r"`([\w/]+)`", page.partition("## Configs")[2].partition("##")[0]))
    ablation = {name for name in names if name.startswith("ablation/")}
    assert names - ablation - {"tiny_cpu_sft"} == {name for name in listed if not name.startswith("ablation/")}
    assert {min(ablation), max(ablation)} == {name for name in listed if name.startswith("ablation/")}


def test_every_metric_of_the_loss_is_explained():
    page = (REPOSITORY / "docs/recipes/dapo.md").read_text("utf-8")
    fields = [field.name for field in dataclasses.fields(PolicyLossOutput) if field.name != "loss"]  # pyright: ignore[reportArgumentType]
    assert len(fields) >= 10
    assert [name for name in fields if f"`{name.replace('clip_ratio_', 'clip_ratio/')}`" not in page] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_between_repository_files_resolve(page):
    links = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []
