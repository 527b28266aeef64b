// What does a block of CUDA threads do next? One fiber a thread; a fiber runs until it waits at a barrier or at an
// instruction of its warp or warpgroup, then any fiber that can go on does, drawn from the seed. What cannot happen on
// a GPU without harm (divergence, deadlock, an exit while others wait) ends the block with a finding that names kernel,
// block, thread and line.
#pragma once

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <memory>
#include <vector>

#include "stack.h"

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

namespace smelt::emulator {

// Where the kernel's source calls an operation: the last argument of each, filled in by the compiler.
struct Where {
  const char* file = "";
  int line = 0;
};
constexpr Where here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }

struct Operation {
  const char* name = "start";
  Where where;

  bool operator==(const Operation& other) const {
    return where.line == other.where.line && (name == other.name || strcmp(name, other.name) == 0);
  }
};

struct Copy {  // one cp.async of 16 bytes
  size_t offset;
  const void* global;
  int bytes;
  bool landed;
};

struct CudaThread {
  Fiber fiber;
  int id = 0;
  dim3 index;
  bool exited = false;
  Operation operation;
  std::vector<Copy> copies;  // under way, in order of issue
  std::vector<int> groups;   // sizes of the committed groups, oldest first; what `copies` has beyond is not committed
  // Numbers of the last fence.proxy.async, and of the last one in an earlier barrier interval (see shadow.h).
  int64_t fence = 0, earlier_fence = 0;
  int fence_interval = -1;
};

// A warp or warpgroup on its way to one common instruction.
struct Gathering {
  int arrived = 0;
  Operation operation;
  void* payloads[128];
};

struct Shadow {  // of 4 bytes of shared memory, see shadow.h
  int write_interval = -1, read_interval = -1;
  int16_t writer = -1, reader = -1;
  uint16_t matrix_reads = 0;
  uint8_t copies = 0;
  int64_t write_number = 0;
};

struct Store {  // to global memory, see memory.h
  uintptr_t address;
  int64_t block;
  int bytes, interval, thread;
};

struct Counts {
  int64_t blocks = 0, mma = 0, matrix_phases = 0, extra_ways = 0, worst_ways = 0, copied_bytes = 0, wgmma = 0;
};

struct Warpgroup;  // see warpgroup.h

// A block and the host thread that runs it. Everything is made anew for each block but the memory it stands in.
struct Block {
  const char* kernel = "";
  dim3 grid_size, block_size, index;
  int64_t number = 0;
  const std::function<void()>* body = nullptr;
  int capability = 90;

  std::vector<CudaThread> threads;
  std::unique_ptr<Stacks> stacks;
  Fiber host;
  CudaThread* running = nullptr;
  int alive = 0, at_barrier = 0;
  Operation barrier;                               // of the first that waits
  uint32_t ready_warps = 0, ready_lanes[32] = {};  // bit sets
  bool one_warp_ahead = false;                     // run a warp until it waits for others, or mix all of them
  std::vector<Gathering> warps, warpgroups;
  std::vector<std::shared_ptr<Warpgroup>> matrix_pipes;

  unsigned char* shared = nullptr;
  size_t shared_bytes = 0;
  std::vector<Shadow> shadow;
  int interval = 0;          // between two barriers
  int64_t write_number = 1;  // rises with every fence.proxy.async

  std::vector<Store> stores;
  Counts counts;
  uint64_t random_state = 1;
  char finding[1024] = "";

  uint32_t random() {  // xorshift64
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return static_cast<uint32_t>(random_state >> 32);
  }
  void make_ready(int warp, uint32_t lanes) {
    ready_lanes[warp] |= lanes;
    if (ready_lanes[warp]) ready_warps |= 1u << warp;
  }
};

// State of the library. Hidden, or the loader would share it between all emulated libraries of a process.
#define SMELT_STATE __attribute__((visibility("hidden"))) inline
SMELT_STATE thread_local Block* current = nullptr;

// Of the GPU that is played.
inline int capability() {
  const char* value = getenv("SMELT_EMULATED_CAPABILITY");
  return value ? atoi(value) : 90;
}

// ---- findings ----

