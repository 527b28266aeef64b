// What do Hopper's asynchronous matrix products do, and when? A wgmma reads its operands in shared memory at its issue
// or only when it has to be done, by the seed; until a wait its accumulators belong to the hardware: they hold a marked
// NaN, and a register that is not that NaN at the wait was written to. Sums of 16 products are added in order of issue.
//
// Descriptor (PTX ISA, "matrix descriptor"; CuTe, make_gmma_desc), in 16 bytes: bits 0-13 start, 16-29 leading byte
// offset (LBO), 32-45 stride byte offset (SBO), 49-51 base offset, 62-63 swizzle, 1 of 128 bytes. Element (mn, k) of an
// operand stands at
//   K-major   start + mn / 8 SBO + mn % 8 128 + 2 k
//   MN-major  start + mn / 64 LBO + k / 8 SBO + k % 8 128 + mn % 64 2
// with bits 4-6 of the whole address xored with its bits 7-9.
#pragma once

#include <deque>

#include "memory.h"
#include "warp.h"

namespace smelt::emulator {

constexpr size_t SHARED_START = 1024;       // shared addresses as wgmma sees them do not begin at 0
constexpr uint32_t IN_FLIGHT = 0x7f85e17f;  // a signalling NaN: any sum with it is another NaN

// The registers d of one wgmma call, of all 128 threads: known by where the first thread keeps them.
struct Accumulators {
  float* lanes[128];
  int columns = 0;
  int in_flight = 0;          // wgmma on them that are not waited for
  int64_t settled = -1;       // number of the last wgmma.fence when they came back to the threads
  std::vector<float> values;  // [64, columns], while in flight
};

struct Product {
  size_t target;  // of the warpgroup's accumulators
  int columns;
  bool mn_major[2];
  std::vector<uint32_t> chunks[2];  // where each 16 bytes of a and b stand in shared memory
  std::vector<float> sums;          // [64, columns], once the operands are read
};

struct Warpgroup {
  std::vector<Accumulators> accumulators;
  std::vector<Product> open;
  std::deque<std::vector<Product>> groups;
  int64_t fence = 0;  // how many wgmma.fence there were; 0 orders nothing before it
};

inline Warpgroup& warpgroup() {
  std::shared_ptr<Warpgroup>& pipe = current->matrix_pipes[static_cast<size_t>(current->running->id / 128)];
  if (!pipe) pipe = std::make_shared<Warpgroup>();
  return *pipe;
}

template <class Work>
inline void meet_warpgroup(void* payload, Work&& work) {
  if (current->capability < 90) fail("%s needs capability 9.0", current->running->operation.name);
  meet(current->warpgroups[static_cast<size_t>(current->running->id / 128)], 128, payload, work);
}

// ---- operands ----

inline void find_chunks(Product& product, int operand, uint64_t descriptor) {
  size_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4,
         stride = (descriptor >> 32 & 0x3fff) << 4;
  bool mn_major = product.mn_major[operand];
  char name = operand ? 'b' : 'a';
  size_t rows = operand ? static_cast<size_t>(product.columns) : 64;
  if (descriptor >> 62 != 1)
    fail("wgmma: swizzle %d of operand %c; 1, of 128 bytes, is meant", int(descriptor >> 62), name);
  if (descriptor >> 49 & 7) fail("wgmma: base offset of operand %c is not 0", name);
  if (mn_major ? start % 1024 : start % 1024 > 96 || start % 32)
    fail("wgmma: operand %c starts %zu bytes into an atom of 1024 bytes; %s", name, start % 1024,
         mn_major ? "an MN-major one has to start with it"
                  : "a K-major one starts 0, 32, 64 or 96 bytes into its first row");
  if (stride % 1024 || (mn_major && rows > 64 && leading % 1024))
    fail("wgmma: offsets of operand %c (leading %zu, stride %zu bytes) are not whole atoms of 1024 bytes", name,
         leading, stride);
  size_t inner = mn_major ? rows / 8 : 2;  // chunks of 8 elements along the major direction
  size_t outer = mn_major ? 16 : rows;
  for (size_t row = 0; row < outer; ++row)
    for (size_t chunk = 0; chunk < inner; ++chunk) {
      size_t address = start + row / 8 * stride + row % 8 * 128;
      address += mn_major ? chunk / 8 * leading + chunk % 8 * 16 : chunk * 16;
      address ^= (address >> 7 & 7) << 4;
      if (address < SHARED_START || address - SHARED_START + 16 > current->shared_bytes)
        fail("wgmma: operand %c reads shared byte %lld, but the block has %zu bytes", name,
             static_cast<long long>(address) - static_cast<long long>(SHARED_START), current->shared_bytes);
      product.chunks[operand].push_back(static_cast<uint32_t>(address - SHARED_START));
    }
}

// As floats, [k][mn].
inline void load_operand(const Product& product, int operand, size_t rows, std::vector<float>& values) {
  bool mn_major = product.mn_major[operand];
  values.resize(16 * rows);
  size_t inner = mn_major ? rows / 8 : 2;
  for (size_t i = 0; i < product.chunks[operand].size(); ++i) {
    uint16_t chunk[8];
    memcpy(chunk, current->shared + product.chunks[operand][i], 16);
    size_t outer = i / inner, first = i % inner * 8;
    for (size_t j = 0; j < 8; ++j)
      values[mn_major ? outer * rows + first + j : (first + j) * rows + outer] = low(chunk[j]);
  }
}

inline void read_operands(Product& product) {
  if (!product.sums.empty()) return;
  size_t columns = static_cast<size_t>(product.columns);
  thread_local std::vector<float> a, b;
  load_operand(product, 0, 64, a);
  load_operand(product, 1, columns, b);
  product.sums.assign(64 * columns, 0.f);
  for (size_t i = 0; i < 64; ++i)
    for (size_t j = 0; j < columns; j += 16) {  // 16 is a divisor of every number of columns
      Vector sum[4] = {};
      for (size_t k = 0; k < 16; ++k)
        for (size_t v = 0; v < 4; ++v) {
          Vector right;
          memcpy(&right, &b[k * columns + j + 4 * v], sizeof right);
          sum[v] += a[k * 64 + i] * right;
        }
      memcpy(&product.sums[i * columns + j], sum, sizeof sum);
    }
}

// ---- accumulators ----

// Of register i of a thread: its place in [64, columns].
inline size_t accumulator_place(int thread, int i, int columns) {
  int row = 16 * (thread / 32) + thread % 32 / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + thread % 4 * 2 + i % 2;
  return static_cast<size_t>(row * columns + column);
}

inline Accumulators& take_accumulators(Warpgroup& group, Product& product, void** payloads,
                                       float* (*registers)(void*)) {
  float* first = registers(payloads[0]);
  product.target = 0;
  while (product.target < group.accumulators.size() && group.accumulators[product.target].lanes[0] != first)
    ++product.target;
  if (product.target == group.accumulators.size()) group.accumulators.emplace_back();
  Accumulators& mine = group.accumulators[product.target];
  if (mine.in_flight) {
    if (mine.columns != product.columns) fail("wgmma on accumulators that a wgmma of another shape still writes");
    return mine;
  }
  if (mine.settled >= group.fence)
    fail("wgmma with no wgmma.fence since its accumulators came back from the last wait");
  mine.columns = product.columns;
  mine.values.resize(static_cast<size_t>(64 * product.columns));
  for (int thread = 0; thread < 128; ++thread) {
    mine.lanes[thread] = registers(payloads[thread]);
    for (int i = 0; i < product.columns / 2; ++i) {
      mine.values[accumulator_place(thread, i, product.columns)] = mine.lanes[thread][i];
      memcpy(&mine.lanes[thread][i], &IN_FLIGHT, 4);
    }
  }
  return mine;
}

inline void settle(Warpgroup& group, Accumulators& mine) {
  mine.settled = group.fence;
  for (int thread = 0; thread < 128; ++thread)
    for (int i = 0; i < mine.columns / 2; ++i) {
      if (memcmp(&mine.lanes[thread][i], &IN_FLIGHT, 4) != 0)
        fail("accumulator %d of thread %d of the warpgroup was written while a wgmma was under way", i, thread);
      mine.lanes[thread][i] = mine.values[accumulator_place(thread, i, mine.columns)];
    }
}

inline void complete(Warpgroup& group, Product& product) {
  read_operands(product);
  for (const std::vector<uint32_t>& chunks : product.chunks)
    for (uint32_t chunk : chunks) matrix_read_ends(chunk, 16);
  Accumulators& mine = group.accumulators[product.target];
  for (size_t i = 0; i < mine.values.size(); ++i) mine.values[i] += product.sums[i];
  if (--mine.in_flight == 0) settle(group, mine);
}

struct WgmmaCall {
  float* d;
  uint64_t descriptors[2];
};

inline void issue(void** payloads, int columns, bool a_mn, bool b_mn) {
  Warpgroup& group = warpgroup();
  const WgmmaCall& call = *static_cast<WgmmaCall*>(payloads[0]);
  for (int thread = 1; thread < 128; ++thread)
    if (memcmp(call.descriptors, static_cast<WgmmaCall*>(payloads[thread])->descriptors, sizeof call.descriptors) != 0)
      fail("wgmma: descriptors of threads 0 and %d of the warpgroup differ", thread);
  ++current->counts.wgmma;
  Product& product = group.open.emplace_back();
  product.columns = columns;
  product.mn_major[0] = a_mn;
  product.mn_major[1] = b_mn;
  if (!group.fence) fail("wgmma with no wgmma.fence before it");
  Accumulators& mine =
      take_accumulators(group, product, payloads, [](void* payload) { return static_cast<WgmmaCall*>(payload)->d; });
  ++mine.in_flight;
  for (int operand = 0; operand < 2; ++operand) {
    find_chunks(product, operand, call.descriptors[operand]);
    for (uint32_t chunk : product.chunks[operand]) matrix_read_begins(chunk, 16);
  }
  if (current->random() & 1) read_operands(product);
}

inline void finish_matrix_pipes(Block& block) {
  for (size_t i = 0; i < block.matrix_pipes.size(); ++i) {
    const std::shared_ptr<Warpgroup>& group = block.matrix_pipes[i];
    if (!group) continue;
    if (!group->open.empty()) report("warpgroup %zu ends with a wgmma never committed", i);
    if (!group->groups.empty()) report("warpgroup %zu ends with a wgmma never waited for", i);
  }
}

}  // namespace smelt::emulator

