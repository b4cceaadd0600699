/* Answers questions with a model, text as it is generated.
 *
 *     cc examples/generate.c $(pkg-config --cflags --libs tandem) -o generate
 *     ./generate ./DeepSeek-R1 "Why is the sky blue?"
 *     ./generate "" "What is 478 + 356?" "What is 12 * 7?"      with the small model of the library */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tandem.h>

static int print_text(void* user, const tandem_token* token) {
  size_t n_questions = *(const size_t*)user;
  if (n_questions == 1)
    fwrite(token->text, 1, token->text_bytes, stdout);
  else if (token->text_bytes > 0) /* answers arrive side by side */
    printf("%zu: %s\n", token->index, token->text);
  fflush(stdout);
  return 0;
}

/* {"role": "user", "content": question} in a JSON array. The caller frees it. */
static char* messages_with(const char* question) {
  char* json = malloc(6 * strlen(question) + 64);
  char* end = json + sprintf(json, "[{\"role\": \"user\", \"content\": \"");
  for (const char* c = question; *c; ++c) {
    if (*c == '"' || *c == '\\' || (unsigned char)*c < ' ')
      end += sprintf(end, "\\u%04x", *c);
    else
      *end++ = *c;
  }
  strcpy(end, "\"}]");
  return json;
}

int main(int argc, char** argv) {
  if (argc < 3) {
    fprintf(stderr, "usage: generate MODEL QUESTION..\n");
    return 2;
  }
  tandem_model* model;
  tandem_status status = tandem_open(argv[1][0] ? argv[1] : NULL, NULL, &model);
  if (status != TANDEM_OK) {
    fprintf(stderr, "error: %s\n", tandem_error());
    return (int)status;
  }
  size_t n = (size_t)argc - 2;
  tandem_request* requests = calloc(n, sizeof *requests);
  for (size_t i = 0; i < n; ++i) {
    requests[i].size = sizeof(tandem_request);
    requests[i].messages = messages_with(argv[2 + i]);
  }
  tandem_hooks hooks = {.on_token = print_text, .user = &n};
  status = tandem_generate(model, requests, n, &hooks);
  if (status != TANDEM_OK) fprintf(stderr, "error: %s\n", tandem_error());
  printf("\n(%lld tokens in the first prompt)\n",
         (long long)tandem_count_tokens(model, &requests[0], NULL, 0));
  for (size_t i = 0; i < n; ++i) free((char*)requests[i].messages);
  free(requests);
  tandem_close(model);
  return (int)status;
}