inline void note_finding(const Operation* operation, int thread, const char* format, va_list arguments) {
  Block& block = *current;
  if (block.finding[0]) return;
  char text[640], who[64] = "", line[256] = "";
  vsnprintf(text, sizeof text, format, arguments);
  if (thread >= 0) snprintf(who, sizeof who, ", thread %d", thread);
  if (operation && operation->where.line) {
    const char* file = strrchr(operation->where.file, '/');
    snprintf(line, sizeof line, ", %s:%d", file ? file + 1 : operation->where.file, operation->where.line);
  }
  snprintf(block.finding, sizeof block.finding, "%.200s, block (%u, %u, %u)%s%s: %.400s", block.kernel, block.index.x,
           block.index.y, block.index.z, who, line, text);
}

// A finding of the block as a whole, made by the host thread.
__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note_finding(nullptr, -1, format, arguments);
  va_end(arguments);
}

// A finding of the running thread; the block ends here, its fibers are left where they stand.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  note_finding(&current->running->operation, current->running->id, format, arguments);
  va_end(arguments);
  CudaThread& thread = *current->running;
  thread.fiber.finished = true;
  switch_fiber(thread.fiber, current->host);
  __builtin_unreachable();
}

inline CudaThread& begin(const char* operation, Where where) {
  CudaThread& thread = *current->running;
  thread.operation = {operation, where};
  return thread;
}

// ---- who runs next ----

// Any one of them, with equal chances.
inline int random_bit(uint32_t bits, uint32_t random) {
  for (unsigned skip = random % static_cast<unsigned>(__builtin_popcount(bits)); skip; --skip) bits &= bits - 1;
  return __builtin_ctz(bits);
}

inline CudaThread* next_thread(Block& block, int warp) {
  if (!block.ready_warps) return nullptr;
  if (!block.one_warp_ahead || !block.ready_lanes[warp]) warp = random_bit(block.ready_warps, block.random());
  int lane = random_bit(block.ready_lanes[warp], block.random());
  block.ready_lanes[warp] &= ~(1u << lane);
  if (!block.ready_lanes[warp]) block.ready_warps &= ~(1u << warp);
  return &block.threads[static_cast<size_t>(warp * 32 + lane)];
}

// The running thread waits (somebody makes it ready again) or is done; without anyone to run, the host thread goes on.
inline void give_way() {
  Block& block = *current;
  CudaThread& thread = *block.running;
  CudaThread* next = next_thread(block, thread.id / 32);
  if (next == &thread) return;
  block.running = next;
  switch_fiber(thread.fiber, next ? next->fiber : block.host);
}

inline void run_thread() {
  entered(current->host);
  CudaThread& thread = *current->running;
  (*current->body)();
  Block& block = *current;
  begin("exit", Where{});
  if (block.at_barrier) fail("exits while %d threads wait at a barrier", block.at_barrier);
  if (!thread.copies.empty())
    fail("exits with %zu cp.async never waited for, the first into shared byte %zu", thread.copies.size(),
         thread.copies[0].offset);
  thread.exited = true;
  thread.fiber.finished = true;
  --block.alive;
  give_way();
  __builtin_unreachable();
}

// ---- waiting for others ----

// All lanes of a warp (32) or warpgroup (128) meet here; the last one does the work of all with their payloads.
template <class Work>
inline void meet(Gathering& gathering, int size, void* payload, Work&& work) {
  Block& block = *current;
  CudaThread& thread = *block.running;
  const char* what = size == 32 ? "warp" : "warpgroup";
  if (gathering.arrived == 0) {
    gathering.operation = thread.operation;
  } else if (!(gathering.operation == thread.operation)) {
    fail("%s divergence: it is at %s, others of its %s wait at %s, line %d", what, thread.operation.name, what,
         gathering.operation.name, gathering.operation.where.line);
  }
  gathering.payloads[thread.id % size] = payload;
  if (++gathering.arrived < size) return give_way();
  gathering.arrived = 0;
  work(gathering.payloads);
  int first_warp = thread.id / size * (size / 32);
  for (int warp = first_warp; warp < first_warp + size / 32; ++warp)
    block.make_ready(warp, warp == thread.id / 32 ? ~(1u << thread.id % 32) : ~0u);
}

