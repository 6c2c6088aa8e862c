/**
 * Markdown to DOM nodes: headings, paragraphs, lists, quotes, tables, code with a Copy button, rules, emphasis, links.
 * Text becomes text nodes only, so HTML in it stays text. What is not complete yet, such as a code block whose end is
 * still to come, is shown as it is so far. Images are shown as links, because the page loads nothing from elsewhere.
 * Formulas become MathML. One that is not complete or not LaTeX is shown as it was written, delimiters included.
 */

import { copyButton, element } from "./common.js";
import { painterOf } from "./highlight.js";
import temml from "./temml.js";

const FENCE = /^ {0,3}(```+|~~~+)\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+|$)/;
const FORMULA = /^\s*(?:(\$\$)|(\\\[)|\\begin\{(\w+\*?)\})/;
const TABLE_LINE = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const SETTLED = new RegExp([ // beginnings of a line that decide its block
  /^\s*[^\s`~#*+_>\d\\$|-]/, /^\s*[*_]{1,3}[^\s*_]/, /^\s*`[^`]/, // text, emphasis, code
  /^\s*([-*+]|\d{1,9}[.)])\s+(?!\[[ xX]?\]?\s*$)[*_]{0,3}[^\s*_-]/, // an item, and whether it has a box
  /^ {0,3}#{1,6}\s+\S/, /^ {0,3}>/, // a heading, a quote
].map(({ source }) => source).join("|"));
const TABLE_PART = /\||^\s*:?-+:?\s*$/; // a line after which a line may be a row
const TASK = /^\[([ xX])\]\s+/;
const DELIMITED = /^(?:\$\$(?<a>.+)\$\$|\\\[(?<b>.+)\\\]|\\\((?<c>.+)\\\)|\$(?<d>[^$]+)\$|(?<e>\\begin.+))$/s;
const MAX_DEPTH = 8; // of lists and quotes in each other

/**
 * Shows a text that grows at its end. What can no longer change is kept, at every level: finished blocks, the finished
 * blocks of the last list item or quote, and the beginning of the last paragraph. Only the text after it is read again,
 * so that an addition costs the same however long the text is, and a selection in what is kept stays.
 */
export class MarkdownView {
  #box;
  #text = "";
  #rest = ""; // the end of the text, which can still change
  #blocks;

  /** box: the element whose children show the text. */
  constructor(box) {
    this.#box = inGroups(box, newBlocks);
    this.#blocks = new Pieces(box, blocksOf(0));
  }

