"""The Markdown of answers, in a browser: what it becomes, and what is drawn again while it grows."""

import re
from typing import Any

import pytest
from page_actions import ask, ask_and_wait, attach, documents, reload, wait_for_end
from page_server import MARKDOWN, FakeServer
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

# `made` is what a text becomes when it comes at once; `grown` when it comes in pieces, which calls `each` with the box.
SCRIPT = """async ({ text, sizes }) => {
    const { MarkdownView } = await import("/page/markdown.js");
    const boxes = [];
    const newBox = () => {
        const box = document.createElement("div");
        box.className = "markdown";
        document.getElementById("messages").append(box);
        boxes.push(box);
        return box;
    };
    const made = text => { const box = newBox(); new MarkdownView(box).show(text); return box; };
    const grown = (text, size, each = () => {}) => {
        const box = newBox(), view = new MarkdownView(box);
        for (let end = size; end < text.length + size; end += size) {
            view.show(text.slice(0, end));
            each(box, text.slice(0, end));
        }
        return box;
    };
    BODY
}"""

TEXTS = {
    "all": MARKDOWN,
    "line_ends": MARKDOWN.replace("\n", "\r\n"),
    "lists": "- a\n- b\n  more\n\n  - c\n  - d\n\n- e\n1. x\n2. y\n\n3. z\n   ```\n   code\n\n   ```\nlazy\n-\n--\n---",
    "blanks": "- a\n\n\n- q\n\n**b** c\n- d\n\n  e\n\n f\n\n*g* h\n\n1\n\n2. i\n\n`j` k\n\n# l\nm\n#\n##n\n\n\to\n-\n",
    "fences": "````\n```\n``\n\n```\n````\n~~~js\n```\n~~~\n# H\n```py\nopen\n",
    "tables": "| a | b |\n|---|--:|\n| 1 | 2 |\n| 3 |\n\na | b\n- | -\n1 | \\|2\nthe | row\n- x | y\nend\n| x |\n|--",
    "formulas": "Let \\(a_i\\) be\n\\[\nx\n+ y\n\\]\n$$\n- z\n$$ and\n\n\\[ open\n- no\n\nend",
    "environments": "\\begin{align}\na &= b \\\\\n\\end{align}\n\\[ x \\]\n\\(y\\) $z$\n\\$ 1\n$$ 2 $$ 3\n$$",
    "quotes": "> a\n> - b\n>\n> c\nlazy\n\n> d\n>> e\n>\n\n***\n* * *\n_x_ **y\nz** `a\nb`\n    \n  text",
}


def run(page: Page, body: str, text: str, *sizes: int) -> Any:
    return page.evaluate(SCRIPT.replace("BODY", body), {"text": text, "sizes": sizes})


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_grows_looks_at_any_time_as_if_it_came_at_once(page: Page, name: str) -> None:
    differences = run(
        page,
        """return sizes.flatMap(size => {
            const differences = [];
            grown(text, size, (box, shown) => {
                const once = made(shown);
                if (box.innerHTML !== once.innerHTML) differences.push([shown, box.innerHTML, once.innerHTML]);
                once.remove();
            });
            return differences;
        }).slice(0, 1);""",
        TEXTS[name],
        *(1, 2, 3, 7, 50),
    )
    assert differences == []


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("paragraphs", "Some *text* with `code` in a paragraph.\n\n"),
        ("list", "- an *item* of `a` list\n"),
        ("table", "| a | **b** |\n"),
        ("code", "a line of code\n"),
    ],
)
def test_work_of_all_drawings_is_linear(page: Page, name: str, unit: str) -> None:
    """Regression: each drawing parsed and made the whole answer anew, so that the sum was quadratic."""
    start = {"table": "| a | b |\n|---|---|\n", "code": "```\n"}.get(name, "")
    work = [
        run(
            page,
            """const counts = { nodes: 0, characters: 0 }, exec = RegExp.prototype.exec, own = Element.prototype.append;
            Element.prototype.append = function (...nodes) { counts.nodes += nodes.length; own.apply(this, nodes); };
            RegExp.prototype.exec = function (text) { counts.characters += text.length; return exec.call(this, text); };
            try { grown(text, 10); } finally { Element.prototype.append = own; RegExp.prototype.exec = exec; }
            return counts;""",
            start + unit * num_units,
        )
        for num_units in (50, 400)
    ]
    for what in ("nodes", "characters"):
        assert 0 < work[1][what] < 9 * work[0][what]  # for 8 times the text


