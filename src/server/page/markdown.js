"use strict";
// Converts Markdown to elements. Elements are created one by one and text only becomes text nodes, so
// that the output of a model never becomes markup; links lead to http, https and mailto only.

const kMaxBlockDepth = 50;  // nesting of quotations and lists; deeper content is shown as text

function markdown(source, depth = 0) {
  if (depth > kMaxBlockDepth) return inline(source);
  const lines = source.split("\n"), blocks = [];
  for (let at = 0; at < lines.length;) {
    const fence = lines[at].match(/^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/);
    const heading = lines[at].match(/^(#{1,6})\s+(.*?)\s*#*$/);
    if (fence) {
      let end = at + 1;
      while (end < lines.length && !lines[end].trim().startsWith(fence[1])) ++end;
      blocks.push(codeBlock(lines.slice(at + 1, end).join("\n"), fence[2]));
      at = end + 1;
    } else if (heading) {
      blocks.push(element("h" + Math.min(heading[1].length + 2, 6), {}, ...inline(heading[2])));
      ++at;
    } else if (/^\s*([-*_])(\s*\1){2,}\s*$/.test(lines[at])) {
      blocks.push(element("hr"));
      ++at;
    } else if (/^\s*>/.test(lines[at])) {
      const end = endOf(lines, at, (line) => /^\s*>/.test(line));
      blocks.push(element("blockquote", {}, ...markdown(lines.slice(at, end).map((line) => line.replace(/^\s*> ?/, "")).join("\n"), depth + 1)));
      at = end;
    } else if (item(lines[at])) {
      const end = endOf(lines, at, (line, i) => item(line) || /^\s+\S/.test(line) || (!line.trim() && i + 1 < lines.length && (item(lines[i + 1]) || /^\s{2,}\S/.test(lines[i + 1]))));
      blocks.push(list(lines.slice(at, end), depth + 1));
      at = end;
    } else if (/\|/.test(lines[at]) && /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/.test(lines[at + 1] ?? "") && /\|/.test(lines[at + 1])) {
      const end = endOf(lines, at, (line) => line.includes("|"));
      blocks.push(table(lines.slice(at, end)));
      at = end;
    } else if (!lines[at].trim()) {
      ++at;
    } else {
      const end = endOf(lines, at + 1, (line) => line.trim() && !/^( {0,3}(`{3,}|~{3,})|#{1,6}\s|\s*>)/.test(line) && !item(line));
      blocks.push(element("p", {}, ...inline(lines.slice(at, end).join("\n"))));
      at = end;
    }
  }
  return blocks;
}

function endOf(lines, at, belongs) {
  while (at < lines.length && belongs(lines[at], at)) ++at;
  return at;
}

function item(line) {
  return line.match(/^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/);
}

function list(lines, depth) {
  const [, indent, mark] = item(lines[0]);
  const made = /\d/.test(mark) ? element("ol", {start: parseInt(mark, 10)}) : element("ul");
  const items = [];
  for (const line of lines) {
    const found = item(line);
    if (found && found[1].length <= indent.length) items.push([found[3]]);
    else items[items.length - 1].push(line.replace(/^\s{1,4}/, ""));
  }
  for (const [first, ...rest] of items) made.append(element("li", {}, ...inline(first), ...(rest.length ? markdown(rest.join("\n"), depth) : [])));
  return made;
}

function table([head, , ...rows]) {
  const cells = (line, tag) => line.trim().replace(/^\||\|$/g, "").split("|").map((text) => element(tag, {}, ...inline(text.trim())));
  return element("div", {className: "table", tabIndex: 0}, element("table", {},
    element("thead", {}, element("tr", {}, ...cells(head, "th"))),
    element("tbody", {}, ...rows.map((row) => element("tr", {}, ...cells(row, "td"))))));
}

function codeBlock(written, language) {
  const text = shownFormulas(written);
  return element("div", {className: "code"},
    element("div", {}, element("span", {textContent: language || "text"}), copyButton("Copy code", () => text)),
    element("pre", {tabIndex: 0}, element("code", {textContent: text})));
}

const kInline = /([\u{F0000}-\u{FFFFE}]+)\u{FFFFF}|\\(\$)|(`+)([\s\S]*?[^`])\3(?!`)|\*\*([\s\S]+?)\*\*|(?<![\w*])\*([^*\s][^*]*?)\*(?!\*)|(?<!\w)_([^_\s][^_]*?)_(?!\w)|~~([\s\S]+?)~~|\[([^\]\n]*)\]\(([^()\s]*(?:\([^()\s]*\)[^()\s]*)*)\)|(https?:\/\/[^\s<>"'`)\]]+)/u;

function inline(text) {
  const nodes = [];
  for (let found; (found = text.match(kInline)); text = text.slice(found.index + found[0].length)) {
    const [all, hidden, dollar, , code, bold, italic, italic2, struck, label, target, address] = found;
    if (found.index) nodes.push(text.slice(0, found.index));
    if (hidden !== undefined) nodes.push(formulaNode(hidden));
    else if (dollar !== undefined) nodes.push(dollar);
    else if (code !== undefined) nodes.push(element("code", {textContent: shownFormulas(code.trim())}));
    else if (bold !== undefined) nodes.push(element("strong", {}, ...inline(bold)));
    else if (italic !== undefined || italic2 !== undefined) nodes.push(element("em", {}, ...inline(italic ?? italic2)));
    else if (struck !== undefined) nodes.push(element("del", {}, ...inline(struck)));
    else nodes.push(link(shownFormulas(target ?? address), shownFormulas(label ?? address), shownFormulas(all)));
  }
  if (text) nodes.push(text);
  return nodes;
}

// Plain text with formulas.
function withFormulas(text) {
  const parts = text.split(/([\u{F0000}-\u{FFFFE}]+)\u{FFFFF}/u);
  return parts.map((part, i) => (i % 2 ? formulaNode(part) : part));
}

function link(target, label, written) {
  if (!/^(https?:\/\/|mailto:)/i.test(target)) return written;
  return element("a", {href: target, target: "_blank", rel: "noopener noreferrer", textContent: label || target});
}
