"""Which files of a data set's folder are read, told by their names alone: the settings check them, the runtime reads them."""

from pathlib import Path

LINES = (".jsonl", ".json", ".ndjson")
PARQUET = ".parquet"


def data_files(root: Path, subset: str) -> list[Path]:
    """Return all data files of a folder, or of the folder of a subset in it, in order of name."""
    return sorted(
        path for path in inner_folder(root, subset).rglob("*") if path.suffix in {*LINES, PARQUET} and path.is_file()
    )


def inner_folder(root: Path, subset: str) -> Path:
    """Return the folder of the subset where there is one."""
    return root / subset if subset and (root / subset).is_dir() else root


def split_of(path: Path, root: Path) -> str:
    """Return the split a file belongs to: the first word of its name, or the folder it lies in (`train/0000.parquet`)."""
    word = path.stem.split("-")[0].split(".")[0]
    return path.parent.name if word.isdecimal() and path.parent != root else word
