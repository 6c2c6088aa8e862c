"""Links in the documents lead to files, and to headings, that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?:\]\(|\bsrc(?:set)?=\")([^)\"\s#]*)(?:#([^)\s]+))?[)\"]")


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of the page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings() -> None:
    broken, num_links = [], 0
    for page in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")):
        for target, anchor in LINK.findall(page.read_text()):
            if "://" in target or not (target or anchor):
                continue
            num_links += 1
            file = (page.parent / target).resolve() if target else page
            if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
                broken.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert num_links > 50 and not broken, broken
