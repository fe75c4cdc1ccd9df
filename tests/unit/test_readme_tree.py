"""README.md shows every file with one line, and each line is what the file says of itself."""

from pathlib import Path

from tests.readme_tree import BEGIN, END, readme_with_tree


def test_the_tree_is_true(root: Path) -> None:
    """The tree in README.md is the one that `python -m tests.readme_tree --write` writes."""
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert readme == readme_with_tree(readme), "run: python -m tests.readme_tree --write"


def test_every_module_says_what_it_is(root: Path) -> None:
    """No file of the packages stands in the tree without its line."""
    readme = readme_with_tree((root / "README.md").read_text(encoding="utf-8"))
    shown = readme.partition(BEGIN)[2].partition(END)[0]
    packages = shown.partition("\nexamples/")[0]
    mute = [line for line in packages.splitlines() if line.endswith((".py", "/"))]
    assert mute == []


def test_a_new_file_shows(tmp_path: Path) -> None:
    """A new file changes the tree, so that README.md is behind until it is written again; caches do not show."""
    readme = f"# x\n{BEGIN}{END}\nafter\n"
    package = tmp_path / "easyckpt"
    package.mkdir()
    (package / "__init__.py").write_text('"""Keeps state."""\n', encoding="utf-8")
    (package / "flush.py").write_text(
        '"""Writes segments to storage, manifest last. And more.\n\nDetails."""\n', encoding="utf-8"
    )
    (package / "__pycache__").mkdir()
    (package / "__pycache__" / "flush.pyc").write_bytes(b"")
    first = readme_with_tree(readme, tmp_path)
    assert "flush.py  Writes segments to storage, manifest last\n" in first
    assert "pycache" not in first
    assert first.endswith("\nafter\n")
    (package / "shm.py").write_text('"""Finds segments."""\n', encoding="utf-8")
    assert readme_with_tree(first, tmp_path) != first
