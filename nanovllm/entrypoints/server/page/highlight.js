/** Colours for code, one line at a time, so that a line is coloured once though the code grows below it. */

import { element } from "./common.js";

const LONGEST_LINE = 2000; // characters; a longer one is data, and has no colours
const KEYWORDS = new Set(`abstract and as assert async await auto begin bool boolean break byte case catch chan char class
  const constexpr continue crate declare def default defer del delete do done double dyn elif else elseif elsif end enum
  esac except export extends extern fi final finally float fn for foreach from func function global go goto if impl
  implements import in include inline instanceof int interface internal is lambda let local long loop match mod module
  move mut namespace new nonlocal not object of operator or override package pass private protected pub public raise
  readonly ref register repeat require return select short signed sizeof static str string struct super switch template
  then this throw throws trait try type typedef typeof union unless unsafe unsigned until use using val var virtual void
  volatile where while with yield`.split(/\s+/));
const SQL_KEYWORDS = new Set(`add all alter and as asc between by case create cross delete desc distinct drop else end
  exists from full group having if in index inner insert into is join key left like limit not null offset on or order
  outer over partition primary references right select set table then union unique update values view when where
  with`.split(/\s+/));
const CONSTANTS = new Set("false False nil None null self true True undefined NaN Infinity".split(" "));

const STRING = String.raw`"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'`, NUMBER = String.raw`(?<![\w.])\d[\w.]*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`, NEVER = "(?!)";

/** starts: what begins a part that can have several lines. comment: what goes on to the end of its line. */
const language = ({ starts = NEVER, comment = NEVER, word = WORD, keywords = KEYWORDS, isLower = false }) => ({
  pattern: new RegExp(`(?<start>${starts})|(?<comment>(?:${comment}).*)|(?<string>${STRING})|(?<number>${NUMBER})|`
    + `(?<word>${word})(?:(?=(?<call>\\())|)`, "g"),
  isKeyword: (text) => keywords === null || keywords.has(isLower ? text.toLowerCase() : text),
});
const ENDS = { "/*": "*/", "`": "`", '"""': '"""', "'''": "'''", "<!--": "-->" };
const C = language({ starts: "/\\*", comment: "//" });
const SCRIPT = language({ starts: "/\\*|`", comment: "//" });
const PYTHON = language({ starts: "\"\"\"|'''", comment: "#" });
const SHELL = language({ comment: "(?<!\\S)#" });
const CSS = language({ starts: "/\\*", word: "@[\\w-]+|(?<![\\w.#-])[\\w-]+(?=\\s*:)", keywords: null });
const SQL = language({ starts: "/\\*", comment: "--", keywords: SQL_KEYWORDS, isLower: true });
const MARKUP = language({ starts: "<!--", word: "</?[\\w:-]+|/?>", keywords: null });
const DIFF = { pattern: /^(?:(?<string>\+.*)|(?<number>-.*)|(?<comment>@@.*))/g, isKeyword: () => false };
const PLAIN = { pattern: /(?!)/g, isKeyword: () => false };
const LANGUAGES = new Map([
  [C, "c h cc cpp c++ cxx hpp java go golang rust rs cs csharp c# swift kotlin kt scala dart php cuda cu json jsonc"],
  [SCRIPT, "js javascript jsx mjs ts typescript tsx"], [PYTHON, "py python python3 py3"],
  [SHELL, "sh bash shell zsh console yaml yml toml ini conf dockerfile make makefile cmake r ruby rb perl pl"],
  [CSS, "css scss less"], [SQL, "sql mysql postgresql sqlite lua haskell hs"], [MARKUP, "html xml svg vue"],
  [DIFF, "diff patch"],
].flatMap(([each, names]) => names.split(" ").map((name) => [name, each])));

/** Return a function that makes an element of a line of code and the element of the line before, if there is one. */
export function painterOf(name) {
  const known = LANGUAGES.get(name.toLowerCase()) ?? PLAIN;
  return (line, before) => paint(line, before?.end ?? null, known);
}

/** end: what ends the part that the line begins in, such as a comment of several lines, or null. */
function paint(line, end, { pattern, isKeyword }) {
  const made = element("span", "line");
  const add = (kind, text) => made.append(kind ? element("span", `code-${kind}`, text) : text);
  let place = 0;
  while (place < line.length && line.length <= LONGEST_LINE) {
    if (end) {
      const found = line.indexOf(end, place), next = found < 0 ? line.length : found + end.length;
      add(/["'`]/.test(end) ? "string" : "comment", line.slice(place, next));
      [place, end] = [next, found < 0 ? end : null];
      continue;
    }
    pattern.lastIndex = place;
    const found = pattern.exec(line);
    if (found === null) break;
    add("", line.slice(place, found.index));
    const { start, comment, string, number, word, call } = found.groups;
    place = pattern.lastIndex;
    if (start) {
      end = ENDS[start];
      add(/["'`]/.test(end) ? "string" : "comment", start);
    } else if (word) {
      add(isKeyword(word) ? "keyword" : CONSTANTS.has(word) ? "number" : call === undefined ? "" : "call", word);
    } else {
      add(comment ? "comment" : string ? "string" : "number", found[0]);
    }
  }
  if (line) add("", line.slice(place));
  else made.append(element("br", "")); // so that it has the height of a line
  made.end = end; // for the next line
  return made;
}
