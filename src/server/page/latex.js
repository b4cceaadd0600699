"use strict";
// LaTeX becomes MathML Core, which browsers show by themselves. There are no macros, so the time is
// linear. Elements and attributes are those named here; the output of a model only becomes text in
// them.

// The formula as a MathML element, or null if it cannot be parsed; then its source is shown.
function formula(source, isDisplay) {
  try {
    return new FormulaParser(source).math(isDisplay);
  } catch (error) {
    if (error instanceof FormulaError) return null;
    throw error;
  }
}

class FormulaError extends Error {}

// ------------------------------------------------------------------------------------- symbols

const pairs = (text) => new Map(text.trim().split(/\s+/).map((word, i, all) => [word, all[i + 1]]).filter((_, i) => i % 2 === 0));
const names = (text) => new Set(text.trim().split(/\s+/));

const kIdentifiers = pairs(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ lambda λ mu μ nu ν xi ξ
  omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ phi ϕ varphi φ chi χ psi ψ omega ω
  Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ Phi Φ Psi Ψ Omega Ω
  infty ∞ ell ℓ hbar ℏ Re ℜ Im ℑ aleph ℵ wp ℘ imath ı jmath ȷ emptyset ∅ varnothing ∅ partial ∂ nabla ∇ angle ∠ triangle △ square □
  Box □ blacksquare ■ qed ■ top ⊤ bot ⊥ degree ° checkmark ✓ prime ′ dagger † ddagger ‡ S § clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠
  ldots … dots … dotsc … cdots ⋯ dotsb ⋯ dotsm ⋯ vdots ⋮ ddots ⋱ pounds £ euro €`);
const kOperators = pairs(`
  times × cdot ⋅ div ÷ pm ± mp ∓ ast ∗ star ⋆ circ ∘ bullet ∙ oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ cap ∩ cup ∪ setminus ∖ wedge ∧ land ∧ vee ∨
  lor ∨ sqcap ⊓ sqcup ⊔ uplus ⊎ amalg ⨿ neg ¬ lnot ¬ forall ∀ exists ∃ nexists ∄ le ≤ leq ≤ leqslant ⩽ ge ≥ geq ≥ geqslant ⩾ ne ≠ neq ≠
  lt < gt > approx ≈ equiv ≡ sim ∼ simeq ≃ cong ≅ propto ∝ ll ≪ gg ≫ asymp ≍ doteq ≐ triangleq ≜ coloneqq ≔ lesssim ≲ gtrsim ≳
  prec ≺ succ ≻ preceq ⪯ succeq ⪰ in ∈ notin ∉ ni ∋ subset ⊂ subseteq ⊆ subsetneq ⊊ supset ⊃ supseteq ⊇ supsetneq ⊋ mid ∣ nmid ∤
  parallel ∥ nparallel ∦ perp ⟂ models ⊨ vdash ⊢ vDash ⊨ therefore ∴ because ∵ colon : to → rightarrow → longrightarrow ⟶ leftarrow ←
  gets ← longleftarrow ⟵ leftrightarrow ↔ longleftrightarrow ⟷ Rightarrow ⇒ implies ⟹ Longrightarrow ⟹ Leftarrow ⇐ impliedby ⟸
  Longleftarrow ⟸ Leftrightarrow ⇔ iff ⟺ Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ hookleftarrow ↩ uparrow ↑ downarrow ↓
  updownarrow ↕ Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ rightharpoonup ⇀ rightleftharpoons ⇌ leadsto ⇝ rightsquigarrow ⇝ % % # # _ _ & & $ $`);
const kLargeOperators = pairs("sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigoplus ⨁ bigotimes ⨂ bigodot ⨀ bigvee ⋁ bigwedge ⋀ bigsqcup ⨆");
const kIntegrals = pairs("int ∫ iint ∬ iiint ∭ oint ∮");
const kFunctions = names(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp arg deg dim hom ker`);
const kFunctionsWithLimits = names("lim limsup liminf max min sup inf det gcd Pr argmax argmin");
const kDelimiters = pairs(`( ( ) ) [ [ ] ] | | / / < ⟨ > ⟩ \\{ { \\} } \\| ‖ \\lbrace { \\rbrace } \\lbrack [ \\rbrack ] \\langle ⟨ \\rangle ⟩ \\vert | \\lvert |
  \\rvert | \\Vert ‖ \\lVert ‖ \\rVert ‖ \\lfloor ⌊ \\rfloor ⌋ \\lceil ⌈ \\rceil ⌉ \\backslash \\ \\lgroup ⟮ \\rgroup ⟯ \\uparrow ↑ \\downarrow ↓ \\updownarrow ↕`);
const kSpaces = pairs(", 0.17em thinspace 0.17em : 0.22em > 0.22em medspace 0.22em ; 0.28em thickspace 0.28em enspace 0.5em quad 1em qquad 2em space 0.25em");
const kAccents = pairs("hat ^ bar ¯ tilde ˜ vec → dot ˙ ddot ¨ check ˇ breve ˘ acute ´ grave ` mathring ˚");
const kWideAccents = pairs("widehat ^ widetilde ˜ overrightarrow → overleftarrow ← overleftrightarrow ↔ overbrace ⏞");
const kArrowsWithText = pairs("xrightarrow → xleftarrow ← xRightarrow ⇒ xLeftarrow ⇐ xleftrightarrow ↔ xmapsto ↦");
const kSizes = pairs("big 1.2em bigl 1.2em bigr 1.2em bigm 1.2em Big 1.8em Bigl 1.8em Bigr 1.8em Bigm 1.8em bigg 2.4em biggl 2.4em biggr 2.4em Bigg 3em Biggl 3em Biggr 3em");
const kIgnoredCommands = names("displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag hline hfill allowbreak relax ! strut centering");
const kTransparentCommands = names("mathop mathrel mathbin mathord mathopen mathclose mathpunct mathinner ensuremath smash");
const kTextCommands = pairs("text plain textrm plain textnormal plain mbox plain hbox plain textup plain textbf bold textit italic emph italic texttt mono textsf plain");
const kVariants = pairs("mathbf bold mathbb double mathcal script mathscr script mathfrak fraktur mathsf sans mathtt mono mathrm upright boldsymbol slanted bm slanted pmb slanted mathit italic mathnormal italic");
const kVariantSwitches = pairs("bf bold rm upright it italic sf sans tt mono cal script");  // up to the end of the group
// An environment: its delimiters (. is none) and the alignment of its columns, repeated.
const kEnvironments = new Map(Object.entries({
  matrix: "..c", smallmatrix: "..c", pmatrix: "()c", bmatrix: "[]c", Bmatrix: "{}c", vmatrix: "||c", Vmatrix: "‖‖c", cases: "{.l", dcases: "{.l", rcases: ".}l",
  array: "..c", aligned: "..rl", align: "..rl", alignedat: "..rl", alignat: "..rl", split: "..rl", eqnarray: "..rcl", gathered: "..c", gather: "..c", equation: "..c", multline: "..c",
}));

// The first letters of alphabets among the Mathematical Alphanumeric Symbols, and those that Unicode has elsewhere.
const kAlphabets = new Map(Object.entries({
  bold: {A: 0x1D400, a: 0x1D41A, 0: 0x1D7CE, Α: 0x1D6A8, α: 0x1D6C2}, slanted: {A: 0x1D468, a: 0x1D482, 0: 0x1D7CE, Α: 0x1D71C, α: 0x1D736},
  double: {A: 0x1D538, a: 0x1D552, 0: 0x1D7D8}, script: {A: 0x1D49C, a: 0x1D4B6}, fraktur: {A: 0x1D504, a: 0x1D51E},
  sans: {A: 0x1D5A0, a: 0x1D5BA, 0: 0x1D7E2}, mono: {A: 0x1D670, a: 0x1D68A, 0: 0x1D7F6},
}));
const kAlphabetExceptions = new Map(Object.entries({
  double: pairs("C ℂ H ℍ N ℕ P ℙ Q ℚ R ℝ Z ℤ"), fraktur: pairs("C ℭ H ℌ I ℑ R ℜ Z ℨ"),
  script: pairs("B ℬ E ℰ F ℱ H ℋ I ℐ L ℒ M ℳ R ℛ e ℯ g ℊ o ℴ"),
}));

function inVariant(letter, variant) {
  const other = kAlphabetExceptions.get(variant)?.get(letter);
  if (other) return other;
  for (const [first, code] of Object.entries(kAlphabets.get(variant) ?? {})) {
    const distance = letter.codePointAt(0) - first.codePointAt(0), size = first === "0" ? 10 : first > "z" ? 25 : 26;
    if (distance >= 0 && distance < size) return String.fromCodePoint(code + distance);
  }
  return letter;
}

// -------------------------------------------------------------------------------------- parser

function mathElement(tag, attributes = {}, ...children) {
  const made = document.createElementNS("http://www.w3.org/1998/Math/MathML", tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
const row = (nodes) => (nodes.length === 1 ? nodes[0] : mathElement("mrow", {}, ...nodes));
const isEmpty = (node) => node.localName === "mrow" && !node.hasChildNodes();
const operator = (text, attributes = {}) => mathElement("mo", {stretchy: "false", ...(/^[|‖/.!?@"]$/.test(text) ? kClose : {}), ...attributes}, text);
const fence = (text, form) => (text ? mathElement("mo", {fence: "true", stretchy: "true", form}, text) : mathElement("mrow"));
const space = (width) => mathElement("mspace", {width});
const kClose = {lspace: "0em", rspace: "0em"};

const kMaxDepth = 60;  // commands and groups inside each other
const kMaxNodes = 500;    // nodes in a row, rows, cells: Chromium's time to fill a MathML element is quadratic in them
const kBrace = new Set(["}"]), kBracket = new Set(["]"]), kRight = new Set(["\\right"]), kDollar = new Set(["$"]);
const kCellEnds = new Set([undefined, "&", "\\\\", "\\cr", "\\end", "}"]);

class FormulaParser {
  constructor(source) {
    this.tokens = source.match(/\\(?:[a-zA-Z]+|[^])|\s+|[^]/gu) ?? [];
    this.at = 0;
    this.depth = 0;
    this.variant = "";          // the alphabet of letters
    this.limits = new Set();    // nodes whose scripts are placed below and above
    this.functions = new Set(); // nodes such as sin, followed by a space unless parentheses follow
  }

  math(isDisplay) {
    const rows = this.rows();
    if (this.peek() !== undefined) throw new FormulaError();
    const isOne = rows.length === 1 && rows[0].length === 1;
    if (isOne && isEmpty(rows[0][0])) throw new FormulaError();
    const columns = rows.some((cells) => cells.length > 1) ? "rl" : "c";
    return mathElement("math", isDisplay ? {display: "block"} : {}, isOne ? rows[0][0] : this.table(rows, columns, true));
  }

  // White space has no meaning outside \text.
  peek() {
    while (/^\s/.test(this.tokens[this.at] ?? "")) ++this.at;
    return this.tokens[this.at];
  }
  next() {
    const token = this.peek();
    ++this.at;
    return token;
  }
  expect(token) {
    if (this.next() !== token) throw new FormulaError();
  }
  has(token) {
    if (this.peek() !== token) return false;
    ++this.at;
    return true;
  }

  // Nodes up to one of the tokens in `ends`, which is not consumed.
  nodes(ends) {
    const nodes = [];
    while (!ends.has(this.peek())) {
      nodes.push(...this.item());
      if (nodes.length > kMaxNodes) throw new FormulaError();
    }
    return nodes;
  }

  // One atom with its scripts; no nodes for commands without effect.
  item() {
    const isScript = /^['^_]$/.test(this.peek());
    const base = isScript ? mathElement("mrow") : this.atom();
    if (!base) return [];
    let hasLimits = this.limits.has(base), under = null, over = null;
    for (;;) {
      const token = this.peek();
      if (token === "\\limits" || token === "\\nolimits") {
        hasLimits = token === "\\limits";
        ++this.at;
      } else if (token === "_" && !under) {
        ++this.at;
        under = this.argument();
      } else if (token === "^" && !over) {
        ++this.at;
        over = this.argument();
      } else if (token === "'" && !over) {
        over = this.primes();
        if (this.has("^")) over = mathElement("mrow", {}, over, this.argument());
      } else {
        break;
      }
    }
    if (this.functions.has(base) && !/^(?:[([)\]},;.]|\\left|\\bigl?|\\right)?$/.test(this.peek() ?? "")) base.setAttribute("rspace", "0.17em");
    const tag = "m" + (under ? (hasLimits ? "under" : "sub") : "") + (over ? (hasLimits ? "over" : "sup") : "");
    return [tag === "m" ? base : mathElement(tag, {}, base, ...(under ? [under] : []), ...(over ? [over] : []))];
  }

  primes() {
    let text = "";
    while (this.has("'")) text += "′";
    return operator(text);
  }

  // The argument of a command or a script: a group, or one token.
  argument() {
    const token = this.peek();
    if (/^\d$/.test(token)) {
      ++this.at;
      return mathElement("mn", {}, inVariant(token, this.variant));
    }
    return this.atom() ?? mathElement("mrow");
  }

  // Null for commands without effect.
  atom() {
    const token = this.next();
    if (token === undefined || /^(?:[}&^_]|\\\\|\\(?:cr|end|right))$/.test(token) || ++this.depth > kMaxDepth) throw new FormulaError();
    const node = token === "{" ? this.group() : token[0] === "\\" ? this.command(token.slice(1)) : this.symbol(token);
    --this.depth;
    return node;
  }

  symbol(token) {
    if (/^\d$/.test(token)) return this.number(token);
    if (/^[a-zA-Z\u0370-\u03FF]$/.test(token)) return this.letter(token);
    if (/^\p{L}$/u.test(token)) return mathElement("mtext", {}, token);
    if (token === "~") return space("0.33em");
    return operator(token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  // {,} and {=} are ordinary symbols without space around them.
  group() {
    const before = this.variant, nodes = this.nodes(kBrace);
    this.expect("}");
    this.variant = before;
    const isOperator = nodes.length === 1 && nodes[0].localName === "mo" && !this.limits.has(nodes[0]);
    return isOperator ? mathElement("mrow", {}, operator(nodes[0].textContent, kClose)) : row(nodes);
  }

  number(digits) {
    for (let token; (token = this.tokens[this.at]) !== undefined; ++this.at) {
      if (!/^\d$/.test(token) && !(token === "." && /^\d$/.test(this.tokens[this.at + 1] ?? ""))) break;
      digits += token;
    }
    return mathElement("mn", {}, [...digits].map((digit) => inVariant(digit, this.variant)).join(""));
  }

  letter(letter) {
    if (this.variant !== "upright") return mathElement("mi", /^[a-zA-Zα-ωϑϕϖϱϵ∂]$/.test(letter) ? {} : {mathvariant: "normal"}, inVariant(letter, this.variant));
    while (/^[a-zA-Z]$/.test(this.tokens[this.at] ?? "")) letter += this.tokens[this.at++];
    return mathElement("mi", {mathvariant: "normal"}, letter);
  }

  command(name) {
    if (kIdentifiers.has(name)) return this.letter(kIdentifiers.get(name));
    if (kOperators.has(name)) return operator(kOperators.get(name));
    if (kLargeOperators.has(name)) return this.withLimits(mathElement("mo", {movablelimits: "true", largeop: "true"}, kLargeOperators.get(name)));
    if (kIntegrals.has(name)) return mathElement("mo", {largeop: "true"}, kIntegrals.get(name));
    if (kFunctions.has(name)) return this.functionName(name);
    if (kFunctionsWithLimits.has(name)) return this.withLimits(this.functionName(name.replace(/^(lim|arg)(?=sup|inf|max|min)/, "$1\u2009")));
    if (kDelimiters.has("\\" + name)) return operator(kDelimiters.get("\\" + name));
    if (kSpaces.has(name)) return space(kSpaces.get(name));
    if (/^\s/.test(name)) return space("0.25em");
    if (kAccents.has(name)) return mathElement("mover", {accent: "true"}, this.argument(), operator(kAccents.get(name), name === "vec" ? {mathsize: "70%"} : {}));
    if (kWideAccents.has(name)) return this.withLimits(mathElement("mover", {}, this.argument(), mathElement("mo", {stretchy: "true"}, kWideAccents.get(name))));
    if (kArrowsWithText.has(name)) return this.arrowWithText(kArrowsWithText.get(name));
    if (kSizes.has(name)) return mathElement("mo", {...kClose, stretchy: "true", symmetric: "true", minsize: kSizes.get(name), maxsize: kSizes.get(name)}, this.delimiter());
    if (kVariants.has(name)) return this.inAlphabet(kVariants.get(name));
    if (kTextCommands.has(name)) return this.text(kTextCommands.get(name));
    if (kVariantSwitches.has(name)) return void (this.variant = kVariantSwitches.get(name));
    if (kIgnoredCommands.has(name)) return null;
    if (kTransparentCommands.has(name)) return this.argument();
    if (kCommands.has(name)) return kCommands.get(name)(this);
    return mathElement("mtext", {}, "\\" + name);
  }

  withLimits(node) {
    this.limits.add(node);
    return node;
  }

  functionName(name) {
    const node = operator(name, {form: "prefix", lspace: "0.17em", rspace: "0em", movablelimits: "true"});
    this.functions.add(node);
    return node;
  }

  delimiter() {
    const token = this.next();
    if (token === ".") return "";
    if (!kDelimiters.has(token)) throw new FormulaError();
    return kDelimiters.get(token);
  }

  // \left ( .. \right ): as high as the content.
  fenced() {
    const open = fence(this.delimiter(), "prefix"), nodes = this.nodes(kRight);
    this.expect("\\right");
    return mathElement("mrow", {}, open, ...nodes, fence(this.delimiter(), "postfix"));
  }

  root() {
    const degree = this.has("[") ? row(this.nodes(kBracket)) : null;
    if (degree) this.expect("]");
    const inside = this.argument();
    return degree ? mathElement("mroot", {}, inside, degree) : mathElement("msqrt", {}, inside);
  }

  arrowWithText(arrow) {
    const below = this.has("[") ? row(this.nodes(kBracket)) : null;
    if (below) this.expect("]");
    const base = mathElement("mo", {stretchy: "true"}, arrow), above = this.argument();
    return below ? mathElement("munderover", {}, base, below, above) : mathElement("mover", {}, base, above);
  }

  inAlphabet(variant) {
    const before = this.variant;
    this.variant = variant;
    const node = this.argument();
    this.variant = before;
    return node;
  }

  // \overset{a}{b}: a above b.
  stacked(tag) {
    const other = this.argument(), base = this.argument();
    return mathElement(tag, {}, base, other);
  }

  // \substack{a \\ b}
  substack() {
    this.expect("{");
    const rows = this.rows();
    this.expect("}");
    return this.table(rows, "c", false);
  }

  // A negated operator of one symbol, such as \not\in.
  negated() {
    const node = this.argument();
    if (node.childElementCount === 0) node.textContent = (node.textContent + "\u0338").normalize("NFC");
    return node;
  }

  // Skips an argument that is not shown.
  skipArgument() {
    if (!this.has("{")) return void this.argument();
    for (let open = 1; open > 0; ++this.at) {
      const token = this.tokens[this.at];
      if (token === undefined) throw new FormulaError();
      open += token === "{" ? 1 : token === "}" ? -1 : 0;
    }
  }

  text(style) {
    if (++this.depth > kMaxDepth) throw new FormulaError();  // text in text
    const parts = [];
    let run = "", open = 1;
    const end = () => {
      if (run) parts.push(mathElement("mtext", style === "plain" ? {} : {class: style}, run));
      run = "";
    };
    this.expect("{");
    while (open > 0) {
      const token = this.tokens[this.at++];
      if (token === undefined || parts.length > kMaxNodes) throw new FormulaError();
      if (token === "{") ++open;
      else if (token === "}") --open;
      else if (token === "$") {
        end();
        parts.push(...this.nodes(kDollar));
        this.expect("$");
      } else if (kTextCommands.has(token.slice(1)) && this.peek() === "{") {
        end();
        parts.push(this.text(kTextCommands.get(token.slice(1))));
      } else if (/^(\s|~$|\\[\s,;:\\]$)/.test(token)) run += "\u00A0";
      else run += /^\\[^a-zA-Z]$/u.test(token) ? token.slice(1) : token;
    }
    end();
    --this.depth;
    return row(parts);
  }

  // Rows of cells up to \end, a brace or the end of the formula, which is not consumed.
  rows() {
    const rows = [[]];
    for (;;) {
      const cells = rows[rows.length - 1];
      cells.push(row(this.nodes(kCellEnds)));
      if (this.has("&") && cells.length < kMaxNodes) continue;
      if (!this.has("\\\\") && !this.has("\\cr")) break;
      this.skipRowDistance();
      rows.push([]);
      if (rows.length > kMaxNodes) throw new FormulaError();
    }
    const last = rows[rows.length - 1];
    if (rows.length > 1 && last.length === 1 && isEmpty(last[0])) rows.pop();
    return rows;
  }

  // [4pt] after \\
  skipRowDistance() {
    const written = /^\s*\[\s*-?[\d.]+\s*[a-z]{2}\s*\]/.exec(this.tokens.slice(this.at, this.at + 16).join(""));
    if (!written) return;
    for (let n = 0; n < written[0].length; ) n += this.tokens[this.at++].length;
  }

  table(rows, columns, isDisplay) {
    const cells = (nodes) => nodes.map((node, i) => mathElement("mtd", {class: columns[i % columns.length]}, node));
    return mathElement("mtable", {...(isDisplay ? {displaystyle: "true"} : {}), class: columns === "rl" || columns === "rcl" ? "aligned" : "matrix"},
      ...rows.map((nodes) => mathElement("mtr", {}, ...cells(nodes))));
  }

  environment() {
    const name = this.environmentName(), kind = name.replace(/\*$/, "");
    if (!kEnvironments.has(kind)) throw new FormulaError();
    let [open, close, ...columns] = kEnvironments.get(kind);
    if (/^align(ed)?at$/.test(kind)) this.skipArgument();
    if (kind === "array") columns = this.columns();
    const rows = this.rows();
    this.expect("\\end");
    if (this.environmentName() !== name) throw new FormulaError();
    const table = this.table(rows, columns.join(""), /^(dcases|align|split|gather|equation|multline|eqnarray)/.test(kind));
    const side = (text, form) => (text === "." ? [] : [fence(text, form)]);
    return row([...side(open, "prefix"), table, ...side(close, "postfix")]);
  }

  environmentName() {
    this.expect("{");
    let name = "";
    for (let token; (token = this.next()) !== "}"; name += token) if (!/^[a-zA-Z*]$/.test(token)) throw new FormulaError();
    return name;
  }

  columns() {
    this.expect("{");
    const columns = [];
    for (let token; (token = this.next()) !== "}"; ) {
      if (!/^[lcr|]$/.test(token)) throw new FormulaError();
      if (token !== "|") columns.push(token);
    }
    return columns.length ? columns : ["c"];
  }
}

// Commands that are more than a symbol. Arguments are read from left to right.
const kCommands = new Map(Object.entries({
  frac: (p) => mathElement("mfrac", {}, p.argument(), p.argument()),
  dfrac: (p) => mathElement("mfrac", {displaystyle: "true"}, p.argument(), p.argument()),
  tfrac: (p) => mathElement("mfrac", {displaystyle: "false"}, p.argument(), p.argument()),
  cfrac: (p) => mathElement("mfrac", {displaystyle: "true"}, p.argument(), p.argument()),
  binom: (p) => mathElement("mrow", {}, fence("(", "prefix"), mathElement("mfrac", {linethickness: "0"}, p.argument(), p.argument()), fence(")", "postfix")),
  sqrt: (p) => p.root(),
  left: (p) => p.fenced(),
  middle: (p) => fence(p.delimiter(), "infix"),
  begin: (p) => p.environment(),
  boxed: (p) => mathElement("mrow", {class: "boxed"}, p.argument()),
  fbox: (p) => mathElement("mrow", {class: "boxed"}, p.text("plain")),
  cancel: (p) => mathElement("mrow", {class: "cancelled"}, p.argument()),
  overline: (p) => mathElement("mrow", {class: "overline"}, p.argument()),
  underline: (p) => mathElement("mrow", {class: "underline"}, p.argument()),
  underbrace: (p) => p.withLimits(mathElement("munder", {}, p.argument(), mathElement("mo", {stretchy: "true"}, "⏟"))),
  overset: (p) => p.stacked("mover"),
  stackrel: (p) => p.stacked("mover"),
  underset: (p) => p.stacked("munder"),
  substack: (p) => p.substack(),
  not: (p) => p.negated(),
  operatorname: (p) => (p.has("*") ? p.withLimits(p.functionName(p.text("plain").textContent)) : p.functionName(p.text("plain").textContent)),
  bmod: () => operator("mod", {lspace: "0.22em", rspace: "0.22em"}),
  mod: () => operator("mod", {lspace: "1em", rspace: "0.33em"}),
  pmod: (p) => mathElement("mrow", {}, space("1em"), operator("("), operator("mod", {lspace: "0em", rspace: "0.33em"}), p.argument(), operator(")")),
  tag: (p) => mathElement("mrow", {}, space("2em"), operator("("), p.text("plain"), operator(")")),
  phantom: (p) => mathElement("mphantom", {}, p.argument()),
  hspace: (p) => (p.has("*"), p.skipArgument(), space("1em")),
  vspace: (p) => (p.has("*"), p.skipArgument(), null),
  label: (p) => (p.skipArgument(), null),
  color: (p) => (p.skipArgument(), null),
  textcolor: (p) => (p.skipArgument(), p.argument()),
}));
for (const [name, other] of pairs("dbinom binom tbinom binom xcancel cancel bcancel cancel")) kCommands.set(name, kCommands.get(other));
