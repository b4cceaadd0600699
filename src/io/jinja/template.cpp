#include "io/jinja/template.h"

#include "io/jinja/renderer.h"
#include "io/jinja/syntax.h"

namespace tandem::jinja {

struct Template::Parsed {
  Block block;
};

Template::Template(std::string_view source) : parsed_(new Parsed{parse(source)}) {}
Template::Template(Template&&) noexcept = default;
Template& Template::operator=(Template&&) noexcept = default;
Template::~Template() = default;

std::string Template::render(const nlohmann::ordered_json& context, const Limits& limits) const {
  require(context.is_object(), "the context of a chat template must be a JSON object");
  Heap heap(limits);
  return Renderer(heap).run(parsed_->block, *value_from_json(heap, context).entries);
}

}  // namespace tandem::jinja
