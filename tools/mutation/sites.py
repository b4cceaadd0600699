"""Finds places for small changes, and the changes, in the compiler's syntax tree of one file.

Code that must be constant is skipped: declarations outside of functions, initialisers of members, constexpr
variables, case labels, template arguments, `if constexpr`. A missed case does not compile, and another change is
drawn.
"""
import dataclasses
import os
import re

from clang import cindex
from clang.cindex import CursorKind as K

from .schemata import ON, Site

COMPARISONS = {"<": ["<=", ">"], "<=": ["<", ">="], ">": [">=", "<"], ">=": [">", "<="], "==": ["!="], "!=": ["=="]}
ARITHMETIC = {"+": ["-"], "-": ["+"], "*": ["/"], "/": ["*"], "<<": [">>"], ">>": ["<<"], "&": ["|"], "|": ["&"]}
ASSIGNMENTS = {"+=": "-=", "-=": "+=", "*=": "/=", "/=": "*=", "|=": "&=", "&=": "|="}
NOT_COMMUTATIVE = "-/%"
FUNCTIONS = {K.FUNCTION_DECL, K.CXX_METHOD, K.CONSTRUCTOR, K.DESTRUCTOR, K.CONVERSION_FUNCTION, K.FUNCTION_TEMPLATE}
BODIES = {K.COMPOUND_STMT, K.UNEXPOSED_STMT, K.CXX_TRY_STMT}  # UNEXPOSED_STMT: the body of a coroutine
SCOPES = {K.NAMESPACE, K.STRUCT_DECL, K.CLASS_DECL, K.UNION_DECL, K.CLASS_TEMPLATE, K.CLASS_TEMPLATE_PARTIAL_SPECIALIZATION,
          K.LINKAGE_SPEC, K.UNEXPOSED_DECL, K.FRIEND_DECL}
LEFT_ALONE = {K.STATIC_ASSERT, K.ENUM_DECL, K.CXX_UNARY_EXPR, K.DECL_REF_EXPR, K.ASM_STMT, K.PARM_DECL, K.TYPE_ALIAS_DECL,
              K.TYPEDEF_DECL, K.STRUCT_DECL, K.UNION_DECL}
INTEGERS = {"int", "unsigned int", "long", "unsigned long", "long long", "unsigned long long", "short", "unsigned short",
            "signed char", "unsigned char", "char"}
WIDE = {"long", "unsigned long", "long long", "unsigned long long"}
ARITHMETIC_TYPES = INTEGERS | {"bool", "float", "double"}
WAITS = re.compile("wait|sync|join|lock|fence|notify|raise|record|flush|signal|acquire|release|publish|barrier", re.I)
# Statements whose absence only makes the program slower, or only weakens a check.
WITHOUT_EFFECT = re.compile(r"^(check|reserve|shrink_to_fit|(_mm_)?prefetch\w*|madvise|yield|_mm_pause|pause)$")
MINIMUM = re.compile(r"(?:std::)?(min|max)(?:<[\w:]+>)?\(")
CLOSED = re.compile(r"\s*\)")
SEMICOLON = re.compile(r"\s*;")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


@dataclasses.dataclass
class Scope:
    """Properties of the code around a cursor."""
    in_constexpr: bool = False
    jump: str = ""  # what a break would leave: "loop", "switch" or ""
    names: list = dataclasses.field(default_factory=list)  # (name, type) of local integers, the latest last
    is_place: bool = False  # in an index or an argument
    cast: str = ""  # the type to which a literal is converted

    def inside(self, **changes):
        return dataclasses.replace(self, names=list(self.names), **{"cast": "", **changes})


def type_of(cursor):
    return cursor.type.get_canonical().spelling.removeprefix("const ")


