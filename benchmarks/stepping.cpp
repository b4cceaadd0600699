#include "benchmarks/stepping.h"

#include <ucontext.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu_kernels/peaks.h"

namespace tandem {
namespace {

// A vector, mask or tile instruction: VEX and EVEX prefixes in Intel's manual, volume 2,
// sections 2.3 and 2.7. `map` is 1 for opcodes behind 0F, 2 behind 0F38, 3 behind 0F3A, 0: another
// instruction.
struct Instruction {
  int map = 0, prefix = 0, opcode = 0;  // prefix: 0 none, 1 66, 2 F3, 3 F2
  bool evex = false, wide = false;      // wide: bit W
  bool masked = false;                  // by a mask register
  bool in_memory = false;               // operand rm is in memory
  int reg = 0, vvvv = 0, rm = 0;        // registers
  int vector_bytes = 16;
  int length = 0;       // bytes
  int64_t address = 0;  // of the operand in memory

  int map_and_opcode() const { return map << 8 | opcode; }
};
Instruction decode(ucontext_t& context);
bool is_mask(const Instruction& i);
bool is_tile(const Instruction& i);
bool needs_vector_pipe(const Instruction& i);
void skip(const Instruction& i, ucontext_t& context);

SteppedCounts counts;
bool has_avx512 = false, has_amx = false;

// Runs before every instruction: the thread is about to execute the one at its RIP.
void on_step(int, siginfo_t*, void* raw) {
  auto& context = *static_cast<ucontext_t*>(raw);
  for (;;) {
    const Instruction next = decode(context);
    ++counts.all;
    if (needs_vector_pipe(next)) ++counts.vector;
    if (is_tile(next) ? has_amx : has_avx512 || !(next.evex || is_mask(next))) return;
    skip(next, context);
  }
}

// Flag 8 of RFLAGS, TF, traps after every instruction. The 128 bytes below the stack pointer belong
// to the function that this is inlined into.
void start_stepping() {
  __asm__ volatile(
      "lea -128(%%rsp), %%rsp\n\tpushfq\n\torq $0x100, (%%rsp)\n\tpopfq\n\tlea 128(%%rsp), %%rsp"
      :
      :
      : "memory", "cc");
}
void stop_stepping() {
  __asm__ volatile(
      "lea -128(%%rsp), %%rsp\n\tpushfq\n\tandq $~0x100, (%%rsp)\n\tpopfq\n\tlea 128(%%rsp), %%rsp"
      :
      :
      : "memory", "cc");
}

}  // namespace

SteppedCounts count_steps(const std::function<void()>& function) {
  has_avx512 = cpu::cpu_has(cpu::Feature::kAvx512Bf16);
  has_amx = cpu::cpu_has(cpu::Feature::kAmxInt8);
  struct sigaction step = {}, before = {};
  step.sa_sigaction = on_step;
  step.sa_flags = SA_SIGINFO;
  sigaction(SIGTRAP, &step, &before);
  counts = {};
  start_stepping();
  function();
  stop_stepping();
  sigaction(SIGTRAP, &before, nullptr);
  return counts;
}

namespace {

greg_t& register_of(ucontext_t& context, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number & 15]];
}

bool moves_number(const Instruction& i) {  // VMOVD, VMOVQ
  return i.map == 1 && (i.opcode == 0x6e || i.opcode == 0x7e) && i.prefix == 1;
}

int bytes_of_move(const Instruction& i) {
  return !moves_number(i) ? i.vector_bytes : i.wide ? 8 : 4;
}

bool has_immediate(const Instruction& i) {
  if (i.map == 3) return true;
  return i.map == 1 && ((i.opcode >= 0x70 && i.opcode <= 0x73) || i.opcode == 0xc2 ||
                        (i.opcode >= 0xc4 && i.opcode <= 0xc6));
}

