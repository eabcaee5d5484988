"""The page of a run: a self-contained HTML file made from the run's log. Imports nothing of the training side."""

from longreach.report.log import FORMAT, LOG_NAME, PAGE_NAME, LogError, RunLog, find_log, read_log
from longreach.report.page import render, write_page

__all__ = ["FORMAT", "LOG_NAME", "PAGE_NAME", "LogError", "RunLog", "find_log", "read_log", "render", "write_page"]
