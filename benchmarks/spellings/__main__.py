"""Compile every way of every form, and write the table of docs/spellings.md.

timeout 300 .venv/bin/python -m benchmarks.spellings             # counts, and each way that is not reached
timeout 300 .venv/bin/python -m benchmarks.spellings window      # the forms of that name
timeout 300 .venv/bin/python -m benchmarks.spellings --write     # the table anew
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.spellings.form import REACHED, outcomes
from benchmarks.spellings.forms import FORMS
from benchmarks.spellings.table import rows_of, with_table

PAGE = Path(__file__).parents[2] / "docs" / "spellings.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", nargs="?", default="", help="a part of the names of some forms")
    parser.add_argument("--write", action="store_true", help="write docs/spellings.md")
    asked = parser.parse_args()
    found = {form: outcomes(form) for form in FORMS if asked.form in form.title}
    for form, of in found.items():
        print(rows_of(form, of))
        for one in of:
            if one.result != REACHED:
                print(f"    {one.way}: {one.result} {' '.join(one.why.split())[:240]}")
    if asked.write:
        PAGE.write_text(with_table(PAGE.read_text(), found))


if __name__ == "__main__":
    main()