Instruction decode(ucontext_t& context) {
  const auto* code = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  Instruction i;
  i.evex = code[0] == 0x62;
  if (!i.evex && code[0] != 0xc4 && code[0] != 0xc5) return {};
  const bool two_bytes = code[0] == 0xc5;
  const int opcode_at = i.evex ? 4 : two_bytes ? 2 : 3;
  i.map = two_bytes ? 1 : code[1] & (i.evex ? 7 : 31);
  i.prefix = code[i.evex ? 2 : opcode_at - 1] & 3;
  i.opcode = code[opcode_at];
  const bool general = !i.evex && i.opcode >= 0xf0 && i.map >= 2;  // BMI
  const bool vzeroupper = !i.evex && i.map == 1 && i.opcode == 0x77;
  if (general || vzeroupper) return {};

  const auto inverted = [](int byte, int bit) { return ~byte >> bit & 1; };
  const uint8_t* at = code + opcode_at + 1;
  const int mod = *at >> 6, rm = *at & 7, x = two_bytes ? 0 : inverted(code[1], 6),
            b = two_bytes ? 0 : inverted(code[1], 5);
  i.reg = (*at >> 3 & 7) | inverted(code[1], 7) << 3;
  i.rm = rm | b << 3;
  i.wide = !two_bytes && code[2] >> 7 != 0;
  if (i.evex) {
    i.reg |= inverted(code[1], 4) << 4;
    i.rm |= x << 4;
    i.vvvv = (~code[2] >> 3 & 15) | inverted(code[3], 3) << 4;
    i.vector_bytes = 16 << (code[3] >> 5 & 3);
    i.masked = (code[3] & 7) != 0;
  }
  i.in_memory = mod != 3;
  ++at;
  if (i.in_memory) {
    int base = rm;
    if (rm == 4) {
      const int sib = *at++, index = (sib >> 3 & 7) | x << 3;
      base = sib & 7;
      if (index != 4) i.address = register_of(context, index) << (sib >> 6);
    }
    const bool no_base = mod == 0 && base == 5;
    int32_t displacement = 0;
    if (mod == 1) {
      displacement = static_cast<int8_t>(*at++) * (i.evex ? bytes_of_move(i) : 1);
    } else if (mod == 2 || no_base) {
      std::memcpy(&displacement, at, sizeof(displacement));
      at += sizeof(displacement);
    }
    if (!no_base) i.address += register_of(context, base | b << 3);
    i.address += displacement;
  }
  i.length = static_cast<int>(at - code) + (has_immediate(i) ? 1 : 0);
  if (mod == 0 && rm == 5) i.address += context.uc_mcontext.gregs[REG_RIP] + i.length;
  return i;
}

bool is_mask(const Instruction& i) {
  if (i.evex) return false;
  if (i.map == 1)
    return (i.opcode >= 0x41 && i.opcode <= 0x4b) || (i.opcode >= 0x90 && i.opcode <= 0x99);
  return i.map == 3 && i.opcode >= 0x30 && i.opcode <= 0x33;
}

bool is_tile(const Instruction& i) {
  return !i.evex && i.map == 2 &&
         (i.opcode == 0x49 || i.opcode == 0x4b || i.opcode == 0x5c || i.opcode == 0x5e);
}

bool is_move(const Instruction& i) {
  switch (i.map_and_opcode()) {
    case 0x110:
    case 0x111:
    case 0x112:
    case 0x113:
    case 0x116:
    case 0x117:
    case 0x128:
    case 0x129:
    case 0x12b:
    case 0x16f:
    case 0x17f:
    case 0x1d6:
    case 0x1e7:
    case 0x22a:
      return true;
    case 0x17e:
      return i.prefix == 2;
    case 0x218:
    case 0x219:
    case 0x21a:
    case 0x21b:
    case 0x258:
    case 0x259:
    case 0x25a:
    case 0x25b:  // broadcasts
      return i.in_memory;
    default:
      return false;
  }
}

bool needs_vector_pipe(const Instruction& i) {
  return i.map != 0 && !is_move(i) && !is_mask(i) && !is_tile(i);
}

struct Vector {
  uint8_t bytes[64] = {};
};

// Vector registers. What the CPU has of them is in the frame of the signal: XMM registers at byte
// 160, the upper halves of YMM registers at 576, and bits 1 and 2 of byte 512 state that they are
// not zero (Intel's manual, volume 1, section 13.4). `beyond` has the rest.
class Registers {
 public:
  explicit Registers(ucontext_t& context)
      : frame_(reinterpret_cast<uint8_t*>(context.uc_mcontext.fpregs)) {}
  Vector get(int number) {
    if (number < kOfCpu) {
      std::memcpy(beyond[number].bytes, low(number), 16);
      std::memset(beyond[number].bytes + 16, 0, 16);
      if (has_high()) std::memcpy(beyond[number].bytes + 16, high(number), 16);
    }
    return beyond[number];
  }
  void set(int number, const Vector& v) {
    beyond[number] = v;
    if (number >= kOfCpu) return;
    if (!has_high()) std::memset(high(0), 0, 16 * kOfCpu);
    frame_[512] |= 6;
    std::memcpy(low(number), v.bytes, 16);
    std::memcpy(high(number), v.bytes + 16, 16);
  }

