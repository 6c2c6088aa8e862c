/**
 * Markdown to DOM nodes: headings, paragraphs, lists, quotes, tables, code with a Copy button, rules, emphasis, links.
 * Text becomes text nodes only, so HTML in it stays text. What is not complete yet, such as a code block whose end is
 * still to come, is shown as far as it goes. Images are shown as links, because the page loads nothing from elsewhere.
 */

import { copyButton, element } from "./common.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes in each other

/** Return a DocumentFragment. */
export function markdown(text) {
  return blocks(text.replaceAll("\r\n", "\n").split("\n"), 0);
}

function blocks(lines, depth) {
  const made = document.createDocumentFragment();
  let i = 0;
  while (i < lines.length) {
    const line = lines[i];
    if (!line.trim()) {
      i += 1;
    } else if (FENCE.test(line)) {
      i = codeBlock(made, lines, i);
    } else if (HEADING.test(line)) {
      const [, marks, content] = HEADING.exec(line);
      made.append(inlineIn(element(`h${Math.min(6, marks.length + 3)}`, ""), content)); // below the page's own
      i += 1;
    } else if (RULE.test(line)) {
      made.append(element("hr", ""));
      i += 1;
    } else if (QUOTE.test(line) && depth < MAX_DEPTH) {
      const start = i;
      while (i < lines.length && QUOTE.test(lines[i])) i += 1;
      const quote = element("blockquote", "");
      quote.append(blocks(lines.slice(start, i).map((each) => each.replace(QUOTE, "")), depth + 1));
      made.append(quote);
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      i = list(made, lines, i, depth);
    } else if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")
        && cells(line).length === cells(lines[i + 1]).length) {
      i = table(made, lines, i);
    } else {
      const start = i;
      do i += 1; while (i < lines.length && lines[i].trim() && !startsBlock(lines[i]));
      made.append(inlineIn(element("p", ""), lines.slice(start, i).map((each) => each.trim()).join("\n")));
    }
  }
  return made;
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM].some((start) => start.test(line));

function codeBlock(made, lines, start) {
  const [, fence, language] = FENCE.exec(lines[start]);
  const isEnd = (line) => line.trim().startsWith(fence) && !line.trim().replaceAll(fence[0], "");
  let end = start + 1;
  while (end < lines.length && !isEnd(lines[end])) end += 1;
  const code = lines.slice(start + 1, end).join("\n");
  const figure = element("figure", "code"), bar = element("figcaption", "muted", language || "text");
  const pre = element("pre", "");
  bar.append(copyButton(() => code));
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.append(element("code", "", code));
  figure.append(bar, pre);
  made.append(figure);
  return end + 1;
}

function list(made, lines, start, depth) {
  const [, indent, mark] = ITEM.exec(lines[start]);
  const isOrdered = /\d/.test(mark);
  const items = element(isOrdered ? "ol" : "ul", "");
  if (isOrdered) items.start = parseInt(mark, 10);
  let i = start;
  while (i < lines.length) {
    const item = ITEM.exec(lines[i]);
    if (!item || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered || RULE.test(lines[i])) break;
    const width = item[1].length + item[2].length + 1; // where the item's text begins
    const own = [lines[i].slice(item[0].length)];
    for (i += 1; i < lines.length; i += 1) {
      const isBlank = !lines[i].trim(), isIndented = lines[i].search(/\S/) >= Math.min(width, indent.length + 2);
      const endsItem = startsBlock(lines[i]) || !lines[i - 1].trim();
      if (isBlank ? !/^\s{2}/.test(lines[i + 1] ?? "") : !isIndented && endsItem) break;
      own.push(lines[i].slice(isIndented ? Math.min(width, lines[i].search(/\S/)) : 0));
    }
    const shown = element("li", "");
    shown.append(blocks(own, depth + 1));
    items.append(shown);
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i += 1;
  }
  made.append(items);
  return i;
}

/** A cell ends at a "|" that is not escaped. */
function cells(line) {
  const parts = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function table(made, lines, start) {
  const box = element("div", "table"), shown = element("table", ""), head = element("thead", "");
  const body = element("tbody", "");
  const sides = cells(lines[start + 1]).map((rule) => (/:$/.test(rule) ? (/^:/.test(rule) ? "center" : "right") : ""));
  const row = (line, tag) => {
    const shownRow = element("tr", ""), contents = cells(line);
    sides.forEach((side, i) => {
      const cell = inlineIn(element(tag, ""), contents[i] ?? "");
      cell.style.textAlign = side;
      shownRow.append(cell);
    });
    return shownRow;
  };
  head.append(row(lines[start], "th"));
  let i = start + 2;
  for (; i < lines.length && lines[i].includes("|"); i += 1) body.append(row(lines[i], "td"));
  shown.append(head, body);
  box.tabIndex = 0;
  box.append(shown);
  made.append(box);
  return i;
}

// -- within a line

const INLINE = new RegExp([
  "(?<code>(?<ticks>`+)(?<codeText>[^`]|[^`].*?[^`])\\k<ticks>(?!`))",
  "(?<escape>\\\\[\\\\`*_{}\\[\\]()#+\\-.!|~<>])",
  "(?<link>!?\\[(?<linkText>[^\\]\\n]*)\\]\\((?<target>[^\\s()]*(?:\\([^\\s()]*\\)[^\\s()]*)*)(?:\\s+\"[^\"]*\")?\\))",
  "(?<address>https?://[^\\s<>()\\]]*[^\\s<>()\\].,;:!?'\"*_])",
  "(?<strong>\\*\\*(?=\\S)(?<strongText>.+?)(?<=\\S)\\*\\*|(?<!\\w)__(?=\\S)(?<strongText2>.+?)(?<=\\S)__(?!\\w))",
  "(?<em>\\*(?=[^\\s*])(?<emText>[^*]+?)(?<=\\S)\\*|(?<!\\w)_(?=[^\\s_])(?<emText2>[^_]+?)(?<=\\S)_(?!\\w))",
  "(?<del>~~(?=\\S)(?<delText>.+?)(?<=\\S)~~)",
  "(?<newline>\\n)",
].join("|"), "su");

function inlineIn(parent, text, depth = 0) {
  let rest = text;
  while (rest) {
    const found = depth < MAX_DEPTH ? INLINE.exec(rest) : null;
    if (found === null) break;
    parent.append(rest.slice(0, found.index));
    rest = rest.slice(found.index + found[0].length);
    const { code, codeText, escape, link, linkText, target, address, strong, em, del, newline } = found.groups;
    const nested = (tag, content) => inlineIn(element(tag, ""), content, depth + 1);
    if (code) parent.append(element("code", "", codeText.trim()));
    else if (escape) parent.append(escape[1]);
    else if (link) parent.append(anchor(target, linkText || target));
    else if (address) parent.append(anchor(address, address));
    else if (strong) parent.append(nested("strong", found.groups.strongText ?? found.groups.strongText2));
    else if (em) parent.append(nested("em", found.groups.emText ?? found.groups.emText2));
    else if (del) parent.append(nested("del", found.groups.delText));
    else if (newline) parent.append(element("br", ""));
  }
  parent.append(rest);
  return parent;
}

/** A link, or only its content unless it leads to a web page or a mail address. */
function anchor(target, content) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return content;
  const made = element("a", "");
  made.href = target;
  made.target = "_blank";
  made.rel = "noopener noreferrer";
  made.append(content);
  return made;
}
