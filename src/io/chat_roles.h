// What a chat template does with the messages of each role, found by rendering small
// conversations, and messages in the form that it reads. Part of ChatTemplate.
#pragma once
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "io/jinja/template.h"

namespace tandem {

class ChatRoles {
 public:
  // The template outlives the constructor only. `source` is its text.
  ChatRoles(const jinja::Template& chat_template, std::string_view source);

  // Each message as the template reads it:
  // * "developer" is "system" where the template does not name the former;
  // * a content of parts is one text, the parts joined by new lines as vLLM does, where the
  // template
  //   wants a text; it stays a list where the template goes through it; a text becomes a list of
  //   one part where the template reads nothing else.
  // Throws Error naming the first message whose role the template ignores. A template that shows
  // no role in any small conversation is not understood: no role is refused.
  nlohmann::ordered_json adapted(nlohmann::ordered_json messages) const;

 private:
  struct Reading {
    bool texts = false, lists = false;  // the forms of a content that arrive in the prompt
    bool any() const { return texts || lists; }
  };
  static Reading reading_of(const jinja::Template& chat_template, const std::string& role);
  const Reading& reading(const std::string& role) const;

  // By role, for those that OpenAI knows and those that the template names; "" is any other role.
  std::map<std::string, Reading, std::less<>> readings_;
  bool names_developer_ = false;
  std::string shown_roles_;  // "system, user", for messages
};

}  // namespace tandem