template <class Work>
inline void meet_warp(void* payload, Work&& work) {
  meet(current->warps[static_cast<size_t>(current->running->id / 32)], 32, payload, work);
}

// ---- a block from start to end ----

inline void describe_deadlock(Block& block) {
  char who[400] = "";
  size_t used = 0;
  int exited = 0;
  std::vector<bool> told(block.threads.size());
  for (size_t i = 0; i < block.threads.size(); ++i) {
    const CudaThread& thread = block.threads[i];
    exited += thread.exited;
    if (thread.exited || told[i]) continue;
    int count = 0;
    for (size_t j = i; j < block.threads.size(); ++j) {
      const CudaThread& other = block.threads[j];
      if (other.exited || !(other.operation == thread.operation)) continue;
      told[j] = true;
      ++count;
    }
    if (used < sizeof who)
      used += static_cast<size_t>(snprintf(who + used, sizeof who - used,
                                           "%s%d threads (the first is %d) wait at %s, line %d", used ? ", " : "",
                                           count, thread.id, thread.operation.name, thread.operation.where.line));
  }
  report("deadlock: %s; %d threads have exited", who, exited);
}

inline void finish_matrix_pipes(Block& block);  // warpgroup.h

inline void run_block(Block& block) {
  int count = static_cast<int>(block.block_size.x * block.block_size.y * block.block_size.z);
  size_t warps = static_cast<size_t>(count + 31) / 32;
  block.alive = count;
  block.at_barrier = 0;
  block.interval = 0;
  block.write_number = 1;
  block.ready_warps = 0;
  block.one_warp_ahead = block.random() & 1;
  block.warps.assign(warps, Gathering());
  block.warpgroups.assign((warps + 3) / 4, Gathering());
  block.matrix_pipes.assign((warps + 3) / 4, nullptr);
  block.shadow.assign((block.shared_bytes + 3) / 4, Shadow());
  if (block.shared_bytes) memset(block.shared, 0xff, block.shared_bytes);  // NaN, as bf16 and as fp32
  block.threads.resize(static_cast<size_t>(count));
  for (int i = 0; i < count; ++i) {
    CudaThread& thread = block.threads[static_cast<size_t>(i)];
    unsigned n = static_cast<unsigned>(i);
    thread.id = i;
    thread.index = dim3(n % block.block_size.x, n / block.block_size.x % block.block_size.y,
                        n / (block.block_size.x * block.block_size.y));
    thread.exited = false;
    thread.operation = Operation();
    thread.copies.clear();
    thread.groups.clear();
    thread.fence = thread.earlier_fence = 0;
    thread.fence_interval = -1;
    prepare(thread.fiber, block.stacks->lowest(i), run_thread);
    block.make_ready(i / 32, 1u << i % 32);
  }
  current = &block;
  block.running = next_thread(block, 0);
  switch_fiber(block.host, block.running->fiber);
  for (uint32_t& lanes : block.ready_lanes) lanes = 0;
  if (!block.finding[0] && block.alive) describe_deadlock(block);
  if (!block.finding[0]) finish_matrix_pipes(block);
  ++block.counts.blocks;
  current = nullptr;
}

}  // namespace smelt::emulator

namespace smelt {

inline void barrier(emulator::Where where = emulator::here()) {
  emulator::Block& block = *emulator::current;
  emulator::CudaThread& thread = emulator::begin("barrier", where);
  int count = static_cast<int>(block.threads.size());
  if (block.alive != count) emulator::fail("waits at a barrier after %d threads have exited", count - block.alive);
  if (block.at_barrier == 0) block.barrier = thread.operation;
  if (!(block.barrier == thread.operation))
    emulator::fail("divergence: it is at another barrier than others of its block, who wait at line %d",
                   block.barrier.where.line);
  if (++block.at_barrier < count) return emulator::give_way();
  block.at_barrier = 0;
  ++block.interval;
  for (int warp = 0; warp * 32 < count; ++warp) {
    int lanes = count - warp * 32;
    uint32_t all = lanes >= 32 ? ~0u : (1u << lanes) - 1;
    block.make_ready(warp, warp == thread.id / 32 ? all & ~(1u << thread.id % 32) : all);
  }
}

}  // namespace smelt
