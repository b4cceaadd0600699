/* tandem as a library: open a model, generate, count tokens, close. Plain C; link with -ltandem.
 *
 * A model computes on threads of its own. Calls of several threads are computed together, and what
 * an answer says does not depend on what else is computed.
 *
 * After a failure, tandem_error() has one line that names the values and says what to do. It uses
 * the names of the command line's options (--ctx is `context`). Text is UTF-8. docs/library.md has
 * examples. */
#ifndef TANDEM_H
#define TANDEM_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TANDEM_API __attribute__((visibility("default")))

typedef struct tandem_model tandem_model;

typedef enum tandem_status {
  TANDEM_OK = 0,
  TANDEM_FAILED = 1, /* at run time: out of memory, a lost GPU, a damaged model */
  TANDEM_INVALID = 2 /* what the caller can correct: a missing file, a parameter out of range */
} tandem_status;

/* A zero or NULL member is the default. `size` is sizeof(tandem_options). */
typedef struct tandem_options {
  size_t size;
  const char* device;  /* "cpu" (default), "cuda", or "auto": the GPU if it takes the model */
  int threads;         /* one is pinned to each core; default: all cores */
  int64_t context;     /* tokens of a prompt with its answer; default: the model's, at most 8192 */
  int max_running;     /* answers computed at a time; default: 256 */
  int step_tokens;     /* tokens per step, of prompts and answers; default: 512 */
  int64_t kv_tokens;   /* tokens of KV cache for all answers; default: as kv_fraction allows */
  double kv_fraction;  /* of the memory left after loading, for the KV cache; default: 0.8 */
  const char* experts; /* "fp8", "bf16", "int8", "int4"; default: as stored */
  const char* placement; /* a file that `tandem plan --out` wrote, for --device cuda */
  const char* cache;     /* folder of the packed cache */
  int no_prefix_cache;   /* 1: the KV cache of a prompt is freed when its answer has ended */
  int draft_tokens;      /* most drafts of an answer per step, at most 8; default: 4 */
  int no_async_output;   /* 1: tokens become text between steps, not while the next is computed */
  /* Called on a thread of the model while tandem_open() waits. NULL: not called. */
  void (*on_progress)(void* user, int64_t done_bytes, int64_t total_bytes);
  void (*on_warning)(void* user, const char* line);
  void* user;
  /* "off", "auto", "mtp" or "lookup"; default: "auto", as many drafts as are measured to pay */
  const char* draft;
} tandem_options;

/* Loads the checkpoint in `directory`, or the small model that is installed with the library if it
 * is NULL. `options` may be NULL. On success *model is the model, otherwise NULL. */
TANDEM_API tandem_status tandem_open(const char* directory, const tandem_options* options,
                                     tandem_model** model);

/* Frees the model. No other call may be using it. NULL is ignored. */
TANDEM_API void tandem_close(tandem_model* model);

typedef struct tandem_bias {
  int32_t token;
  float bias; /* added to the token's logit */
} tandem_bias;

/* A prompt and how it is answered. `size` is sizeof(tandem_request), and exactly one of text,
 * messages and tokens is given. A zero or NULL member otherwise is the default: the likeliest
 * tokens up to the model's end mark or to the end of the context. */
typedef struct tandem_request {
  size_t size;
  const char* text; /* a prompt as it is, with the token that begins texts if the model has one */
  const char*
      messages; /* a JSON array of {"role": "user", "content": "..."}: the chat template's prompt */
  const int32_t* tokens; /* token ids as they are */
  size_t n_tokens;

  int max_tokens;           /* of the answer; default: until the context is full */
  int min_tokens;           /* before them, the answer does not end by itself */
  float temperature;        /* 0: the likeliest token */
  float top_p;              /* 0 and 1: all tokens */
  int top_k;                /* 0: all tokens */
  float min_p;              /* relative to the likeliest token */
  float repetition_penalty; /* 0 and 1: none */
  float presence_penalty, frequency_penalty;
  uint64_t seed;
  const tandem_bias* biases;
  size_t n_biases;
  const char* const* stops; /* strings that end the answer, without being part of it */
  size_t n_stops;
  const int32_t* stop_tokens; /* in addition to the model's */
  size_t n_stop_tokens;
  int ignore_eos;    /* 1: the model's end marks do not end the answer */
  int keep_special;  /* 1: text of special tokens, such as the end mark's, is part of the text */
  int include_stop;  /* 1: the stop string is part of the text */
  int want_logprobs; /* 1: of each token, and of the n_top_logprobs likeliest */
  int n_top_logprobs;
} tandem_request;

typedef enum tandem_finish {
  TANDEM_RUNNING = 0,
  TANDEM_STOP = 1,     /* an end mark, a stop string or a stop token */
  TANDEM_LENGTH = 2,   /* max_tokens, or the end of the context */
  TANDEM_CANCELLED = 3 /* tandem_close() or `cancelled` */
} tandem_finish;

typedef struct tandem_logprob {
  int32_t token;
  float logprob; /* natural, before temperature and penalties */
} tandem_logprob;

/* A token of an answer, its end, or both. Valid during the call. */
typedef struct tandem_token {
  size_t index;     /* of the request */
  const char* text; /* text that became final with this token, often "": complete characters only */
  size_t text_bytes; /* without the NUL at its end */
  int32_t token;     /* -1: none, only the end */
  float logprob;     /* if wanted */
  const tandem_logprob* top;
  size_t n_top;
  int64_t prompt_tokens, cached_tokens; /* of the prompt; found in the prefix cache */
  tandem_finish finish;                 /* not TANDEM_RUNNING in the last call for this request */
} tandem_token;

/* Called on the thread that called tandem_generate(). */
typedef struct tandem_hooks {
  /* For every token of every request. Anything but 0 ends this answer: it is not called again. */
  int (*on_token)(void* user, const tandem_token* token);
  /* About ten times a second, or NULL. Anything but 0 cancels all answers of the call. */
  int (*cancelled)(void* user);
  void* user;
} tandem_hooks;

/* Answers `n_requests` requests together; returns when all have ended. No hook is called if one of
 * them is invalid. If one fails, the others are cancelled. The requests have one `size`. */
TANDEM_API tandem_status tandem_generate(tandem_model* model, const tandem_request* requests,
                                         size_t n_requests, const tandem_hooks* hooks);

/* The number of tokens of the request's prompt; -1 on failure. The first `capacity` ids are written
 * to `ids`, which may be NULL if capacity is 0. */
TANDEM_API int64_t tandem_count_tokens(tandem_model* model, const tandem_request* request,
                                       int32_t* ids, size_t capacity);

/* One JSON object about an open model: model, context, vocabulary, device, isa, threads,
 * load_seconds. It lives as long as the model. */
TANDEM_API const char* tandem_describe(const tandem_model* model);

/* Why the last call of this thread that failed did; "" if none has. Valid until its next call. */
TANDEM_API const char* tandem_error(void);

TANDEM_API const char* tandem_version(void); /* "0.1.0" */

#ifdef __cplusplus
}
#endif

#endif
