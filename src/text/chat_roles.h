// Finds out how a chat template treats messages of each role, by rendering small conversations, and
// adapts messages to the form that the template reads. Part of ChatTemplate.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

#include "text/jinja/template.h"

namespace tandem {

class ChatRoles {
 public:
  // The template is used only inside the constructor. `source` is its text.
  ChatRoles(const jinja::Template& chat_template, std::string_view source);

  // Returns the messages in the form that the template reads:
  // * role "developer" becomes "system" if the template does not handle the former;
  // * a content that is a list of parts becomes one text, the parts joined by line breaks as in
  //   vLLM, unless the template iterates over lists; a content that is a text becomes a list of one
  //   part if the template reads lists only.
  // * arguments of a tool call that are an object become its JSON text if the template reads texts
  //   only, and the other way round.
  // Throws Error naming the first message whose role the template ignores. If no small conversation
  // shows that the template reads any role, messages are returned unchanged.
  nlohmann::ordered_json adapt(nlohmann::ordered_json messages) const;

 private:
  struct Forms {
    // Forms of "content", or of "arguments", that appear in the rendered prompt.
    bool texts = false, lists = false;
    bool any() const { return texts || lists; }
  };
  static Forms probe_forms(const jinja::Template& chat_template, const std::string& role);
  const Forms& forms_of(const std::string& role) const;
  void adapt_arguments(nlohmann::ordered_json& message) const;

  // By role: the roles of OpenAI's API, those that the template's source quotes, and "" for any
  // other role.
  std::map<std::string, Forms, std::less<>> forms_;
  Forms arguments_;  // of tool calls; lists: objects
  bool handles_developer_ = false;
  std::string shown_roles_;  // "system, user", for messages
};

}  // namespace tandem
