"""The page that `autopar inspect --html` writes: its data, and the files that show them."""

from autopar.report.page.program_page import page_text

__all__ = ["page_text"]
