"""Rows: the data set as plain records {prompt, answer}. A built-in task, or a folder or file of JSONL or Parquet.

`load_rows(job)` gives what is trained on, `load_heldout(job)` what never is. No torch, no numpy; Parquet is imported when met.
"""

from rl_runtime.data.errors import DataError
from rl_runtime.data.load import Row, Rows, load_heldout, load_rows

__all__ = ["DataError", "Row", "Rows", "load_heldout", "load_rows"]
