"use strict";
// Finds formulas in a text: \(..\) and $..$ within a line, \[..\], $$..$$ and environments such as
// align on lines of their own. Before Markdown is parsed, a formula is encoded as one word of
// private characters (plane 15), so that none of its characters are taken for Markdown. Formulas in
// code remain code; formulas that are not closed yet and sums of money remain text.

const kFormulaMarks = new RegExp([
  /(?:^|\n)[ \t>]*(?<fence>`{3,}|~{3,})/, /(?<code>`+)/, /\\(?<open>[([])/, /\\begin\{(?<environment>(?:equation|align|gather|multline)\*?)\}/,
  /\\[^]/, /(?<dollars>\$\$)/, /(?<![\p{L}\p{N}$])(?<inline>\$(?![\s$])(?:\\[^\n]|[^$\\\n])+(?<!\s)\$(?![\p{L}\p{N}$]))/,
].map((part) => part.source).join("|"), "gu");
const kClosingMarks = /\\end\{\w+\*?\}|\\[^]|\$\$/g;
const kPrice = /^\$[\d.,]+\s+\p{L}{2}/u;  // "$5 to 10$": a sum of money, then prose

function hideFormulas(source) {
  const text = source.replace(/[\u{F0000}-\u{FFFFF}\uFFFF]/gu, "\uFFFD"), ends = new MarkFinder(text);
  let hidden = "", done = 0;
  kFormulaMarks.lastIndex = 0;
  for (let found; (found = kFormulaMarks.exec(text)); ) {
    const {fence, code, open, environment, dollars, inline} = found.groups, from = kFormulaMarks.lastIndex;
    let end;
    if (fence) kFormulaMarks.lastIndex = ends.fence(fence, from);
    else if (code) kFormulaMarks.lastIndex = ends.find(code, /`+/g, from) ?? from;
    else if (inline && kPrice.test(inline)) kFormulaMarks.lastIndex = found.index + 1;
    else if (inline) end = from;
    else if (open) end = ends.find(open === "(" ? "\\)" : "\\]", kClosingMarks, from);
    else if (dollars) end = ends.find(dollars, kClosingMarks, from);
    else if (environment) end = ends.find(`\\end{${environment}}`, kClosingMarks, from);
    if (end === undefined) continue;
    hidden += text.slice(done, found.index) + hiddenFormula(text.slice(found.index, end));
    kFormulaMarks.lastIndex = done = end;
  }
  return hidden + text.slice(done);
}

// Finds closing marks. A mark that is missing is looked for only once in a paragraph.
class MarkFinder {
  constructor(text) {
    this.text = text;
    this.paragraphEnd = -1;
    this.missing = new Map();  // mark -> end of the paragraph that contains no further one
  }

  // The position after the first match of `pattern` that equals `mark`, in the paragraph of `from`.
  find(mark, pattern, from) {
    if (from > this.paragraphEnd) {
      const blank = /\n[ \t]*\n/g;
      blank.lastIndex = from;
      this.paragraphEnd = blank.exec(this.text)?.index ?? this.text.length;
    }
    if (this.missing.get(mark) === this.paragraphEnd) return undefined;
    const paragraph = this.text.slice(from, this.paragraphEnd);
    pattern.lastIndex = 0;
    for (let found; (found = pattern.exec(paragraph)); ) if (found[0] === mark) return from + pattern.lastIndex;
    this.missing.set(mark, this.paragraphEnd);
    return undefined;
  }

  fence(mark, from) {
    const close = /\n[ \t>]*(`{3,}|~{3,})/g;
    close.lastIndex = from;
    for (let found; (found = close.exec(this.text)); ) if (found[1].startsWith(mark)) return close.lastIndex;
    return this.text.length;
  }
}

function hiddenFormula(written) {
  return written.replace(/[^]/g, (unit) => String.fromCodePoint(0xF0000 + unit.charCodeAt(0))) + "\u{FFFFF}";
}

// Undoes hideFormulas.
function shownFormulas(text) {
  return text.replace(/[\u{F0000}-\u{FFFFF}]/gu, (unit) => (unit === "\u{FFFFF}" ? "" : String.fromCharCode(unit.codePointAt(0) - 0xF0000)));
}

// The node that is shown for a hidden formula.
function formulaNode(hidden) {
  const written = shownFormulas(hidden), isEnvironment = written.startsWith("\\begin");
  const isDisplay = isEnvironment || written.startsWith("\\[") || written.startsWith("$$");
  const nMarks = isEnvironment ? 0 : /^\$[^$]/.test(written) ? 1 : 2;
  const made = formula(written.slice(nMarks, written.length - nMarks), isDisplay);
  if (!made || !isDisplay) return made ?? written;
  const line = document.createElement("span");  // scrolls if the formula is wider than the page
  line.className = "formula";
  line.append(made);
  return line;
}
