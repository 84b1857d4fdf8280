"""Datasets: files, folders and hub ids to rows; rows to prompts, images and tools; rows to tasks. `datasets` does the reading."""

from .rows import Rows, open_rows
from .shown import Shown, read_row
from .tasks import RowTasks, load_rows, load_tasks, row_task

__all__ = ["RowTasks", "Rows", "Shown", "load_rows", "load_tasks", "open_rows", "read_row", "row_task"]