 private:
  static constexpr int kOfCpu = 16;
  static inline Vector beyond[32];
  bool has_high() const { return (frame_[512] & 4) != 0; }
  uint8_t* low(int number) { return frame_ + 160 + 16 * number; }
  uint8_t* high(int number) { return frame_ + 576 + 16 * number; }
  uint8_t* frame_;
};

void skip_mask(const Instruction& i, ucontext_t& context);
[[noreturn]] void refuse(const Instruction& i);

// Executes what addresses and branches of products depend on: GCC copies structures with wide
// vectors, and keeps and multiplies addresses in vector registers where general ones are scarce.
// Everything else has no effect.
void skip(const Instruction& i, ucontext_t& context) {
  context.uc_mcontext.gregs[REG_RIP] += i.length;
  if (is_mask(i)) return skip_mask(i, context);
  if (is_tile(i) || i.masked) return;
  Registers registers(context);
  const int bytes = bytes_of_move(i);
  const auto memory = reinterpret_cast<void*>(i.address);
  void* const number = i.in_memory ? memory : &register_of(context, i.rm);
  Vector v;
  switch (i.map_and_opcode()) {
    case 0x16e:  // VMOVD, VMOVQ to a vector
      std::memcpy(v.bytes, number, bytes);
      return registers.set(i.reg, v);
    case 0x17e:  // from a vector
      v = registers.get(i.reg);
      if (i.prefix != 1) refuse(i);
      if (!i.in_memory) register_of(context, i.rm) = 0;
      std::memcpy(number, v.bytes, bytes);
      return;
    case 0x110:
    case 0x128:
    case 0x16f:                                       // moves to a register
      if (i.prefix >= 2 && i.opcode == 0x10) return;  // VMOVSS, VMOVSD
      if (!i.in_memory) v = registers.get(i.rm);
      if (i.in_memory) std::memcpy(v.bytes, memory, bytes);
      std::memset(v.bytes + bytes, 0, sizeof(v) - bytes);
      return registers.set(i.reg, v);
    case 0x111:
    case 0x129:
    case 0x17f:  // moves to memory
      if (i.prefix >= 2 && i.opcode == 0x11) return;
      v = registers.get(i.reg);
      if (!i.in_memory) refuse(i);
      std::memcpy(memory, v.bytes, bytes);
      return;
    case 0x157:
    case 0x1ef:  // exclusive or, with which registers are zeroed
      if (i.vvvv == i.rm && !i.in_memory) registers.set(i.reg, v);
      return;
    case 0x27c:  // broadcast of a general register
      for (int at = 0; at < i.vector_bytes; at += i.wide ? 8 : 4)
        std::memcpy(v.bytes + at, number, i.wide ? 8 : 4);
      return registers.set(i.reg, v);
    case 0x240:  // products of 64 bits
      if (i.in_memory || !i.wide) return;
      {
        const Vector x = registers.get(i.vvvv), y = registers.get(i.rm);
        for (int at = 0; at < i.vector_bytes; at += 8) {
          uint64_t a, b;
          std::memcpy(&a, x.bytes + at, 8);
          std::memcpy(&b, y.bytes + at, 8);
          a *= b;
          std::memcpy(v.bytes + at, &a, 8);
        }
      }
      return registers.set(i.reg, v);
    case 0x12c:
    case 0x12d:
    case 0x12e:
    case 0x12f:
    case 0x1c5:
    case 0x314:
    case 0x315:
    case 0x316:
    case 0x317:  // results in general registers and flags
      refuse(i);
    default:
      return;
  }
}

// GCC loads a bool through a mask register. A mask that is compared with zero is taken for zero: no
// code of FP8 has the exponent 0.
void skip_mask(const Instruction& i, ucontext_t& context) {
  static uint8_t masks[8];
  const bool of_byte = i.prefix == 1 && !i.wide;
  if (i.map == 1 && i.opcode == 0x90 && of_byte && i.in_memory)
    masks[i.reg & 7] = *reinterpret_cast<const uint8_t*>(i.address);
  constexpr int kOrTest = 0x98;
  if (i.map == 1 && i.opcode == kOrTest) {
    constexpr greg_t kCarry = 1, kZero = 0x40;
    greg_t& flags = context.uc_mcontext.gregs[REG_EFL];
    flags = (flags & ~kCarry) | kZero;
    return;
  }
  if (i.map != 1 || i.opcode < 0x93) return;
  if (i.opcode != 0x93 || !of_byte) refuse(i);
  register_of(context, i.reg) = masks[i.rm & 7];
}

void refuse(const Instruction& i) {
  std::fprintf(stderr, "not known: the result of an instruction of AVX-512, map %d, opcode %02x\n",
               i.map, i.opcode);
  std::abort();
}

}  // namespace
}  // namespace tandem
