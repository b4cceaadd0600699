#include "text/jinja/template.h"

#include "text/jinja/renderer.h"
#include "text/jinja/syntax.h"

namespace tandem::jinja {

struct Template::Parsed {
  Block block;
};

Template::Template(std::string_view source) : parsed_(new Parsed{parse(source)}) {}
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::~Template() = default;

Template::Text Template::render(const nlohmann::ordered_json& context,
                                const nlohmann::ordered_json& constants,
                                const Limits& limits) const {
  require(context.is_object() && constants.is_object(),
          "the context of a chat template must be a JSON object");
  Heap heap(limits);
  Entries variables = *value_from_json(heap, constants, false).entries;
  const Entries& given = *value_from_json(heap, context, true).entries;
  variables.insert(variables.end(), given.begin(), given.end());
  TextBuilder out = Renderer(heap).run(parsed_->block, variables);
  std::vector<ByteRange> ranges = out.take_given();
  return {out.take_text(), std::move(ranges)};
}

}  // namespace tandem::jinja