namespace smelt {

inline uint32_t shared_address(const void* shared, emulator::Where where = emulator::here()) {
  emulator::begin("an address", where);
  return static_cast<uint32_t>(emulator::SHARED_START + emulator::shared_offset(shared, 0, 1));
}

inline void fence_async(emulator::Where where = emulator::here()) {
  emulator::Block& block = *emulator::current;
  emulator::CudaThread& thread = emulator::begin("fence.proxy.async", where);
  if (thread.fence_interval != block.interval) thread.earlier_fence = thread.fence;
  thread.fence_interval = block.interval;
  thread.fence = ++block.write_number;
}

inline void wgmma_fence(emulator::Where where = emulator::here()) {
  emulator::begin("wgmma.fence", where);
  emulator::meet_warpgroup(nullptr, [](void**) { ++emulator::warpgroup().fence; });
}

inline void wgmma_commit(emulator::Where where = emulator::here()) {
  emulator::begin("wgmma.commit_group", where);
  emulator::meet_warpgroup(nullptr, [](void**) {
    emulator::Warpgroup& group = emulator::warpgroup();
    group.groups.push_back(std::move(group.open));
    group.open.clear();
  });
}

template <int N>
inline void wgmma_wait(emulator::Where where = emulator::here()) {
  static_assert(N >= 0 && N <= 7, "the hardware counts to 7");
  emulator::begin("wgmma.wait_group", where);
  emulator::meet_warpgroup(nullptr, [](void**) {
    emulator::Warpgroup& group = emulator::warpgroup();
    for (; group.groups.size() > static_cast<size_t>(N); group.groups.pop_front())
      for (emulator::Product& product : group.groups.front()) emulator::complete(group, product);
  });
}

template <int COLUMNS, bool A_MN, bool B_MN>
inline void wgmma(float (&d)[COLUMNS / 2], uint64_t a, uint64_t b, emulator::Where where = emulator::here()) {
  static_assert(COLUMNS == 64 || COLUMNS == 96 || COLUMNS == 128 || COLUMNS == 176 || COLUMNS == 192 || COLUMNS == 256,
                "hopper_instructions.h has these");
  emulator::begin("wgmma", where);
  emulator::WgmmaCall call{d, {a, b}};
  emulator::meet_warpgroup(&call, [](void** payloads) { emulator::issue(payloads, COLUMNS, A_MN, B_MN); });
}

template <int COUNT>
inline void hold(float (&)[COUNT]) {}

}  // namespace smelt