def test_selection_in_a_finished_block_survives_what_follows(server: FakeServer, page: Page) -> None:
    """Regression: every 80 ms the answer was made anew, and took the selection with it."""
    server.may_go_on.clear()
    ask(page, "show markdown")
    heading = page.locator(".answer .text h4")
    expect(page.locator(".answer .text p")).to_contain_text("Some")
    heading.evaluate("element => getSelection().selectAllChildren(element)")
    heading.evaluate("element => { element.wasSelected = true; }")
    server.may_go_on.set()
    wait_for_end(page)
    expect(page.locator(".answer .text pre")).to_contain_text("hello")
    assert page.evaluate("String(getSelection())") == "A heading"
    ask_and_wait(page, "one")  # which does not touch it either, though the selection is now in the text field
    assert heading.evaluate("element => element.wasSelected")


FORMULAS = [
    r"\(\alpha_i + \beta_j\)",
    r"\[ x^2 * y * z^2 \]",
    r"$$ a_1 _b_ $$",
    r"$\{x^*y^*\}$",
    "\\[\n  x\n  + y \\\\\n  - z\n\\]",
    "$$\n# 1\n- 2\n$$",
    "\\begin{align}\na &= b \\\\\n1. &< c\n\\end{align}",
]


@pytest.mark.parametrize("formula", FORMULAS)
def test_formulas_are_shown_as_they_were_written(page: Page, formula: str) -> None:
    r"""Regression: \(\alpha\) lost its delimiters, and asterisks and underscores became emphasis."""
    body = "const box = made(text); return [box.innerText, [...box.querySelectorAll('.math')].map(e => e.innerText)];"
    isolated = f"Let\n\n{formula}\n\nand" if "\n" in formula else f"Let **this** be {formula}, and"
    whole, shown = run(page, body, isolated)
    assert shown == [formula] and whole.startswith("Let") and whole.endswith("and")
    shown = run(page, body, f"- Let {formula}" if "\n" not in formula else formula)[1]
    assert shown == [formula]


def test_money_and_brackets_are_not_formulas(page: Page) -> None:
    text = r"It costs $5 or $10, and US$3 to US$4, [1] or \[ alone, \*not\* \$5."
    body = "const box = made(text); return [box.innerText, box.querySelectorAll('.math').length];"
    assert run(page, body, text) == [r"It costs $5 or $10, and US$3 to US$4, [1] or \[ alone, *not* $5.", 0]


def test_arabic_and_hebrew_read_from_right_to_left(page: Page) -> None:
    """Regression: their paragraphs were laid out from left to right, the full stop at the wrong end."""
    hebrew = "שלום עולם."
    table = f"| {hebrew} | b |\n|---|---|\n| c | {hebrew} |"
    text = f"# {hebrew}\n\n{hebrew}\n\nEnglish.\n\n- {hebrew}\n- English\n\n> {hebrew}\n\n{table}"
    directions = run(
        page,
        """return [...made(text).querySelectorAll("h4, p, li, blockquote, th, td")].map(element =>
            [element.tagName, getComputedStyle(element).direction]);""",
        text,
    )
    assert directions == [
        *(["H4", "rtl"], ["P", "rtl"], ["P", "ltr"], ["LI", "rtl"], ["P", "rtl"], ["LI", "ltr"], ["P", "ltr"]),
        *(["BLOCKQUOTE", "rtl"], ["P", "rtl"], ["TH", "rtl"], ["TH", "ltr"], ["TD", "ltr"], ["TD", "rtl"]),
    ]
    attach(page, f"{hebrew}.txt")
    ask(page, hebrew)
    page.get_by_label("Message", exact=True).fill(hebrew)
    wait_for_end(page)
    for selector in ("#question", ".question .text", ".document-name", ".chat-name"):
        assert page.locator(selector).evaluate("element => getComputedStyle(element).direction") == "rtl"
    expect(documents(page)).to_have_count(1)


def test_comparison_of_times_is_in_view(server: FakeServer, page: Page) -> None:
    """Regression: the line below the last answer appeared below the edge, cut in half."""
    server.num_cached_tokens = 0
    ask_and_wait(page, "a\n" * 40 + "one")
    page.evaluate(
        """() => new Promise(resolve => {
            indexedDB.open("nanovllm").onsuccess = ({ target }) => {
                const stores = target.result.transaction("conversations", "readwrite");
                const conversations = stores.objectStore("conversations");
                conversations.getAll().onsuccess = ({ target: { result: [record] } }) => {
                    record.messages[1].firstMs = 1e6;  // however slow this machine is
                    conversations.put(record);
                };
                stores.oncomplete = () => { target.result.close(); resolve(); };
            };
        })"""
    )
    reload(page)
    server.num_cached_tokens = 3072
    expect(page.locator("#speed")).to_be_hidden()
    ask(page, "b\n" * 40 + "two")
    expect(page.locator("#speed")).to_have_text(re.compile("First answer: 1,000 s. Now: "))
    expect(page.locator("#speed")).to_be_in_viewport(ratio=1)