class Reader:
    """Collects the sites of one file."""

    def __init__(self, path, text):
        self.path, self.text, self.sites = path, text, []

    def read(self, unit):
        for cursor in unit.cursor.get_children():
            self.declaration(cursor)
        return list({(s.kind, s.start, s.end): s for s in self.sites}.values())  # the compiler repeats the operand of co_await

    def span(self, cursor):
        return cursor.extent.start.offset, cursor.extent.end.offset

    def source(self, cursor):
        return self.text[slice(*self.span(cursor))]

    def between(self, left, right):
        return self.text[left.extent.end.offset:right.extent.start.offset].strip()

    def is_here(self, cursor):
        return cursor.location.file is not None and os.path.normpath(cursor.location.file.name) == self.path

    def add(self, kind, scope, span, changed, schema=None):
        original = self.text[slice(*span)]
        schema = schema or [f"({ON} ? ({new}) : ({original}))" for new in changed]
        self.sites.append(Site(kind, *span, changed, schema, scope.in_constexpr))

    # Declarations

    def declaration(self, cursor):
        if not self.is_here(cursor):
            return
        if cursor.kind in FUNCTIONS:
            self.function(cursor)
        elif cursor.kind in SCOPES:
            for child in cursor.get_children():
                self.declaration(child)

    def function(self, cursor):
        children = list(cursor.get_children())
        bodies = [c for c in children if c.kind in BODIES]
        if not bodies:
            return
        head = self.text[cursor.extent.start.offset:bodies[-1].extent.start.offset]
        if "consteval" in head:
            return
        scope = Scope(in_constexpr=re.search(r"\bconstexpr\b", head) is not None)
        for child in children:
            if child.kind == K.PARM_DECL:
                self.remember(child, scope)
            elif child.kind in BODIES or (cursor.kind == K.CONSTRUCTOR and child.kind.is_expression()):
                self.walk(child, scope)

    def remember(self, declared, scope):
        if type_of(declared) in INTEGERS and declared.spelling:
            scope.names.append((declared.spelling, type_of(declared)))

    # Statements and expressions

    def walk(self, cursor, scope):
        kind = cursor.kind
        if kind in LEFT_ALONE or kind.is_attribute():
            return
        visit = self.VISITS.get(kind)
        children = list(cursor.get_children())
        if self.is_coroutines(cursor):  # the other children are generated by the compiler
            self.children(children[:1], scope.inside())
        elif visit:
            visit(self, cursor, children, scope)
        else:
            self.children(children, scope.inside())

    def is_coroutines(self, cursor):
        """Whether the cursor is the body of a coroutine, co_await or co_return."""
        begins = {K.UNEXPOSED_STMT: r"\{|co_return\b", K.UNEXPOSED_EXPR: r"co_await\b|co_yield\b"}.get(cursor.kind)
        return begins is not None and re.match(begins, self.source(cursor)) is not None

    def children(self, cursors, scope):
        for cursor in cursors:
            self.walk(cursor, scope)

    def statement(self, cursor, scope):
        """Adds the removal of a statement where a statement may be left out."""
        if cursor.kind == K.UNEXPOSED_STMT and not self.is_coroutines(cursor):  # [[likely]]
            for child in cursor.get_children():
                self.statement(child, scope)
            return
        end = self.end_of_statement(cursor)
        if end:
            start = cursor.extent.start.offset
            name = self.called_name(cursor)
            if not WITHOUT_EFFECT.match(name):
                kind = "wait left out" if WAITS.search(name) else "statement left out"
                self.add(kind, scope, (start, end), [""], [f"{{ if ({ON}) {{}} else {{ {self.text[start:end]} }} }}"])
        self.walk(cursor, scope)

    def end_of_statement(self, cursor):
        """The byte after the semicolon, or None if this is no statement with an effect of its own."""
        source = self.source(cursor)
        has_effect = (cursor.kind in {K.CALL_EXPR, K.UNARY_OPERATOR, K.BINARY_OPERATOR, K.COMPOUND_ASSIGNMENT_OPERATOR,
                                      K.CXX_DELETE_EXPR, K.CXX_THROW_EXPR, K.UNEXPOSED_EXPR} or source == "return")
        return self.behind_semicolon(cursor) if has_effect and source else None

    def behind_semicolon(self, cursor):
        semicolon = SEMICOLON.match(self.text, cursor.extent.end.offset)
        return semicolon.end() if semicolon else None

    def called_name(self, cursor):
        """The name of the function that a statement calls, otherwise ''."""
        before = re.match(r"(?:co_await\s+)?([\w:.<>\[\]()*&-]*?)(\w+)\(", self.source(cursor))
        return before[2] if before and self.source(cursor).endswith(")") else ""

    def compound(self, cursor, children, scope):
        inner = scope.inside()
        for first, second in zip(children, children[1:]):
            self.order(first, second, scope)
        for child in children:
            self.statement(child, inner)

    def order(self, first, second, scope):
        ends = self.end_of_statement(first), self.end_of_statement(second)
        names = self.called_name(first), self.called_name(second)
        if not all(ends) or not all(names) or any(WITHOUT_EFFECT.match(n) for n in names):
            return
        spans = (first.extent.start.offset, ends[0]), (second.extent.start.offset, ends[1])
        one, two = (self.text[slice(*span)] for span in spans)
        shared = (set(IDENTIFIER.findall(one)) & set(IDENTIFIER.findall(two))) - set(names) - {"std", "this", "co_await"}
        if one != two and shared:
            swapped = two + self.text[spans[0][1]:spans[1][0]] + one
            whole = spans[0][0], spans[1][1]
            self.add("order", scope, whole, [swapped],
                     [f"if ({ON}) {{ {swapped} }} else {{ {self.text[slice(*whole)]} }}"])

    def condition(self, cursor, scope):
        source = self.source(cursor)
        self.add("condition negated", scope, self.span(cursor), [f"!({source})"],
                 [f"(({ON}) != static_cast<bool>({source}))"])

    def branch(self, cursor, children, scope):
        inner = scope.inside()
        start = cursor.extent.start.offset
        if self.text.startswith("if constexpr", start):
            children = children[1:]
        elif self.text.startswith("if (", start) or self.text.startswith("while (", start):
            tested = [c for c in children if c.kind.is_expression()][:1]
            if tested and self.is_in_brackets(tested[0]):
                self.condition(tested[0], scope)
        if cursor.kind == K.WHILE_STMT:
            inner.jump = "loop"
        for child in children:
            (self.walk if self.is_in_brackets(child) else self.statement)(child, inner)

    def is_in_brackets(self, cursor):
        return CLOSED.match(self.text, cursor.extent.end.offset) is not None

    def loop(self, cursor, children, scope):
        inner = scope.inside(jump="loop")
        self.children(children[:-1], inner)
        self.statement(children[-1], inner)

    def repeated(self, cursor, children, scope):
        inner = scope.inside(jump="loop")
        self.statement(children[0], inner)
        self.children(children[1:], inner)

    def switch(self, cursor, children, scope):
        self.children(children, scope.inside(jump="switch"))

    def case(self, cursor, children, scope):
        self.statement(children[-1], scope)

    def jump(self, cursor, children, scope):
        end = self.behind_semicolon(cursor)
        if scope.jump == "loop" and end:
            start = cursor.extent.start.offset
            other = "break;" if cursor.kind == K.CONTINUE_STMT else "continue;"
            self.add("break and continue", scope, (start, end), [other],
                     [f"{{ if ({ON}) {other} else {self.text[start:end]} }}"])

    def returned(self, cursor, children, scope):
        if children and type_of(children[0]) == "bool" and children[0].kind != K.CXX_BOOL_LITERAL_EXPR:
            self.condition(children[0], scope)
        self.children(children, scope)

    def choice(self, cursor, children, scope):
        if self.between(children[0], children[1]) == "?":
            self.condition(children[0], scope)
        self.children(children, scope.inside())

    def declared(self, cursor, children, scope):
        self.children(children, scope)

    def variable(self, cursor, children, scope):
        name = cursor.location.offset
        head = self.text[cursor.extent.start.offset:name]
        if not re.search(r"\b(constexpr|constinit)\b", head):
            for child in children:
                before = self.text[name:child.extent.start.offset]
                if child.extent.start.offset > name and before.count("[") == before.count("]"):
                    self.walk(child, scope.inside())
        self.remember(cursor, scope)

    def anonymous_function(self, cursor, children, scope):
        inner = scope.inside(jump="", is_place=False)
        for child in children:
            if child.kind == K.PARM_DECL:
                self.remember(child, inner)
            else:
                self.walk(child, inner)

    def member(self, cursor, children, scope):
        """Visits only what precedes the member's name; template arguments follow it."""
        self.children([c for c in children if c.extent.end.offset <= cursor.location.offset], scope)

    def cast(self, cursor, children, scope):
        source = self.source(cursor)
        inner = scope.inside()
        operand = children[-1]
        while operand.kind in {K.UNEXPOSED_EXPR, K.INIT_LIST_EXPR, K.PAREN_EXPR}:
            inside = list(operand.get_children())
            if len(inside) != 1:
                break
            operand = inside[0]
        if type_of(cursor) in WIDE and type_of(operand) in WIDE | {"float", "double"}:
            self.narrow(cursor, source, scope)
        self.walk(children[-1], inner)

    def narrow(self, cursor, source, scope):
        narrow = f"static_cast<int>({source})"
        self.add("width", scope, self.span(cursor), [narrow],
                 [f"({ON} ? static_cast<{type_of(cursor)}>({narrow}) : ({source}))"])

    def converted(self, cursor, children, scope):
        """An implicit conversion: a literal in it must keep its type, because braces do not allow narrowing."""
        to = scope.cast or (type_of(cursor) if type_of(cursor) in ARITHMETIC_TYPES else "")
        alone = len(children) == 1 and self.span(children[0]) == self.span(cursor)
        if alone and children[0].kind == K.DECL_REF_EXPR:
            self.other_variable(children[0], scope)
        self.children(children, dataclasses.replace(scope, cast=to if alone else ""))

    def other_variable(self, cursor, scope):
        name = self.source(cursor)
        if not scope.is_place or type_of(cursor) not in INTEGERS:
            return
        others = [n for n, t in scope.names[::-1] if t == type_of(cursor) and n != name]
        if (name, type_of(cursor)) in scope.names and others:
            self.add("index swapped", scope, self.span(cursor), list(dict.fromkeys(others))[:2])

    def binary(self, cursor, children, scope):
        left, right = children
        operator, a, b = self.between(left, right), self.source(left), self.source(right)
        span = cursor.extent.start.offset, cursor.extent.end.offset
        countable = type_of(cursor) in ARITHMETIC_TYPES or "dependent" in type_of(cursor) or type_of(cursor).endswith("*")
        if operator in COMPARISONS:
            self.add("comparison turned", scope, span, [f"{a} {new} {b}" for new in COMPARISONS[operator]])
        elif operator in ("&&", "||"):
            changed = [f"{a} {'||' if operator == '&&' else '&&'} {b}", a, b]
            # One side alone may be a pointer or an optional, to which the original's bool must not be converted.
            self.add("and, or", scope, span, changed,
                     [f"({ON} ? static_cast<bool>({new}) : ({self.text[slice(*span)]}))" for new in changed])
        elif operator in ARITHMETIC and countable:
            changed = [f"{a} {new} {b}" for new in ARITHMETIC[operator]]
            if operator in NOT_COMMUTATIVE and not type_of(cursor).endswith("*"):
                changed.append(f"({b}) {operator} ({a})")
            self.add("sign", scope, span, changed)
        if operator == "*" and type_of(cursor) in WIDE:
            self.narrow(cursor, self.source(cursor), scope)
        self.children(children, scope.inside())

    def assignment(self, cursor, children, scope):
        left, right = children
        new = ASSIGNMENTS.get(self.between(left, right))
        if new and type_of(cursor) in ARITHMETIC_TYPES:
            self.add("sign", scope, self.span(cursor), [f"{self.source(left)} {new} {self.source(right)}"])
        self.children(children, scope.inside())

    def unary(self, cursor, children, scope):
        source = self.source(cursor)
        if source.startswith("!"):
            self.condition(cursor, scope)
        elif source.startswith("-") and not source.startswith("--"):
            self.add("sign", scope, self.span(cursor), [source[1:]])
        self.children(children, scope.inside())

    def call(self, cursor, children, scope):
        source = self.source(cursor)
        inner = scope.inside(is_place=True)
        if cursor.spelling == "check":  # a failing check never happens, so changes in its condition have no effect
            return
        if cursor.spelling.startswith("operator"):
            self.overloaded(cursor, children, scope)
        elif source.endswith(")"):
            least = MINIMUM.match(source)
            if least:
                other = "max" if least[1] == "min" else "min"
                self.add("minimum and maximum", scope, self.span(cursor),
                         [source[:least.start(1)] + other + source[least.end(1):]])
            else:
                arguments = [a for a in cursor.get_arguments() if a is not None]
                for a, b in zip(arguments, arguments[1:]):
                    self.swapped(cursor, a, b, scope)
        for child in children:
            self.walk(child, scope if child.kind == K.MEMBER_REF_EXPR else inner)

    def overloaded(self, cursor, children, scope):
        if len(children) != 3:
            return
        left, name, right = children
        operator = self.source(name)
        if operator in COMPARISONS and self.between(left, right) == operator:
            self.add("comparison turned", scope, self.span(cursor),
                     [f"{self.source(left)} {new} {self.source(right)}" for new in COMPARISONS[operator]])

    def swapped(self, call, a, b, scope):
        one, two = self.source(a), self.source(b)
        inside = call.extent.start.offset < a.extent.start.offset
        if not inside or self.between(a, b) != "," or one == two or one[:1] == "{" or two[:1] == "{" or len(one + two) > 200:
            return
        if type_of(a) != type_of(b) or "dependent" in type_of(a) or "type-parameter" in type_of(a):
            return
        middle = self.text[a.extent.end.offset:b.extent.start.offset]
        self.add("arguments swapped", scope, (a.extent.start.offset, b.extent.end.offset), [two + middle + one],
                 [f"({ON} ? ({two}) : ({one})){middle}({ON} ? ({one}) : ({two}))"])

    def index(self, cursor, children, scope):
        self.walk(children[0], scope.inside())
        self.children(children[1:], scope.inside(is_place=True))

    def number(self, cursor, children, scope):
        source = self.source(cursor)
        start, end = self.span(cursor)
        is_template_argument = self.text[start - 1] == "<" or self.text[end:end + 1] == ">"
        whole = re.fullmatch(r"(\d[\d']*|0[xX][\da-fA-F']+)([uUlLzZ]*)", source)
        if is_template_argument or not (whole or re.fullmatch(r"[\d.']+(?:[eE][-+]?\d+)?[fF]?", source)):
            return
        if whole and whole[1].isdigit() and (whole[1] == "0" or whole[1][0] != "0"):
            changed = [f"{int(whole[1]) + by}{whole[2]}" for by in (1, -1) if int(whole[1]) + by >= 0]
        else:
            changed = [f"({source} + 1)", f"({source} - 1)"]
        self.constant(scope, (start, end), source, changed)

    def truth(self, cursor, children, scope):
        source = self.source(cursor)
        if source in ("true", "false"):
            self.constant(scope, self.span(cursor), source, ["false" if source == "true" else "true"])

    def constant(self, scope, span, source, changed):
        cast = f"static_cast<{scope.cast}>" if scope.cast else ""
        self.add("constant", scope, span, changed, [f"{cast}({ON} ? {new} : {source})" for new in changed])

    VISITS = {
        K.COMPOUND_STMT: compound, K.DECL_STMT: declared, K.VAR_DECL: variable, K.LAMBDA_EXPR: anonymous_function,
        K.IF_STMT: branch, K.WHILE_STMT: branch, K.FOR_STMT: loop, K.CXX_FOR_RANGE_STMT: loop, K.DO_STMT: repeated,
        K.SWITCH_STMT: switch, K.CASE_STMT: case, K.DEFAULT_STMT: case, K.BREAK_STMT: jump, K.CONTINUE_STMT: jump,
        K.RETURN_STMT: returned, K.CONDITIONAL_OPERATOR: choice, K.UNEXPOSED_EXPR: converted, K.MEMBER_REF_EXPR: member,
        K.CXX_STATIC_CAST_EXPR: cast, K.CXX_FUNCTIONAL_CAST_EXPR: cast, K.CSTYLE_CAST_EXPR: cast,
        K.CXX_REINTERPRET_CAST_EXPR: cast, K.BINARY_OPERATOR: binary, K.COMPOUND_ASSIGNMENT_OPERATOR: assignment,
        K.UNARY_OPERATOR: unary, K.CALL_EXPR: call, K.ARRAY_SUBSCRIPT_EXPR: index, K.INTEGER_LITERAL: number,
        K.FLOATING_LITERAL: number, K.CXX_BOOL_LITERAL_EXPR: truth}


# Boost.Asio tests for coroutines with feature macros from before C++20.
MORE_FLAGS = ["-w", "-ferror-limit=0", "-DBOOST_ASIO_HAS_CO_AWAIT", "-DBOOST_ASIO_HAS_STD_COROUTINE"]


def sites_of(path, unit, flags, system):
    """The sites of the file `path`, parsed as part of `unit`, which includes it. `system` is the compiler's include
    folder, which libclang lacks.
    """
    with open(path, "rb") as file:
        text = file.read().decode("latin-1")  # one character per byte, as libclang counts
    parsed = cindex.Index.create().parse(unit, args=[*flags, *MORE_FLAGS, "-isystem", system])
    return Reader(path, text).read(parsed)
