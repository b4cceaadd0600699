// The syntax tree of a template: expressions and statements.
#pragma once
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "text/jinja/operations.h"
#include "text/jinja/value.h"

namespace tandem::jinja {

enum class ExprKind {
  kConstant,
  kString,
  kName,
  kList,
  kTuple,
  kDict,       // parts: key, value, key, value, ..
  kAttribute,  // parts[0].text
  kSubscript,  // parts[0][parts[1]]
  kSlice,      // parts[0][parts[1]:parts[2]:parts[3]], each of the last three may be null
  kCall,       // parts[0](parts[1], ..)
  kFilter,     // parts[0]|text(parts[1], ..); parts[0] is null for the text of a set block
  kTest,       // parts[0] is text(parts[1], ..)
  kNot,
  kNegative,
  kPositive,
  kArithmetic,  // parts[0] op parts[1]
  kConcat,      // parts[0] ~ parts[1] ~ ..
  kCompare,     // parts[0] comparisons[0] parts[1] comparisons[1] ..
  kAnd,
  kOr,
  kConditional,  // parts[0] if parts[1] else parts[2], which may be null
};

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Expr {
  ExprKind kind;
  int line;
  int height = 1;  // of this subtree
  String text;
  Value constant;
  Operator op = Operator::kAdd;
  std::vector<ExprPtr> parts;
  std::vector<std::string> names;  // names of the last parts, which are named arguments
  std::vector<Comparison> comparisons;
};

enum class StmtKind {
  kText,
  kPrint,
  kIf,
  kFor,
  kSet,
  kSetBlock,
  kMacro,
  kScope,  // {% generation %}
  kBreak,
  kContinue,
};

struct Stmt;
using Block = std::vector<Stmt>;

struct Stmt {
  StmtKind kind;
  int line;
  std::string text;  // kText; name of a kMacro
  ExprPtr target;    // kSet, kSetBlock, kFor: names, a tuple of them, or name.attribute
  ExprPtr value;     // kPrint, kSet; what kFor iterates over; filters of kSetBlock or null
  ExprPtr filter;    // kFor .. if
  std::vector<ExprPtr> conditions;      // kIf
  std::vector<Block> blocks;            // kIf: one per condition and an optional else; kFor: body,
                                        // optional else
  std::vector<std::string> parameters;  // kMacro
  std::vector<ExprPtr> defaults;        // kMacro: values of the last parameters
};

// Throws Error naming the line.
Block parse(std::string_view source);

}  // namespace tandem::jinja
