"""Write ``docs/``: one page per operation, from its contract and its docstring.

uv run python tools/docs.py            # write
uv run python tools/docs.py --check    # status 1 if a page is missing, stale or left over
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path

from fe_runtime.bench.discover import find_workloads
from fe_runtime.bench.workload import Workload
from fe_runtime.contract.document import support_table

DOCS = Path(__file__).resolve().parents[1] / "docs"


def main() -> int:
    """Write the pages or compare them with what is there."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; say what differs")
    options = parser.parse_args()
    wanted = {f"{workload.name}.md": page(workload) for workload in find_workloads().workloads if workload.is_public}
    there = {path.name: path.read_text() for path in DOCS.glob("*.md")}
    if options.check:
        differing = sorted(name for name in wanted.keys() | there.keys() if wanted.get(name) != there.get(name))
        for name in differing:
            print(f"docs/{name} is not what the contracts say: run tools/docs.py")
        return int(bool(differing))
    DOCS.mkdir(exist_ok=True)
    for name in there.keys() - wanted.keys():
        (DOCS / name).unlink()
    for name, text in wanted.items():
        (DOCS / name).write_text(text)
    return 0


def page(workload: Workload) -> str:
    """Return the page of one operation: what it computes, what it accepts, what the wrapper says."""
    wrapper = workload.load_wrapper()
    said = inspect.getdoc(wrapper) or ""
    return (
        f"# {workload.name}\n\n"
        f"`{workload.summary}`, in [{workload.library.replace('_', '-')}]"
        f"(../libs/{workload.library.replace('_', '-')}/README.md).\n\n"
        f"{support_table(workload.load_operation().contract)}\n"
        f"## {workload.library}.{wrapper.__name__}\n\n```text\n{said}\n```\n"
    )


if __name__ == "__main__":
    sys.exit(main())
