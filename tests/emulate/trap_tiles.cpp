#include "tests/emulate/trap_tiles.h"

#include <ucontext.h>

#include <csignal>
#include <cstdint>
#include <cstring>

#include "amx.h"

namespace tandem::test {
namespace {

// One instruction: a VEX prefix of three bytes (C4; inverted R, X, B and the opcode map; W,
// inverted vvvv, L and pp), opcode, ModRM, optional SIB and displacement (Intel's manual, volume 2,
// section 2.3).
struct Instruction {
  int prefix;  // 0 none, 1 66, 2 F3, 3 F2
  int opcode;
  int reg, rm, vvvv;    // registers
  bool in_memory;       // the operand rm is in memory
  uint8_t* base_index;  // address without the index register
  int64_t index;        // value of the index register: the stride of tile loads and stores
  int length;
};

int64_t register_value(const ucontext_t& context, int number) {
  constexpr int kOrder[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                            REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context.uc_mcontext.gregs[kOrder[number]];
}

// Returns false if the instruction is not an AMX instruction.
bool decode(const ucontext_t& context, Instruction& out) {
  const auto* code = reinterpret_cast<const uint8_t*>(context.uc_mcontext.gregs[REG_RIP]);
  if (code[0] != 0xc4 || (code[1] & 31) != 2) return false;
  const int x = ~code[1] >> 6 & 1, b = ~code[1] >> 5 & 1;
  out = {.prefix = code[2] & 3,
         .opcode = code[3],
         .reg = code[4] >> 3 & 7,
         .rm = code[4] & 7,
         .vvvv = ~code[2] >> 3 & 15,
         .in_memory = code[4] >> 6 != 3,
         .base_index = nullptr,
         .index = 0,
         .length = 5};
  if (out.opcode != 0x49 && out.opcode != 0x4b && out.opcode != 0x5c && out.opcode != 0x5e)
    return false;
  if (!out.in_memory) return true;

  const int mod = code[4] >> 6;
  int base = out.rm;
  int64_t address = 0;
  if (out.rm == 4) {
    const int sib = code[out.length++], index = (sib >> 3 & 7) | x << 3;
    base = sib & 7;
    if (index != 4) out.index = register_value(context, index) << (sib >> 6);
  }
  const bool no_base = base == 5 && mod == 0;
  int32_t displacement = 0;
  if (mod == 1) {
    displacement = static_cast<int8_t>(code[out.length++]);
  } else if (mod == 2 || no_base) {
    std::memcpy(&displacement, code + out.length, 4);
    out.length += 4;
  }
  if (!no_base) address = register_value(context, base | b << 3);
  if (no_base && out.rm == 5) address = context.uc_mcontext.gregs[REG_RIP] + out.length;
  out.base_index = reinterpret_cast<uint8_t*>(address + displacement);
  return true;
}

bool execute(const Instruction& i) {
  using namespace cpu;
  switch (i.opcode << 4 | i.prefix) {
    case 0x490:
      i.in_memory ? _tile_loadconfig(i.base_index + i.index) : _tile_release();
      return true;
    case 0x493:
      _tile_zero(i.reg);
      return true;
    case 0x4b1:
    case 0x4b3:
      _tile_loadd(i.reg, i.base_index, i.index);
      return true;
    case 0x4b2:
      _tile_stored(i.reg, i.base_index, i.index);
      return true;
    case 0x5c2:
      _tile_dpbf16ps(i.reg, i.rm, i.vvvv);
      return true;
    case 0x5e0:
      _tile_dpbuud(i.reg, i.rm, i.vvvv);
      return true;
    case 0x5e1:
      _tile_dpbusd(i.reg, i.rm, i.vvvv);
      return true;
    case 0x5e2:
      _tile_dpbsud(i.reg, i.rm, i.vvvv);
      return true;
    case 0x5e3:
      _tile_dpbssd(i.reg, i.rm, i.vvvv);
      return true;
    default:
      return false;
  }
}

void on_invalid_instruction(int, siginfo_t*, void* state) {
  auto& context = *static_cast<ucontext_t*>(state);
  Instruction instruction;
  if (decode(context, instruction) && execute(instruction)) {
    context.uc_mcontext.gregs[REG_RIP] += instruction.length;
  } else {
    std::signal(SIGILL, SIG_DFL);  // the instruction then ends the process
  }
}

}  // namespace

void trap_tile_instructions() {
  struct sigaction action = {};
  action.sa_sigaction = on_invalid_instruction;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGILL, &action, nullptr);
}

}  // namespace tandem::test
