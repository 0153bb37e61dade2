"""What does the page show that `autopar inspect --html` writes?"""

from autopar.report.page.program_page import page_text

__all__ = ["page_text"]
