// Parses statements, {% .. %}, and the text between them.
#include <algorithm>

#include "text/jinja/expression_parser.h"
#include "text/jinja/lexer.h"
#include "text/jinja/syntax.h"

namespace tandem::jinja {
namespace {

class Parser {
 public:
  explicit Parser(const std::vector<Token>& tokens) : expressions_(tokens) {}

  Block run() {
    Block block = parse_until({});
    if (expressions_.current().kind != TokenKind::kEnd)
      expressions_.fail_expected("the end of the template");
    return block;
  }

 private:
  // Parses statements up to a tag that starts with one of `ends`; consumes the {% of that tag but
  // not its name.
  Block parse_until(std::initializer_list<std::string_view> ends);
  Stmt statement();
  Stmt if_statement();
  Stmt for_statement();
  Stmt set_statement();
  Stmt macro_statement();
  Stmt scope_statement();
  Stmt loop_control(StmtKind kind);

  Stmt make(StmtKind kind) const {
    Stmt stmt;
    stmt.kind = kind;
    stmt.line = expressions_.current().line;
    return stmt;
  }
  void end_of_tag() { expressions_.expect(TokenKind::kBlockEnd, "%}"); }
  Block body(std::string_view end) {
    end_of_tag();
    Block block = parse_until({end});
    expressions_.advance();
    return block;
  }

  ExpressionParser expressions_;
  int n_loops_ = 0;
};

Block Parser::parse_until(std::initializer_list<std::string_view> ends) {
  const ExpressionParser::NestingGuard nested(expressions_);
  Block block;
  while (true) {
    switch (expressions_.current().kind) {
      case TokenKind::kText: {
        Stmt text = make(StmtKind::kText);
        text.text = expressions_.current().text;
        expressions_.advance();
        block.push_back(std::move(text));
        break;
      }
      case TokenKind::kPrintBegin: {
        expressions_.advance();
        Stmt print = make(StmtKind::kPrint);
        print.value = expressions_.tuple_or_expression();
        expressions_.expect(TokenKind::kPrintEnd, "}}");
        block.push_back(std::move(print));
        break;
      }
      case TokenKind::kBlockBegin:
        expressions_.advance();
        if (std::any_of(ends.begin(), ends.end(),
                        [&](std::string_view end) { return expressions_.current().is_name(end); }))
          return block;
        block.push_back(statement());
        end_of_tag();
        break;
      default:
        if (ends.size() == 0) return block;
        expressions_.fail_expected(fmt::format("{{% {} %}}", *(ends.end() - 1)));
    }
  }
}

Stmt Parser::statement() {
  if (expressions_.skip_name("if")) return if_statement();
  if (expressions_.skip_name("for")) return for_statement();
  if (expressions_.skip_name("set")) return set_statement();
  if (expressions_.skip_name("macro")) return macro_statement();
  if (expressions_.skip_name("generation")) return scope_statement();
  if (expressions_.skip_name("break")) return loop_control(StmtKind::kBreak);
  if (expressions_.skip_name("continue")) return loop_control(StmtKind::kContinue);
  expressions_.fail_expected("a tag such as if, for, set or macro");
}

Stmt Parser::if_statement() {
  Stmt stmt = make(StmtKind::kIf);
  bool has_else = false;
  do {
    stmt.conditions.push_back(expressions_.tuple_or_expression(false));
    end_of_tag();
    stmt.blocks.push_back(parse_until({"elif", "else", "endif"}));
  } while (expressions_.skip_name("elif"));
  if (expressions_.skip_name("else")) has_else = true;
  if (has_else) {
    stmt.blocks.push_back(body("endif"));
  } else if (!expressions_.skip_name("endif")) {
    expressions_.fail_expected("{% endif %}");
  }
  return stmt;
}

Stmt Parser::for_statement() {
  Stmt stmt = make(StmtKind::kFor);
  stmt.target = expressions_.target();
  if (!expressions_.skip_name("in")) expressions_.fail_expected("'in'");
  stmt.value = expressions_.tuple_or_expression(false);
  if (expressions_.skip_name("if")) stmt.filter = expressions_.expression();
  if (expressions_.current().is_name("recursive"))
    fail_at(stmt.line, "'recursive' loops are not supported; use a macro");
  end_of_tag();
  ++n_loops_;
  stmt.blocks.push_back(parse_until({"else", "endfor"}));
  --n_loops_;
  if (expressions_.skip_name("else"))
    stmt.blocks.push_back(body("endfor"));
  else
    expressions_.advance();
  return stmt;
}

Stmt Parser::set_statement() {
  Stmt stmt = make(StmtKind::kSet);
  stmt.target = expressions_.set_target();
  if (expressions_.skip_symbol("=")) {
    stmt.value = expressions_.tuple_or_expression();
    return stmt;
  }
  stmt.kind = StmtKind::kSetBlock;
  if (expressions_.skip_symbol("|")) stmt.value = expressions_.filters_of_block();
  stmt.blocks.push_back(body("endset"));
  return stmt;
}

Stmt Parser::macro_statement() {
  Stmt stmt = make(StmtKind::kMacro);
  stmt.text = expressions_.take_name();
  expressions_.expect_symbol("(");
  while (!expressions_.current().is_symbol(")")) {
    stmt.parameters.push_back(expressions_.take_name());
    if (expressions_.skip_symbol("="))
      stmt.defaults.push_back(expressions_.expression());
    else if (!stmt.defaults.empty())
      expressions_.fail_expected("a default value");
    if (!expressions_.skip_symbol(",")) break;
  }
  expressions_.expect_symbol(")");
  const int n_loops = std::exchange(n_loops_, 0);
  stmt.blocks.push_back(body("endmacro"));
  n_loops_ = n_loops;
  return stmt;
}

Stmt Parser::scope_statement() {
  Stmt stmt = make(StmtKind::kScope);
  stmt.blocks.push_back(body("endgeneration"));
  return stmt;
}

Stmt Parser::loop_control(StmtKind kind) {
  Stmt stmt = make(kind);
  if (n_loops_ == 0) fail_at(stmt.line, "break or continue outside of a loop");
  return stmt;
}

}  // namespace

Block parse(std::string_view source) {
  const std::vector<Token> tokens = tokenize(source);
  return Parser(tokens).run();
}

}  // namespace tandem::jinja
