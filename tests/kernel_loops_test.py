"""tools/kernel_loops.py on a few lines of SASS; where nvcc and cuobjdump are installed, on a kernel of the repository too.

    python3 tests/kernel_loops_test.py
"""
import importlib
import pathlib
import shutil
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
kernel_loops = importlib.import_module("kernel_loops")
sass = importlib.import_module("sass")

# 0x10: a loop without tensor cores. 0x30 to 0x150: the inner loop, in which 0x60 to 0x90 is a loop that copies, 0xb0 to
# 0xd0 rescales sums if they need it, and 0x120 leaves it by a call.
SASS = """
	code for sm_89
		Function : _Z5first
	.headerflags	@"EF_CUDA_SM89 EF_CUDA_VIRTUAL_SM(EF_CUDA_SM89)"
        /*0000*/                   MOV R1, c[0x0][0x28] ;               /* 0x00000a0000017a02 */
                                                                        /* 0x000fe40000000f00 */
        /*0010*/                   LDG.E.128.CONSTANT R4, [R2.64] ;     /* 0x00000a0000017a02 */
        /*0020*/              @!P0 BRA 0x10 ;                           /* 0x00000a0000017a02 */
        /*0030*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0040*/                   LDSM.16.M88.4 R8, [R20] ;
        /*0050*/               @P0 BRA 0xa0 ;
        /*0060*/               @P1 BRA 0x80 ;
        /*0070*/                   LDGSTS.E.BYPASS.128 [R3], [R4.64], P2 ;
        /*0080*/                   IADD3 R3, R3, 0x1, RZ ;
        /*0090*/              @!P0 BRA P4, 0x60 ;
        /*00a0*/               @P3 BRA 0xe0 ;
        /*00b0*/                   FMUL R4, R4, R9 ;
        /*00c0*/                   FMUL R5, R5, R9 ;
        /*00d0*/                   BRA 0xe0 ;
        /*00e0*/                   PRMT R6, R7, 0x1404, RZ ;
        /*00f0*/                   HFMA2.BF16_V2 R6, R6, R7, -RZ ;
        /*0100*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0110*/                   HMMA.16816.F32.BF16 R4, R8, R6, R4 ;
        /*0120*/               @P5 CALL.REL.NOINC 0x160 ;
        /*0130*/                   MUFU.EX2 R7, R7 ;
        /*0140*/                   UIADD3 UR4, UR4, 0x1, URZ ;
        /*0150*/                   BRA 0x30 ;
        /*0160*/                   EXIT ;
        /*0170*/                   BRA 0x170;
		Function : _Z6second
        /*0000*/               @P0 LDG.E.64 R4, [R2.64] ;
        /*0010*/                   EXIT ;
"""


