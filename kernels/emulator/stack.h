// How does one host thread run hundreds of CUDA threads? Each has a stack of its own, and running another one means
// going on with another stack pointer. On x86-64 that is nine instructions; elsewhere the C library's contexts do it,
// with a system call each. Address sanitizer is told of every switch.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#if defined(__x86_64__) && defined(__ELF__) && !defined(SMELT_EMULATOR_UCONTEXT)
#define SMELT_EMULATOR_ASSEMBLY 1
#else
#define SMELT_EMULATOR_ASSEMBLY 0
#include <ucontext.h>
#endif

#if defined(__SANITIZE_ADDRESS__)
#define SMELT_EMULATOR_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define SMELT_EMULATOR_ASAN 1
#endif
#endif
#if defined(SMELT_EMULATOR_ASAN)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if SMELT_EMULATOR_ASSEMBLY
// Saves what a called function has to keep, leaves the stack pointer in *save, and returns on the stack `resume`.
asm(R"(
  .pushsection .text.smelt_switch_stack, "axG", @progbits, smelt_switch_stack, comdat
  .weak smelt_switch_stack
  .hidden smelt_switch_stack
  .type smelt_switch_stack, @function
smelt_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
  .size smelt_switch_stack, . - smelt_switch_stack
  .popsection
)");
extern "C" __attribute__((visibility("hidden"))) void smelt_switch_stack(void** save, void* resume);
#endif

namespace smelt::emulator {

#if defined(SMELT_EMULATOR_ASAN)
constexpr size_t STACK_BYTES = 512 << 10;  // red zones make frames several times larger
#else
constexpr size_t STACK_BYTES = 64 << 10;
#endif

// Stacks of equal size with an unreadable page below each, so that an overflow is a crash and not a wrong result.
class Stacks {
 public:
  explicit Stacks(int count)
      : guard_(static_cast<size_t>(sysconf(_SC_PAGESIZE))),
        bytes_(static_cast<size_t>(count) * (guard_ + STACK_BYTES)) {
    memory_ = static_cast<unsigned char*>(
        mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (memory_ == MAP_FAILED) __builtin_trap();
    for (int i = 0; i < count; ++i)
      mprotect(memory_ + static_cast<size_t>(i) * (guard_ + STACK_BYTES), guard_, PROT_NONE);
  }
  ~Stacks() { munmap(memory_, bytes_); }
  Stacks(const Stacks&) = delete;
  Stacks& operator=(const Stacks&) = delete;
  unsigned char* lowest(int i) const { return memory_ + static_cast<size_t>(i) * (guard_ + STACK_BYTES) + guard_; }

 private:
  size_t guard_, bytes_;
  unsigned char* memory_;
};

// One flow of control: a CUDA thread's, or the host thread's that runs the block.
struct Fiber {
#if SMELT_EMULATOR_ASSEMBLY
  void* stack_pointer = nullptr;
#else
  ucontext_t context;
#endif
  const void* lowest = nullptr;  // of its stack; the host thread's own is found out at its first switch
  size_t bytes = 0;
  void* fake_stack = nullptr;  // address sanitizer's
  bool finished = false;       // never resumed again
};

inline void prepare(Fiber& fiber, unsigned char* lowest, void (*entry)()) {
  fiber.lowest = lowest;
  fiber.bytes = STACK_BYTES;
  fiber.fake_stack = nullptr;
  fiber.finished = false;
#if defined(SMELT_EMULATOR_ASAN)
  __asan_unpoison_memory_region(lowest, STACK_BYTES);  // the fiber that had it last may have been left in mid-frame
#endif
#if SMELT_EMULATOR_ASSEMBLY
  void** top = reinterpret_cast<void**>(lowest + STACK_BYTES);
  *--top = nullptr;  // the return address of entry: there is none. Here the stack pointer is 8 past a multiple of 16,
                     // as the ABI wants
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;  // what smelt_switch_stack pops
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = lowest;
  fiber.context.uc_stack.ss_size = STACK_BYTES;
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, entry, 0);
#endif
}

inline void switch_fiber(Fiber& from, Fiber& to) {
#if defined(SMELT_EMULATOR_ASAN)
  __sanitizer_start_switch_fiber(from.finished ? nullptr : &from.fake_stack, to.lowest, to.bytes);
#endif
#if SMELT_EMULATOR_ASSEMBLY
  smelt_switch_stack(&from.stack_pointer, to.stack_pointer);
#else
  swapcontext(&from.context, &to.context);
#endif
#if defined(SMELT_EMULATOR_ASAN)
  __sanitizer_finish_switch_fiber(from.fake_stack, nullptr, nullptr);
#endif
}

// The first thing a fiber does. `host` is the flow that started the block: its stack's bounds are known from here on.
inline void entered([[maybe_unused]] Fiber& host) {
#if defined(SMELT_EMULATOR_ASAN)
  const void* lowest = nullptr;
  size_t bytes = 0;
  __sanitizer_finish_switch_fiber(nullptr, &lowest, &bytes);
  if (!host.lowest) host.lowest = lowest, host.bytes = bytes;
#endif
}

}  // namespace smelt::emulator
