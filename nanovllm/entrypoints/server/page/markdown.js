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
  /^\s*([-*+]|\d{1,9}[.)])\s+[^\s*_-]/, /^ {0,3}#{1,6}\s+\S/, /^ {0,3}>/, // an item, a heading, a quote
].map(({ source }) => source).join("|"));
const TASK = /^\[([ xX])\]\s+/;
const DELIMITED = /^(?:\$\$(?<a>.+)\$\$|\\\[(?<b>.+)\\\]|\\\((?<c>.+)\\\)|\$(?<d>[^$]+)\$|(?<e>\\begin.+))$/s;
const MAX_DEPTH = 8; // of lists and quotes in each other

/**
 * Shows a text that grows at its end. Only the last block is made anew, and of a list, a table or code only its last
 * item, row or line: a selection in what is finished stays, and all drawings together take time linear in the text.
 */
export class MarkdownView {
  #box;
  #text = "";
  #start = 0; // where in the text the lines begin that can still change
  #numKept = 0; // nodes in the box that show the finished text
  #open = null; // the last of them if it still grows: {into, piece, numKept}

  /** box: the element whose children show the text. */
  constructor(box) {
    this.#box = inGroups(box);
  }

  show(text) {
    if (text === this.#text) return;
    if (!text.startsWith(this.#text)) this.#restart();
    this.#text = text;
    const lines = text.slice(this.#start).split("\n");
    const numFinished = this.#draw(lines.map((line) => line.replace(/\r$/, "")));
    for (const line of lines.slice(0, numFinished)) this.#start += line.length + 1;
  }

  #restart() {
    this.#start = this.#numKept = 0;
    this.#open = null;
  }

  /** Draw the lines after the finished ones, and return how many of them are now finished. */
  #draw(lines) {
    const box = this.#box;
    let i = 0, numFinished = 0;
    const finishBefore = (numKept, open) => { // line i
      if (i === lines.length - 1 && !isSettled(lines, i)) return;
      numFinished = i;
      this.#numKept = numKept;
      this.#open = open;
    };
    const drawPieces = ({ into, piece }) => {
      for (let isOver = false; i < lines.length && !isOver;) {
        const numKept = numOf(into), [end, isLast] = piece(lines, i);
        if (numOf(into) > numKept) finishBefore(numOf(box), { into, piece, numKept });
        [i, isOver] = [end, isLast];
      }
    };
    cut(box, this.#numKept);
    if (this.#open) {
      cut(this.#open.into, this.#open.numKept);
      drawPieces(this.#open);
    }
    while (i < lines.length) {
      if (lines[i].trim()) {
        const block = blockAt(lines, i, 0);
        finishBefore(numOf(box), null);
        add(box, block.node);
        i = block.end;
        if (block.piece) drawPieces(block);
      } else {
        i += 1;
      }
    }
    return numFinished;
  }
}

/** Return true if the block of line i is known, even if more of the line comes. A table row is known at its end. */
const isSettled = (lines, i) => SETTLED.test(lines[i]) && !lines[i - 1]?.includes("|");

// -- elements with many children: in groups, because a browser lays out all siblings of a child that is added

const GROUP = 32;

function inGroups(parent) {
  parent.dataset.grouped = "";
  return parent;
}

const isGrouped = ({ dataset }) => dataset.grouped === "";

function numOf(parent) {
  const { children, lastElementChild: last } = parent;
  return isGrouped(parent) && last ? (children.length - 1) * GROUP + last.children.length : children.length;
}

const lastOf = (parent) => (isGrouped(parent) ? parent.lastElementChild?.lastElementChild : parent.lastElementChild);

function add(parent, child) {
  if (!isGrouped(parent)) return parent.append(child);
  if (numOf(parent) % GROUP === 0) parent.append(element(parent.matches("code") ? "span" : "div", "group"));
  return parent.lastElementChild.append(child);
}

function cut(parent, numKept) {
  while (numOf(parent) > numKept) {
    const group = parent.lastElementChild;
    lastOf(parent).remove();
    if (isGrouped(parent) && !group.hasChildNodes()) group.remove();
  }
}

// -- blocks

/** Append the blocks of these lines, and return `parent`. */
function blocksIn(parent, lines, depth) {
  let i = 0;
  while (i < lines.length) {
    if (lines[i].trim()) {
      const block = blockAt(lines, i, depth);
      parent.append(block.node);
      i = block.end;
      for (let isOver = !block.piece; i < lines.length && !isOver;) [i, isOver] = block.piece(lines, i);
    } else {
      i += 1;
    }
  }
  return parent;
}

/**
 * The block that begins at line i: {node, end}, where `end` is the line after it. A list, a table and code are made
 * of pieces: {node, end, into, piece}, where `end` is the line of the first piece, and piece(lines, i) appends the one
 * at line i to `into` and returns [line after it, true if the block is over].
 */
function blockAt(lines, i, depth) {
  const line = lines[i];
  if (FENCE.test(line)) return codeBlock(line, i);
  if (HEADING.test(line)) {
    const [, marks, content] = HEADING.exec(line);
    return { node: inlineIn(prose(`h${Math.min(6, marks.length + 3)}`), content), end: i + 1 }; // below the page's own
  }
  if (RULE.test(line)) return { node: element("hr", ""), end: i + 1 };
  if (QUOTE.test(line) && depth < MAX_DEPTH) {
    let end = i;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    const own = lines.slice(i, end).map((each) => each.replace(QUOTE, ""));
    return { node: container("blockquote", own, depth + 1), end };
  }
  if (ITEM.test(line) && depth < MAX_DEPTH) return list(line, i, depth);
  if (line.includes("|") && TABLE_LINE.test(lines[i + 1] ?? "") && lines[i + 1].includes("-")
      && cells(line).length === cells(lines[i + 1]).length) return table(line, lines[i + 1], i);
  let end = formulaEnd(lines, i);
  if (end !== null) {
    const node = element("div", "display");
    const [, source, mark] = /^(.*?)\s*([.,;]?)$/s.exec(lines.slice(i, end).join("\n").trim());
    node.append(formulaOf(source), mark);
    return { node, end };
  }
  end = i;
  do end += 1; while (end < lines.length && lines[end].trim() && !startsBlock(lines[end]));
  return { node: inlineIn(prose("p"), lines.slice(i, end).map((each) => each.trim()).join("\n")), end };
}

const startsBlock = (line) => [FENCE, HEADING, RULE, QUOTE, ITEM, FORMULA].some((start) => start.test(line));

/** An element whose text decides if it is read from left to right or from right to left. */
function prose(tag) {
  const made = element(tag, "");
  made.dir = "auto";
  return made;
}

/** A quote or a list item, which reads in the direction of its first paragraph. */
function container(tag, lines, depth) {
  const made = blocksIn(prose(tag), lines, depth);
  if (made.firstElementChild?.matches("p")) made.firstElementChild.removeAttribute("dir");
  return made;
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
  const pre = element("pre", ""), code = inGroups(element("code", "")), paint = painterOf(language);
  bar.append(copyButton(() => [...code.querySelectorAll(".line")].map((each) => each.textContent).join("\n")));
  pre.tabIndex = 0; // so that the keyboard can scroll it
  pre.append(code);
  figure.append(bar, pre);
  const piece = (lines, i) => {
    if (isEnd(lines[i])) return [i + 1, true];
    add(code, paint(lines[i], lastOf(code)));
    return [i + 1, false];
  };
  return { node: figure, end: start + 1, into: code, piece };
}

function list(line, start, depth) {
  const [, indent, mark] = ITEM.exec(line);
  const isOrdered = /\d/.test(mark);
  const items = element(isOrdered ? "ol" : "ul", "");
  if (isOrdered) items.start = parseInt(mark, 10);
  const piece = (lines, first) => {
    const item = ITEM.exec(lines[first]);
    const isOther = !item || item[1].length < indent.length || /\d/.test(item[2]) !== isOrdered;
    if (isOther || RULE.test(lines[first])) return [first, true];
    const width = item[1].length + item[2].length + 1; // where the item's text begins
    const content = lines[first].slice(item[0].length), task = TASK.exec(content);
    const own = [task ? content.slice(task[0].length) : content];
    let i = first + 1;
    for (; i < lines.length; i += 1) {
      const isBlank = !lines[i].trim(), isIndented = lines[i].search(/\S/) >= Math.min(width, indent.length + 2);
      const endsItem = startsBlock(lines[i]) || !lines[i - 1].trim();
      if (isBlank ? !/^\s{2}/.test(lines[i + 1] ?? "") : !isIndented && endsItem) break;
      own.push(lines[i].slice(isIndented ? Math.min(width, lines[i].search(/\S/)) : 0));
    }
    const made = container("li", own, depth + 1);
    if (task) asTask(made, task[1] !== " ");
    items.append(made);
    while (i < lines.length && !lines[i].trim() && ITEM.test(lines[i + 1] ?? "")) i += 1;
    return [i, false];
  };
  return { node: items, end: start, into: items, piece };
}

function asTask(item, isDone) {
  const box = element("input", "");
  Object.assign(box, { type: "checkbox", disabled: true, ariaLabel: isDone ? "done" : "to do" });
  box.toggleAttribute("checked", isDone);
  item.className = "task";
  (item.firstElementChild?.matches("p") ? item.firstElementChild : item).prepend(box);
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
    if (!lines[i].includes("|")) return [i, true];
    body.append(row(lines[i], "td"));
    return [i + 1, false];
  };
  return { node: box, end: start + 2, into: body, piece };
}

// -- within a line

const INLINE = new RegExp([
  "(?<code>(?<ticks>`+)(?<codeText>[^`]|[^`].*?[^`])\\k<ticks>(?!`))",
  "(?<escape>\\\\[\\\\`*_{}#+\\-.!|~<>$])",
  String.raw`(?<formula>\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|(?<![\w$])\$(?![\s$])[^$\n]*?(?<=[^\s\\])\$(?![\w$]))`,
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
    const { code, codeText, escape, formula, link, linkText, target, address, strong, em, del, newline } = found.groups;
    const nested = (tag, content) => inlineIn(element(tag, ""), content, depth + 1);
    if (code) parent.append(element("code", "", codeText.trim()));
    else if (escape) parent.append(escape[1]);
    else if (formula) parent.append(formulaOf(formula));
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
