"""How long files and function bodies are; the limits themselves stand in ``test_architecture``."""

from __future__ import annotations

import ast
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
SOFT_FILE_LINES = 250
SOFT_BODY_LINES = 40


def sources(folder: str) -> list[Path]:
    """Python files below a folder, relative to the repository."""
    return sorted(path.relative_to(REPOSITORY) for path in (REPOSITORY / folder).rglob("*.py"))


def file_lines(path: Path) -> int:
    return len((REPOSITORY / path).read_text("utf-8").splitlines())


def body_lines(path: Path) -> dict[str, int]:
    """Lines of each function body in a file, the docstring left out."""
    lines = {}
    for node in ast.walk(ast.parse((REPOSITORY / path).read_text("utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) else node.body
            lines[f"{path}:{node.lineno} {node.name}"] = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
    return lines


def over_soft_limits() -> dict[str, int]:
    """What should be cut when it is next touched."""
    found = {}
    for path in sources("dapo_components") + sources("recipes"):
        if path.parts[0] != "recipes" and file_lines(path) > SOFT_FILE_LINES:
            found[str(path)] = file_lines(path)
        found |= {name: count for name, count in body_lines(path).items() if count > SOFT_BODY_LINES}
    return found
