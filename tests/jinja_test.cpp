// The template language against the output of Python's Jinja (tests/chat_template_test.py), and
// hostile templates.
#include <gtest/gtest.h>

#include <ctime>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "core/check.h"
#include "text/jinja/template.h"

namespace tandem::jinja {
namespace {

using Json = nlohmann::ordered_json;

std::string render(std::string_view source, const Json& context = Json::object()) {
  return Template(source).render(context).text;
}

std::string error_of(std::string_view source, const Json& context = Json::object()) {
  try {
    return "no error, but: " + render(source, context);
  } catch (const Error& error) {
    return error.what();
  }
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Jinja, RoundingHasLimits) {
  EXPECT_EQ(render("{{ 1.5|round(300) }} {{ 1.5|round(-300) }}"), "1.5 0.0");
  for (const char* precision : {"301", "-301"})
    EXPECT_TRUE(contains(error_of("{{ 1.5|round(" + std::string(precision) + ") }}"),
                         "round: the precision must be within 300, not " + std::string(precision)));
}

// The other case of these characters is in another Unicode block.
TEST(Jinja, CasesBeyondLatinOne) {
  EXPECT_EQ(render("{{ '\u00ff\u00b5'|upper }}"), "\u0178\u039c");
  EXPECT_EQ(render("{{ '\u0178'|lower }}"), "\u00ff");
  EXPECT_EQ(render("{{ '\u0178\u0178'|capitalize }}"), "\u0178\u00ff");
}

TEST(Jinja, GivesWhatPythonGives) {
  std::ifstream file(TANDEM_SOURCE_DIR "/tests/data/templates/expressions.json");
  ASSERT_TRUE(file) << "tests/data/templates/expressions.json is missing";
  const Json data = Json::parse(file);
  ASSERT_GT(data["cases"].size(), 600u);
  for (const Json& item : data["cases"]) {
    const auto source = item["template"].get<std::string>();
    std::optional<std::string> got;
    std::string error;
    try {
      got = render(source, data["context"]);
    } catch (const Error& e) {
      error = e.what();
    }
    if (item["output"].is_null()) {
      EXPECT_FALSE(got) << source << "\nmust fail as in Python, gives " << *got;
      EXPECT_TRUE(contains(error, "chat template line ")) << source << "\n" << error;
    } else {
      EXPECT_TRUE(got) << source << "\n" << error;
      EXPECT_EQ(got.value_or(""), item["output"].get<std::string>()) << source;
    }
  }
}

TEST(Jinja, ErrorsNameTheLine) {
  EXPECT_EQ(error_of("a\n\n{{ x.y }}"), "chat template line 3: 'y' of 'x', which is undefined");
  EXPECT_EQ(error_of("{{ 1 }}\n{% if %}"),
            "chat template line 2: expected an expression, found the end of the tag");
  EXPECT_EQ(error_of("\n{{ raise_exception('roles must alternate') }}"),
            "chat template line 2: roles must alternate");
  EXPECT_EQ(error_of("a\n\n{% for x in 1 %}\n{% endfor %}"),
            error_of("{% for x in 1 %}{% endfor %}").replace(19, 1, "3"));
  EXPECT_EQ(error_of("\n{% break %}"), "chat template line 2: break or continue outside of a loop");
  EXPECT_EQ(error_of("\n\n{% for x in y recursive %}{% endfor %}"),
            "chat template line 3: 'recursive' loops are not supported; use a macro");
  EXPECT_TRUE(contains(error_of("{% for x in y %}\n\n"), "expected {% endfor %}, found the end"));
  EXPECT_TRUE(contains(error_of("{{ 'x'|nothing }}"), "there is no filter 'nothing'"));
  EXPECT_TRUE(contains(error_of("{{ 1 is nothing }}"), "there is no test 'nothing'"));
  EXPECT_TRUE(contains(error_of("{% include 'x' %}"), "expected a tag such as"));
  EXPECT_TRUE(contains(error_of("{% macro m(a b) %}{% endmacro %}"), "expected"));
  EXPECT_TRUE(contains(error_of("{% macro m(a=1 b=2) %}{% endmacro %}"), "expected"));
}

TEST(Jinja, WhatOnlyThisInterpreterDoes) {
  EXPECT_EQ(render("{% set _ = xs.append(4) %}{{ xs }}", {{"xs", {1}}}), "[1, 4]");
  EXPECT_EQ(render("{{ strftime_now('%Y')|length }}"), "4");
  EXPECT_EQ(render("{{ range(3) }}"), "[0, 1, 2]");
}

TEST(Jinja, ReprEscapesWhatIsNotPrintable) {
  EXPECT_EQ(render("{{ [x] }}", {{"x", "a\u00ADé\u0378\u0600一\u2028\uE000\U0001FA77\U000E0001"}}),
            R"(['a\xadé\u0378\u0600一\u2028\ue000🩷\U000e0001'])");
}

TEST(Jinja, KeysKeepTheirOrder) {
  EXPECT_EQ(render("{{ d|tojson }}{{ d }}", {{"d", Json::parse(R"({"z":1,"a":{"y":2,"b":3}})")}}),
            R"({"z": 1, "a": {"y": 2, "b": 3}}{'z': 1, 'a': {'y': 2, 'b': 3}})");
}

// Every hostile template must end soon with an Error that names the limit.
TEST(Jinja, BoundsNesting) {
  const auto repeat = [](std::string_view text, int n) {
    std::string out;
    for (int i = 0; i < n; ++i) out += text;
    return out;
  };
  const int n = 50'000;
  for (const std::string& source :
       {"{{ " + repeat("(", n) + "1" + repeat(")", n) + " }}",
        "{{ " + repeat("[", n) + repeat("]", n) + " }}", "{{ " + repeat("-", n) + "1 }}",
        "{{ " + repeat("not ", n) + "1 }}", "{{ 1" + repeat("+1", n) + " }}",
        "{{ a" + repeat(".a", n) + " }}", "{{ a" + repeat("|trim", n) + " }}",
        "{{ a" + repeat("[0]", n) + " }}", "{{ 1" + repeat(" if 1 else 1", n) + " }}",
        "{{ 1" + repeat(" is odd", n) + " }}", "{{ 1" + repeat(" or 1", n) + " }}",
        repeat("{% if 1 %}", n), repeat("{% for a in b %}", n / 2),
        "{% set " + repeat("(", n) + "a" + repeat(")", n) + " = 1 %}"})
    EXPECT_TRUE(contains(error_of(source), "levels deep")) << source.substr(0, 20);
  EXPECT_TRUE(contains(error_of("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"), "levels deep"));
  EXPECT_TRUE(contains(error_of("{% set l = [] %}{% set _ = l.append(l) %}{{ l }}"), "deep"));
  EXPECT_TRUE(contains(error_of("{% set n = namespace() %}{% set n.n = n %}{{ n }}"), "deep"));
  Json deep = 1;
  for (int i = 0; i < 1000; ++i) deep = Json::array({std::move(deep)});
  EXPECT_TRUE(contains(error_of("{{ x }}", {{"x", std::move(deep)}}), "levels deep"));
}

// Each limit is reached, and one more is too many.
TEST(Jinja, LimitsAreExact) {
  const std::string longest(1 << 20, 'x');
  EXPECT_EQ(render(longest), longest);
  EXPECT_EQ(error_of(longest + "x"),
            "the chat template has 1048577 bytes; at most 1048576 are supported");
  EXPECT_EQ(render("{{ range(100000)|length }} {{ range(-5, 299995, 3)|length }}"),
            "100000 100000");
  for (const char* range : {"range(100001)", "range(-5, 299996, 3)", "range(100001, 0, -1)"})
    EXPECT_EQ(error_of("{{ " + std::string(range) + " }}"),
              "chat template line 1: a range has more than 100000 items");
  const auto nested = [](int n) {
    return "{{ " + std::string(n, '[') + std::string(n, ']') + " }}";
  };
  int deepest = 1;
  while (error_of(nested(deepest + 1)).starts_with("no error")) ++deepest;
  EXPECT_EQ(deepest, 66) << "a list is three levels";
  int most = 1;
  const auto sum = [](int n) {
    std::string of = "{{ 0";
    for (int i = 0; i < n; ++i) of += "+1";
    return of + " }}";
  };
  while (error_of(sum(most + 1)).starts_with("no error")) ++most;
  EXPECT_EQ(most, 198);
}

TEST(Jinja, BoundsTimeAndMemory) {
  constexpr std::string_view kHostile[] = {
      "{{ 'a' * 10**9 }}",
      "{{ [0] * 10**9 }}",
      "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
      "{% set n = namespace(s='ab') %}{% for i in range(99) %}{% set n.s = n.s * 2 %}{% endfor %}",
      "{% set n = namespace(l=[1]) %}{% for i in range(99) %}{% set n.l = [n.l, n.l] %}{% endfor %}"
      "{{ n.l }}",
      "{% set l = [1] %}{% for i in range(99999) %}{% for j in l %}{% set _ = l.append(j) %}"
      "{% endfor %}{% endfor %}",
      "{{ 'a'|indent(10**12) }}",
      "{{ [1]|tojson(indent=10**12) }}",
      "{% set s = 'a' * 10**7 %}{{ s.replace('', s) }}",
      "{% set s = 'a' * 10**5 %}{% for i in range(99999) %}{{ s.split('b')|length }}{% endfor %}",
      "{% set x = range(99999)|list %}{% for i in x %}{{ x == x }}{% endfor %}",
      "{% set x = range(99999)|list %}{{ x|unique }}",
      "{% set s = 'x' * 10**6 %}{% for i in range(9999) %}{{ s[1:] }}{% endfor %}",
      "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(40) }}",
  };
  for (const std::string_view source : kHostile) {
    const std::clock_t start = std::clock();  // CPU time, because the machine may be busy
    EXPECT_TRUE(contains(error_of(source), "more than ")) << source << "\n" << error_of(source);
    EXPECT_LT((std::clock() - start) / CLOCKS_PER_SEC, 30) << source;
  }
}

TEST(Jinja, RefusesTextThatIsNotUtf8) {
  EXPECT_EQ(error_of("ab\xFF"), "the chat template is not UTF-8 at byte 2");
  EXPECT_TRUE(contains(error_of("{{ x }}", {{"x", "a\xC3"}}), "a string is not UTF-8 at byte 1"));
  for (const char* text : {"{{ '\\ud800' }}", "{{ '\\udfff' }}", "{{ '\\U00110000' }}"})
    EXPECT_TRUE(contains(error_of(text), "an invalid escape")) << text;
}

}  // namespace
}  // namespace tandem::jinja