class Parser(unittest.TestCase):
    def setUp(self):
        self.functions = sass.functions(SASS)
        self.first = self.functions["_Z5first"]

    def loop(self, first, last):
        return sass.Loop(first // 16, last // 16)

    def test_instructions(self):
        self.assertEqual(list(self.functions), ["_Z5first", "_Z6second"])
        self.assertEqual([one.address for one in self.first], list(range(0, 0x180, 16)))
        self.assertEqual(self.first[2], (0x20, "!P0", "BRA", "0x10"))
        self.assertEqual(self.functions["_Z6second"][0], (0, "P0", "LDG.E.64", "R4, [R2.64]"))

    def test_bytes_of_a_warp(self):
        for name, n in {"LDG.E": 128, "LDG.E.U16": 64, "LDS.U8": 32, "LDG.E.64": 256, "STS.128": 512, "LDSM.16.MT88.2": 256,
                        "LDG.E.NA.LTC128B.128.CONSTANT": 512, "LDGSTS.E.BYPASS.LTC128B.128": 512, "SHFL.BFLY": 128}.items():
            self.assertEqual(sass.vector_bytes(sass.Instruction(0, "", name, "")), n, name)

    def test_loops_are_branches_back(self):
        self.assertEqual(set(sass.loops(self.first)), {self.loop(0x10, 0x20), self.loop(0x30, 0x150), self.loop(0x60, 0x90)})

    def test_the_inner_loop_has_the_tensor_core_instructions(self):
        self.assertEqual(sass.inner_loop(self.first), self.loop(0x30, 0x150))

    def test_a_pass_copies_and_does_not_rescale(self):
        path = [16 * i for i in sass.usual_pass(self.first, self.loop(0x30, 0x150), False)]
        self.assertEqual(path, [*range(0x30, 0xb0, 16), *range(0xe0, 0x160, 16)])

    def test_a_pass_with_sums_takes_their_branch(self):
        path = [16 * i for i in sass.usual_pass(self.first, self.loop(0x30, 0x150), True)]
        self.assertEqual(path, [*range(0x30, 0x160, 16)])

    # Widening between 0xe0 and 0xf0 in a branch that half of the warps take.
    def test_a_pass_takes_a_branch_that_widens_or_does_not(self):
        functions = sass.functions(SASS.replace("PRMT R6, R7, 0x1404, RZ", "@P6 BRA 0x100"))["_Z5first"]
        loop = self.loop(0x30, 0x150)
        self.assertIn(0xf0 // 16, sass.usual_pass(functions, loop, False))
        self.assertNotIn(0xf0 // 16, sass.usual_pass(functions, loop, False, with_widening=False))

    def test_the_loop_that_copies_repeats_until_all_bytes_are_copied(self):
        counts = sass.counted_pass(self.first, self.loop(0x30, 0x150), False, bytes_per_mma=640)
        self.assertEqual(counts["LDGSTS.E.BYPASS.128"], 2.5)  # 1280 bytes in copies of 512
        self.assertEqual(counts["IADD3"], 2.5)
        self.assertEqual(counts["BRA"], 2 * 2.5 + 3)
        self.assertEqual(counts["HMMA.16816.F32.BF16"], 2)
        self.assertNotIn("FMUL", counts)


class Cycles(unittest.TestCase):
    # For each of four warps, one on each of the four parts of a multiprocessor.
    COUNTS = {"HMMA.16816.F32.BF16": 2, "FFMA": 8, "HFMA2.BF16_V2": 4, "IMAD.MOV.U32": 4, "LOP3.LUT": 8, "IADD3": 4,
              "MUFU.EX2": 2, "LDSM.16.M88.4": 1, "SHFL.BFLY": 1, "UIADD3": 2, "BRA": 4}

    def test_pipes(self):
        # sm_89: 16 x 8 x 16 products are 32 cycles of a tensor core; 16 lanes of a pipe take 2 cycles for a warp.
        self.assertEqual(kernel_loops.cycles(self.COUNTS, "89"),
                         {"tensor": 2 * 32 / 4, "FMA": (8 + 4 * 2 + 4) / 4, "FMA heavy": (4 * 2 + 4 * 2) / 4,
                          "ALU": (8 * 2 + 4 * 2) / 4, "XU": 2 * 8 / 4, "shared": 4 + 1, "issue": 40 / 4})

    def test_architectures_differ(self):
        hopper, blackwell = (kernel_loops.cycles(self.COUNTS, arch) for arch in ("90", "120"))
        self.assertEqual(hopper["tensor"], 2 * 4 / 4)
        self.assertEqual(hopper["FMA"], (8 + 4 + 4) / 4)  # pairs at the full rate
        self.assertEqual(blackwell["ALU"], (8 * 2 + 4) / 4)  # additions at the full rate
        self.assertEqual(kernel_loops.cycles({"QMMA.16832.F32.E4M3.E4M3": 1}, "120")["tensor"], 32 / 4)

    def test_memory_a_cycle(self):
        self.assertAlmostEqual(kernel_loops.CARDS[0].bytes_per_cycle(), 3.125)

    def test_half_of_the_passes_add_sums(self):
        kernel = kernel_loops.Kernel("", "", "", bytes_per_mma=256, sums=0.5)
        counts, n_bytes = kernel_loops.pass_of(kernel, sass.functions(SASS)["_Z5first"])
        self.assertEqual((counts["FMUL"], counts["PRMT"], n_bytes), (1, 1, 512))

    def test_bytes_are_those_of_wide_loads(self):
        counts, n_bytes = kernel_loops.pass_of(kernel_loops.Kernel("", "", ""), sass.functions(SASS)["_Z5first"])
        self.assertEqual((counts["LDGSTS.E.BYPASS.128"], n_bytes), (1, 512))

    def test_an_unknown_instruction_is_refused(self):
        with self.assertRaisesRegex(SystemExit, "FROB.X is not known"):
            kernel_loops.cycles({"FROB.X": 1}, "89")

    def test_the_table_names_the_busiest_pipe(self):
        kernel, card = kernel_loops.Kernel("loop", "", ""), kernel_loops.CARDS[0]
        row = kernel_loops.share_table({(kernel, card): (self.COUNTS, 100)}).splitlines()[2]
        self.assertEqual(row, "| loop | RTX 4090 | 100 | **16** | 5 | 4 | 6 | 4 | 5 | 10 | 6.2 | 3.1 | 2.00 |")


@unittest.skipUnless(shutil.which("nvcc") and shutil.which("cuobjdump"), "nvcc or cuobjdump is missing")
class Compiled(unittest.TestCase):
    def test_the_router(self):
        code = kernel_loops.disassembled("exact_product", "89", "cuobjdump")
        for kernel in kernel_loops.KERNELS:
            if kernel.file == "exact_product":
                counts, n_bytes = kernel_loops.pass_of(kernel, code[kernel.name])
                self.assertGreater(counts["FFMA"], 0)
                self.assertGreater(n_bytes, 0)


if __name__ == "__main__":
    unittest.main()
