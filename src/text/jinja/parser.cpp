// Parses statements, {% .. %}, and the text between them.
#include <algorithm>

#include "text/jinja/expression_parser.h"
#include "text/jinja/lexer.h"
#include "text/jinja/syntax.h"

namespace tandem::jinja {
namespace {

class Parser {
 public:
  explicit Parser(const std::vector<Token>& tokens) : in_(tokens) {}

  Block run() {
    Block block = until({});
    if (in_.current().kind != TokenKind::kEnd) in_.fail_here("the end of the template");
    return block;
  }

 private:
  // Parses statements up to a tag that starts with one of `ends`; consumes the {% of that tag but
  // not its name.
  Block until(std::initializer_list<std::string_view> ends);
  Stmt statement();
  Stmt if_statement();
  Stmt for_statement();
  Stmt set_statement();
  Stmt macro_statement();
  Stmt scope_statement();
  Stmt loop_control(StmtKind kind);

  Stmt make(StmtKind kind) const {
    Stmt made;
    made.kind = kind;
    made.line = in_.current().line;
    return made;
  }
  void end_of_tag() { in_.expect(TokenKind::kBlockEnd, "%}"); }
  Block body(std::string_view end) {
    end_of_tag();
    Block block = until({end});
    in_.advance();
    return block;
  }

  ExpressionParser in_;
  int n_loops_ = 0;
};

Block Parser::until(std::initializer_list<std::string_view> ends) {
  const ExpressionParser::Nested nested(in_);
  Block block;
  while (true) {
    switch (in_.current().kind) {
      case TokenKind::kText: {
        Stmt text = make(StmtKind::kText);
        text.text = in_.current().text;
        in_.advance();
        block.push_back(std::move(text));
        break;
      }
      case TokenKind::kPrintBegin: {
        in_.advance();
        Stmt print = make(StmtKind::kPrint);
        print.value = in_.tuple_or_expression();
        in_.expect(TokenKind::kPrintEnd, "}}");
        block.push_back(std::move(print));
        break;
      }
      case TokenKind::kBlockBegin:
        in_.advance();
        if (std::any_of(ends.begin(), ends.end(),
                        [&](std::string_view end) { return in_.current().is_name(end); }))
          return block;
        block.push_back(statement());
        end_of_tag();
        break;
      default:
        if (ends.size() == 0) return block;
        in_.fail_here(fmt::format("{{% {} %}}", *(ends.end() - 1)));
    }
  }
}

Stmt Parser::statement() {
  if (in_.skip_name("if")) return if_statement();
  if (in_.skip_name("for")) return for_statement();
  if (in_.skip_name("set")) return set_statement();
  if (in_.skip_name("macro")) return macro_statement();
  if (in_.skip_name("generation")) return scope_statement();
  if (in_.skip_name("break")) return loop_control(StmtKind::kBreak);
  if (in_.skip_name("continue")) return loop_control(StmtKind::kContinue);
  in_.fail_here("a tag such as if, for, set or macro");
}

Stmt Parser::if_statement() {
  Stmt made = make(StmtKind::kIf);
  bool has_else = false;
  do {
    made.conditions.push_back(in_.tuple_or_expression(false));
    end_of_tag();
    made.blocks.push_back(until({"elif", "else", "endif"}));
  } while (in_.skip_name("elif"));
  if (in_.skip_name("else")) has_else = true;
  if (has_else) {
    made.blocks.push_back(body("endif"));
  } else if (!in_.skip_name("endif")) {
    in_.fail_here("{% endif %}");
  }
  return made;
}

Stmt Parser::for_statement() {
  Stmt made = make(StmtKind::kFor);
  made.target = in_.target();
  if (!in_.skip_name("in")) in_.fail_here("'in'");
  made.value = in_.tuple_or_expression(false);
  if (in_.skip_name("if")) made.filter = in_.expression();
  if (in_.current().is_name("recursive"))
    fail_at(made.line, "'recursive' loops are not supported; use a macro");
  end_of_tag();
  ++n_loops_;
  made.blocks.push_back(until({"else", "endfor"}));
  --n_loops_;
  if (in_.skip_name("else"))
    made.blocks.push_back(body("endfor"));
  else
    in_.advance();
  return made;
}

Stmt Parser::set_statement() {
  Stmt made = make(StmtKind::kSet);
  made.target = in_.set_target();
  if (in_.skip_sign("=")) {
    made.value = in_.tuple_or_expression();
    return made;
  }
  made.kind = StmtKind::kSetBlock;
  if (in_.skip_sign("|")) made.value = in_.filters_of_block();
  made.blocks.push_back(body("endset"));
  return made;
}

Stmt Parser::macro_statement() {
  Stmt made = make(StmtKind::kMacro);
  made.text = in_.take_name();
  in_.expect_sign("(");
  while (!in_.current().is_sign(")")) {
    made.parameters.push_back(in_.take_name());
    if (in_.skip_sign("="))
      made.defaults.push_back(in_.expression());
    else if (!made.defaults.empty())
      in_.fail_here("a default value");
    if (!in_.skip_sign(",")) break;
  }
  in_.expect_sign(")");
  const int n_loops = std::exchange(n_loops_, 0);
  made.blocks.push_back(body("endmacro"));
  n_loops_ = n_loops;
  return made;
}

Stmt Parser::scope_statement() {
  Stmt made = make(StmtKind::kScope);
  made.blocks.push_back(body("endgeneration"));
  return made;
}

Stmt Parser::loop_control(StmtKind kind) {
  Stmt made = make(kind);
  if (n_loops_ == 0) fail_at(made.line, "break or continue outside of a loop");
  return made;
}

}  // namespace

Block parse(std::string_view source) {
  const std::vector<Token> tokens = tokenize(source);
  return Parser(tokens).run();
}

}  // namespace tandem::jinja