  /** Show this text. It is compared with the one that is shown, so use `append` where it is known to be longer. */
  show(text) {
    if (!text.startsWith(this.#text)) {
      this.#box.replaceChildren();
      this.#text = this.#rest = "";
      this.#blocks = new Pieces(this.#box, blocksOf(0));
    }
    this.append(text.slice(this.#text.length));
  }

  append(added) {
    if (!added) return;
    this.#text += added;
    const lines = (this.#rest + added).split("\n");
    const [, finished] = this.#blocks.draw(lines.map((line) => (line.endsWith("\r") ? line.slice(0, -1) : line)), 0);
    this.#rest = lines.slice(Math.max(0, finished)).join("\n");
  }
}

/**
 * Children of an element, each of which shows some lines: blocks, list items, table rows or lines of code.
 *
 * piece(lines, i) returns what begins at line i: {node, end, part, isOver}. `node` is the child, if there is one, and
 * `end` the line after it. `part` draws the lines from there on into a child that can grow. `isOver`: no child follows.
 *
 * Each `draw(lines, start)` returns [the line after it, the first line that can still change, or -1 if all can]. The
 * next call begins with that line and continues. It returns null if the child has become something else.
 */
class Pieces {
  #into;
  #piece;
  #kept = null; // the last child that is not made anew
  #open = null; // the part that draws into it, if it can still grow
  #isBegun = false;

  constructor(into, piece) {
    this.#into = into;
    this.#piece = piece;
  }

  draw(lines, start) {
    const into = this.#into;
    let i = start, finished = this.#isBegun ? start : -1;
    const keep = (place, kept, open) => {
      finished = place;
      this.#kept = kept;
      this.#open = open;
      this.#isBegun = true;
    };
    cut(into, this.#kept);
    if (this.#open) {
      const drawn = this.#open.draw(lines, i);
      if (drawn) {
        [i, finished] = drawn;
      } else {
        removeLast(into);
        keep(start, lastOf(into), null);
      }
    }
    while (i < lines.length) {
      const before = lastOf(into), { node, end, part, isOver } = this.#piece(lines, i);
      const isKnown = i < lines.length - 1 || isSettled(lines, i);
      if (node) {
        add(into, node);
        if (isKnown) keep(i, before, null);
      }
      i = end;
      if (part) {
        const [partEnd, place] = part.draw(lines, i);
        if (isKnown && place >= 0) keep(place, node, part);
        i = partEnd;
      }
      if (isOver) break;
    }
    return [i, finished];
  }
}

/** Return true if the block of line i is known, even if more of the line comes. A table row is known at its end. */
const isSettled = (lines, i) => SETTLED.test(lines[i]) && !(i > 0 && TABLE_PART.test(lines[i - 1]));

// -- elements with many children: in groups, because a browser lays out all siblings of a child that is added.
// Paragraphs, quotes and list items have groups only after their first children. Table rows have none: the width
// of a column depends on all of them

const GROUP = 32;

const newBlocks = () => element("div", "group"), newLines = () => element("span", "group");
const newGroups = new WeakMap(); // of an element whose children are all in groups: what makes the next one

function inGroups(parent, newGroup) {
  newGroups.set(parent, newGroup);
  return parent;
}

/** The element that has the last child, or null if it is yet to be made. */
function groupIn(parent) {
  const { lastElementChild: last } = parent;
  return newGroups.has(parent) || last?.matches("div.group") ? last : parent;
}

const lastOf = (parent) => groupIn(parent)?.lastElementChild ?? null;

function add(parent, child) {
  let group = groupIn(parent);
  if (group === null || (group.children.length >= GROUP && !parent.matches("tbody"))) {
    group = (newGroups.get(parent) ?? newBlocks)(parent.children.length * GROUP);
    parent.append(group);
  }
  group.append(child);
}

function removeLast(parent) {
  const group = groupIn(parent);
  group.lastElementChild.remove();
  if (group !== parent && !group.hasChildNodes()) group.remove();
}

/** kept: the child after which all are removed, or null. */
function cut(parent, kept) {
  while (lastOf(parent) !== kept) removeLast(parent);
}

// -- blocks

/** What `Pieces` needs to draw blocks. depth: of lists and quotes around them. */
const blocksOf = (depth) => (lines, i) => (lines[i].trim() ? blockAt(lines, i, depth) : { end: i + 1 });

/** The block that begins at line i, as `Pieces` needs it. */
function blockAt(lines, i, depth) {
  const line = lines[i];
  if (FENCE.test(line)) return codeBlock(line, i);
  if (HEADING.test(line)) {
    const [, marks, content] = HEADING.exec(line);
    return { node: inlineIn(prose(`h${Math.min(6, marks.length + 3)}`), content), end: i + 1 }; // below the page's own
  }
  if (RULE.test(line)) return { node: element("hr", ""), end: i + 1 };
  if (QUOTE.test(line) && depth < MAX_DEPTH) {
    const node = prose("blockquote");
    return { node, end: i, part: container(node, depth + 1, quotedLines) };
  }
  if (ITEM.test(line) && depth < MAX_DEPTH) return list(line, i, depth);
  if (isTable(lines, i)) return table(line, lines[i + 1], i);
  const end = formulaEnd(lines, i);
  if (end !== null) {
    const node = element("div", "display");
    const [, source, mark] = /^(.*?)\s*([.,;]?)$/s.exec(lines.slice(i, end).join("\n").trim());
    node.append(formulaOf(source), mark);
    return { node, end };
  }
  const node = prose("p");
  return { node, end: i, part: new Paragraph(node) };
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA].some((start) => start.test(line));

/** An element whose text decides if it is read from left to right or from right to left. */
function prose(tag) {
  const made = element(tag, "");
  made.dir = "auto";
  return made;
}

const isTable = (lines, i) => lines[i].includes("|") && TABLE_LINE.test(lines[i + 1] ?? "")
  && lines[i + 1].includes("-") && cells(lines[i]).length === cells(lines[i + 1]).length;

/** Draws a paragraph, as `Pieces` needs it. */
class Paragraph {
  #into;
  #kept; // as appendInline returns it; numRead: from the line on that can still change
  #isFirst = true; // this line is the paragraph's first one

  constructor(into) {
    this.#into = into;
    this.#kept = { parent: into, node: null, length: 0, numRead: 0 };
  }

  draw(lines, start) {
    if (this.#isFirst && isTable(lines, start)) return null;
    let end = start, finished = start;
    do end += 1; while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]));
    const own = lines.slice(start, end).map((line) => line.trim()), text = own.join("\n");
    const isLastKnown = end < lines.length || isSettled(lines, end - 1);
    const { parent, node, length, numRead } = this.#kept;
    while (parent !== this.#into && this.#into.lastChild !== parent) this.#into.lastChild.remove();
    while (parent.lastChild !== node) parent.lastChild.remove();
    if (node?.nodeType === Node.TEXT_NODE) node.deleteData(length, node.length);
    const limit = text.length - numRead - (isLastKnown ? 0 : own.at(-1).length + 1);
    const settled = appendInline(parent, text.slice(numRead), 0, limit);
    if (settled) {
      settled.numRead += numRead;
      for (; settled.numRead > own[finished - start].length; finished += 1) {
        settled.numRead -= own[finished - start].length + 1;
      }
      this.#isFirst &&= finished === start;
      this.#kept = settled;
    }
    this.#into.classList.toggle("lines", this.#into.lastElementChild?.matches(".group") ?? false);
    return [end, finished];
  }
}

/**
 * The blocks of a quote or a list item, which reads in the direction of its first paragraph. linesOf(lines, start,
 * before) returns [its lines without its marks, the line after them]. `before`: its line before `start`, or null.
 */
function container(node, depth, linesOf) {
  const blocks = new Pieces(node, blocksOf(depth));
  let before = null;
  return { draw(lines, start) {
    const [own, end] = linesOf(lines, start, before), [, finished] = blocks.draw(own, 0);
    if (finished > 0) before = lines[start + finished - 1];
    if (node.firstElementChild?.matches("p")) node.firstElementChild.removeAttribute("dir");
    return [end, finished < 0 ? -1 : start + finished];
  } };
}

function quotedLines(lines, start) {
  let end = start;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return [lines.slice(start, end).map((line) => line.replace(QUOTE, "")), end];
}

/** The line after the formula that begins at line i, or null if there is none, or text after it on its last line. */
function formulaEnd(lines, i) {
  const [opening, dollars, bracket, environment] = FORMULA.exec(lines[i]) ?? [];
  if (opening === undefined) return null;
  const closing = dollars ?? (bracket ? "\\]" : `\\end{${environment}}`);
  let end = i, from = opening.length;
  for (; end < lines.length && lines[end].trim(); end += 1) {
    const place = lines[end].indexOf(closing, from);
    if (place >= 0) return /^\s*[.,;]?\s*$/.test(lines[end].slice(place + closing.length)) ? end + 1 : null;
    from = 0;
  }
  return end >= lines.length - 1 ? end : null; // it is still coming, unless an empty line has ended it
}

function codeBlock(line, start) {
  const [, fence, language] = FENCE.exec(line);
  const isEnd = (each) => each.trim().startsWith(fence) && !each.trim().replaceAll(fence[0], "");
  const figure = element("figure", "code"), bar = element("figcaption", "muted", language || "text");
  const pre = element("pre", ""), code = inGroups(element("code", ""), newLines), paint = painterOf(language);
  bar.append(copyButton(() => [...code.querySelectorAll(".line")].map((each) => each.textContent).join("\n")));
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.append(code);
  figure.append(bar, pre);
  const piece = (lines, i) => {
    const isOver = isEnd(lines[i]);
    return { node: isOver ? null : paint(lines[i], lastOf(code)), end: i + 1, isOver };
  };
  return { node: figure, end: start + 1, part: new Pieces(code, piece) };
}

function list(line, start, depth) {
  const [, indent, mark] = ITEM.exec(line);
  const isOrdered = /\d/.test(mark);
  const items = inGroups(element("div", "list"), (numBefore) => {
    const group = element(isOrdered ? "ol" : "ul", "");
    if (isOrdered) group.start = parseInt(mark, 10) + numBefore;
    return group;
  });
  const piece = (lines, i) => {
    const item = ITEM.exec(lines[i]);
    const isOther = !item || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered;
    return isOther || RULE.test(lines[i]) ? { end: i, isOver: true } : listItem(item, lines[i], i, indent, depth);
  };
  return { node: items, end: start, part: new Pieces(items, piece) };
}

/** item: what ITEM has found in the line. indent: of the list. */
function listItem(item, line, start, indent, depth) {
  const node = prose("li"), width = item[1].length + item[2].length + 1; // where the item's text begins
  const task = TASK.exec(line.slice(item[0].length)), marksLength = item[0].length + (task?.[0].length ?? 0);
  const ownLines = (lines, first, before) => {
    const own = before === null ? [lines[first].slice(marksLength)] : [];
    let i = first + own.length;
    for (; i < lines.length; i += 1) {
      const isBlank = !lines[i].trim(), isIndented = lines[i].search(/\S/) >= Math.min(width, indent.length + 2);
      const endsItem = startsBlock(lines[i]) || !(i > first ? lines[i - 1] : before).trim();
      if (isBlank ? !/^\s{2}/.test(lines[i + 1] ?? "") : !isIndented && endsItem) break;
      own.push(lines[i].slice(isIndented ? Math.min(width, lines[i].search(/\S/)) : 0));
    }
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i += 1;
    return [own, i];
  };
  const part = container(node, depth + 1, ownLines);
  return { node, end: start, part: task ? withBox(node, part, task[1] !== " ") : part };
}

/** A part that draws a list item, with a box in its first line. */
function withBox(item, part, isDone) {
  const box = element("input", "");
  Object.assign(box, { type: "checkbox", disabled: true, ariaLabel: isDone ? "done" : "to do" });
  box.toggleAttribute("checked", isDone);
  item.className = "task";
  return { draw(lines, start) {
    box.remove(); // the part's own children are left
    const drawn = part.draw(lines, start);
    (item.firstElementChild?.matches("p") ? item.firstElementChild : item).prepend(box);
    return drawn;
  } };
}

/** A cell ends at a "|" that is not escaped. */
function cells(line) {
  const parts = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "").split(/(?<!\\)\|/);
  return parts.map((part) => part.trim().replaceAll("\\|", "|"));
}

function table(titles, rule, start) {
  const box = element("div", "table"), shown = element("table", ""), head = element("thead", "");
  const body = element("tbody", "");
  const sides = cells(rule).map((each) => (/:$/.test(each) ? (/^:/.test(each) ? "center" : "right") : ""));
  const row = (line, tag) => {
    const shownRow = element("tr", ""), contents = cells(line);
    sides.forEach((side, i) => {
      const cell = inlineIn(prose(tag), contents[i] ?? "");
      cell.style.textAlign = side;
      shownRow.append(cell);
    });
    return shownRow;
  };
  head.append(row(titles, "th"));
  shown.append(head, body);
  box.tabIndex = 0;
  box.append(shown);
  const piece = (lines, i) => {
    const isRow = lines[i].includes("|");
    return { node: isRow ? row(lines[i], "td") : null, end: isRow ? i + 1 : i, isOver: !isRow };
  };
  return { node: box, end: start + 2, part: new Pieces(body, piece) };
}

// -- within a line

const SPAN = 2000; // characters between two delimiters at most, so that an unpaired one costs no more than that
const INLINE = new RegExp([
  `(?<code>(?<ticks>\`{1,20})(?<codeText>[^\`]|[^\`].{0,${SPAN}}?[^\`])\\k<ticks>(?!\`))`,
  "(?<escape>\\\\[\\\\`*_{}#+\\-.!|~<>$])",
  `(?<formula>\\\\\\(.{1,${SPAN}}?\\\\\\)|\\\\\\[.{1,${SPAN}}?\\\\\\]|\\$\\$.{1,${SPAN}}?\\$\\$|`
    + `(?<![\\w$])\\$(?![\\s$])[^$\\n]{0,${SPAN}}?(?<=[^\\s\\\\])\\$(?![\\w$]))`,
  `(?<link>!?\\[(?<linkText>[^\\]\\n]{0,${SPAN}})\\]\\(`
    + `(?<target>[^\\s()]{0,${SPAN}}(?:\\([^\\s()]{0,99}\\)[^\\s()]{0,99}){0,9})(?:\\s{1,9}"[^"]{0,${SPAN}}")?\\))`,
  "(?<address>https?://[^\\s<>()\\]]*[^\\s<>()\\].,;:!?'\"*_])",
  `(?<strong>\\*\\*(?=\\S)(?<strongText>.{1,${SPAN}}?)(?<=\\S)\\*\\*|`
    + `(?<!\\w)__(?=\\S)(?<strongText2>.{1,${SPAN}}?)(?<=\\S)__(?!\\w))`,
  `(?<em>\\*(?=[^\\s*])(?<emText>[^*]{1,${SPAN}}?)(?<=\\S)\\*|`
    + `(?<!\\w)_(?=[^\\s_])(?<emText2>[^_]{1,${SPAN}}?)(?<=\\S)_(?!\\w))`,
  `(?<del>~~(?=\\S)(?<delText>.{1,${SPAN}}?)(?<=\\S)~~)`,
  "(?<newline>\\n)",
].join("|"), "su");
const LONGEST = 4 * SPAN; // what INLINE can find, except for an address
const UNPAIRED = new RegExp([ // what INLINE may find when more text has come
  "`", "\\\\[([]", "\\$\\$", "\\$(?=[^\\s$][^$\\n]*$)",
  "\\[(?=[^\\]\\n]*(?:\\]?$|\\]\\(\\S*(?:\\s+(?:\"[^\"]*\"?)?)?$))",
  "\\*\\*(?!\\s)", "\\*(?![\\s*])(?=[^*]*$)", "(?<!\\w)__(?!\\s)", "(?<!\\w)_(?![\\s_])(?=[^_]*$)", "~~(?!\\s)",
].join("|"), "gu");
const SEPARATED = /^.*(?:\s|[^\0-\x7f])/su; // up to the last place where INLINE need not look at what is before

/**
 * Append the text of a paragraph or of a part of it, with its elements. Return {parent, node, length, numRead} or null.
 * If more text follows, the first `numRead` characters, at most `limit`, still look the same. They end with `node`, a
 * child of `parent`, or after `length` characters of `node` if it is a text.
 */
function appendInline(parent, text, depth, limit) {
  let place = 0, settled = null, mayChange = false;
  while (place < text.length) {
    const rest = text.slice(place), found = depth < MAX_DEPTH ? INLINE.exec(rest) : null;
    const plain = found ? rest.slice(0, found.index) : rest, { newline } = found?.groups ?? {};
    put(parent, plain);
    if (!mayChange && place < limit) {
      UNPAIRED.lastIndex = Math.max(0, text.length - LONGEST - place);
      const unpaired = UNPAIRED.exec(plain + (newline ?? ""));
      mayChange = unpaired !== null;
      const [known] = SEPARATED.exec(plain.slice(0, Math.min(unpaired?.index ?? Infinity, limit - place))) ?? [];
      const node = parent.lastChild, numRead = place + known?.length;
      if (known) settled = { parent, node, length: node.length - plain.length + known.length, numRead };
    }
    if (found === null) break;
    place += found.index + found[0].length;
    const { code, codeText, escape, formula, link, linkText, target, address, strong, em, del } = found.groups;
    const nested = (tag, content) => inlineIn(element(tag, ""), content, depth + 1);
    if (code) parent.append(element("code", "", codeText.trim()));
    else if (escape) put(parent, escape[1]);
    else if (formula) parent.append(formulaOf(formula));
    else if (link) put(parent, anchor(target, linkText || target));
    else if (address) parent.append(anchor(address, address));
    else if (strong) parent.append(nested("strong", found.groups.strongText ?? found.groups.strongText2));
    else if (em) parent.append(nested("em", found.groups.emText ?? found.groups.emText2));
    else if (del) parent.append(nested("del", found.groups.delText));
    else if (newline && (depth || parent.children.length < GROUP)) parent.append(element("br", ""));
    else if (newline) parent = addLines(parent);
    if (!newline || mayChange || place > limit) continue;
    settled = { parent, node: parent.lastChild, length: 0, numRead: place };
  }
  return settled;
}

/** Begin a group of lines in a paragraph. full: its last group, or itself if it has none. */
function addLines(full) {
  const group = newLines();
  (full.matches(".group") ? full.parentNode : full).append(group);
  return group;
}

/** Append an element or text. Texts that follow each other are one node, wherever they were cut. */
function put(parent, child) {
  const { lastChild: last } = parent;
  if (typeof child === "string" && last?.nodeType === Node.TEXT_NODE) last.appendData(child);
  else if (child) parent.append(child);
}

function inlineIn(parent, text, depth = 0) {
  appendInline(parent, text, depth, 0);
  return parent;
}

/** text: with its delimiters, or all that there is of it so far. */
function formulaOf(text) {
  const { a, b, c, d, e } = DELIMITED.exec(text)?.groups ?? {}, source = a ?? b ?? c ?? d ?? e;
  const made = element("span", "math");
  made.title = text;
  try {
    if (source === undefined) throw new SyntaxError("not complete");
    temml.render(source, made, { displayMode: c === undefined && d === undefined, throwOnError: true });
  } catch {
    made.replaceChildren(element("code", "", text)); // the error may be any, for any text that a model writes
  }
  return made;
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
