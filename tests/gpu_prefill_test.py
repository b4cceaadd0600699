"""Prefill and decode servers with the emulated GPU as processes: keys of BF16 and FP8 caches, and those of a GPU for a
decode server on the CPU.

    python3 tests/gpu_prefill_test.py PATH_OF_TANDEM_WITH_THE_EMULATED_GPU
"""
import unittest

from free_address import free_address
from prefill_test import decode_server, fetched, prefill_server, says, wait_for

SIZES = ("--ctx", "512", "--max-batch", "1", "--chunk", "64", "--draft", "off")  # a GPU emulated by one thread is slow
BF16, FP8 = ("--device", "cuda", *SIZES), ("--device", "cuda", "--kv", "fp8", *SIZES)
CPU = ("--device", "cpu", *SIZES)


def prompt(number):
    return "Tell me. " + " ".join(f"What is {number * 50 + i} + {1000 - i}?" for i in range(8)) + " What is 478 + 356?"


def answer(server, number):
    """The tokens, and the logarithms of their probabilities to the last bit."""
    body = server.ok("/v1/chat/completions", {"messages": [{"role": "user", "content": prompt(number)}], "temperature": 0,
                                              "max_tokens": 8, "logprobs": True})
    return [(token["token"], token["logprob"]) for token in body["choices"][0]["logprobs"]["content"]]


class GpuPrefill(unittest.TestCase):
    """Each prefill server also answers alone, once it has forgotten the prompt."""

    def test_keys_of_gpus(self):
        of_bf16, of_fp8 = free_address(), free_address()
        prefill = {"bf16": prefill_server(of_bf16, *BF16), "fp8": prefill_server(of_fp8, *FP8)}
        for server in prefill.values():
            server.wait_ready()
        answers = {}
        for address, kind, arguments in ((of_bf16, "bf16", BF16), (of_fp8, "fp8", FP8)):
            decode = decode_server([address], *arguments)
            wait_for(lambda d=decode, a=address: says(d, f"prefill server {a} is up"), "it is up")
            self.assertFalse(says(decode, "answers may differ"), decode.lines)
            answers[kind] = answer(decode, 0)
            self.assertGreater(fetched(decode), 64)
            self.assertEqual(decode.stop(), 0)
        on_cpu = decode_server([of_bf16, of_fp8], *CPU)
        wait_for(lambda: sum("prefill server" in line for line in on_cpu.lines) == 2, "both have answered")
        got = answer(on_cpu, 1)
        self.assertGreater(fetched(on_cpu), 64)
        self.assertTrue(says(on_cpu, f"{of_bf16} is up: it computes by emulated GPU of compute capability"), on_cpu.lines)
        self.assertTrue(says(on_cpu, "and this server by kernels "), on_cpu.lines)
        self.assertTrue(says(on_cpu, f"prefill server {of_fp8} is down: its KV cache has pages of 64 tokens and"), on_cpu.lines)
        self.assertTrue(says(on_cpu, " in fp8, and this server's of 64 and"), on_cpu.lines)
        self.assertTrue(says(on_cpu, " in bf16: give both the same --kv"), on_cpu.lines)
        for kind, server in prefill.items():
            server.request("POST", "/flush_cache", "{}")
            self.assertEqual(answer(server, 0), answers[kind], f"{kind}: bits of one server")
            self.assertEqual(server.stop(), 0)
        self.assertNotEqual(answers["bf16"], answers["fp8"], "FP8 keys are other ones")
        on_cpu.request("POST", "/flush_cache", "{}")
        alone = answer(on_cpu, 1)
        self.assertEqual([token for token, _ in got], [token for token, _ in alone])
        self.assertNotEqual(got, alone, "keys of a GPU differ in their last bits")
        self.assertEqual(on_cpu.stop(), 0)


if __name__ == "__main__":
    unittest.main(argv=["gpu_prefill_test"], verbosity=1)
