// How does a launch go? The grid's blocks in an order drawn from the seed, shared out over a few host threads; every
// limit of the GPU is checked first, and what any block finds becomes the launch's code.
#pragma once

#include <stdlib.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>

#include "memory.h"

namespace smelt::emulator {

SMELT_STATE std::atomic<uint64_t> seed{1};
SMELT_STATE std::atomic<int> host_threads{2};

// ---- findings and counts outlive their launch ----

constexpr int FIRST_FINDING = 20000;
constexpr int FINDINGS_KEPT = 64;

struct Ledger {
  std::mutex mutex;
  int findings = 0;
  char texts[FINDINGS_KEPT][1024] = {};
  Counts counts;
};
SMELT_STATE Ledger ledger;

inline int keep_finding(const char* text) {
  std::lock_guard<std::mutex> lock(ledger.mutex);
  int number = ledger.findings++ % FINDINGS_KEPT;
  snprintf(ledger.texts[number], sizeof ledger.texts[number], "%s", text);
  return FIRST_FINDING + number;
}

inline void add_counts(const Counts& more) {
  std::lock_guard<std::mutex> lock(ledger.mutex);
  Counts& all = ledger.counts;
  all.blocks += more.blocks;
  all.mma += more.mma;
  all.matrix_phases += more.matrix_phases;
  all.extra_ways += more.extra_ways;
  all.worst_ways = std::max(all.worst_ways, more.worst_ways);
  all.copied_bytes += more.copied_bytes;
  all.wgmma += more.wgmma;
}

// ---- the limits: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability" ----

inline bool refused(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, char (&text)[1024]) {
  size_t shared_limit = (capability() >= 90 ? 227 : capability() == 80 ? 163 : 99) << 10;
  uint64_t threads = static_cast<uint64_t>(block.x) * block.y * block.z;
  if (!grid.x || !grid.y || !grid.z || grid.x > 0x7fffffffu || grid.y > 65535 || grid.z > 65535)
    snprintf(text, sizeof text, "%.200s: a grid of (%u, %u, %u); at most (2147483647, 65535, 65535), at least 1 each",
             kernel, grid.x, grid.y, grid.z);
  else if (!threads || block.x > 1024 || block.y > 1024 || block.z > 64 || threads > 1024)
    snprintf(text, sizeof text, "%.200s: a block of (%u, %u, %u) threads; at most 1024 together", kernel, block.x,
             block.y, block.z);
  else if (shared_bytes > shared_limit)
    snprintf(text, sizeof text, "%.200s: %zu bytes of shared memory; at most %zu at capability %d", kernel,
             shared_bytes, shared_limit, capability());
  else
    return false;
  return true;
}

// ---- two stores to one place ----

inline bool conflicting_stores(const char* kernel, std::vector<Store>& stores, char (&text)[1024]) {
  std::sort(stores.begin(), stores.end(), [](const Store& a, const Store& b) { return a.address < b.address; });
  for (size_t i = 0; i < stores.size(); ++i) {
    const Store& first = stores[i];
    for (size_t j = i + 1; j < stores.size() && stores[j].address < first.address + static_cast<uintptr_t>(first.bytes);
         ++j) {
      const Store& second = stores[j];
      if (first.block == second.block && (first.thread == second.thread || first.interval != second.interval)) continue;
      snprintf(
          text, sizeof text,
          "%.200s: thread %d of block %lld and thread %d of block %lld (blocks counted along x, then y, then z) store "
          "to one place in global memory%s",
          kernel, first.thread, static_cast<long long>(first.block), second.thread,
          static_cast<long long>(second.block), first.block == second.block ? " with no barrier between" : "");
      return true;
    }
  }
  return false;
}

// ---- the launch ----

struct Grid {
  const char* kernel;
  dim3 grid, block;
  size_t shared_bytes;
  const std::function<void()>* body;
  uint64_t total, step,
      first;  // the i-th block to run is (first + i step) mod total: step and total have no common divisor
  Grid(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>* body);
  std::atomic<uint64_t> taken{0};
  std::atomic<bool> stop{false};
  std::mutex mutex;
  char finding[1024] = "";
  std::vector<Store> stores;
};

inline uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

inline uint64_t multiply_modulo(uint64_t a, uint64_t b, uint64_t modulus) {
  __extension__ typedef unsigned __int128 Wide;
  return static_cast<uint64_t>(static_cast<Wide>(a) * b % modulus);
}

inline uint64_t common_divisor(uint64_t a, uint64_t b) { return b ? common_divisor(b, a % b) : a; }

inline Grid::Grid(const char* kernel, dim3 grid, dim3 block, size_t shared_bytes, const std::function<void()>* body)
    : kernel(kernel),
      grid(grid),
      block(block),
      shared_bytes(shared_bytes),
      body(body),
      total(static_cast<uint64_t>(grid.x) * grid.y * grid.z),
      step(mixed(seed) % total),
      first(mixed(seed + 1) % total) {
  while (common_divisor(step, total) != 1) ++step;
}

inline void run_blocks(Grid& grid) {
  Block block;
  block.kernel = grid.kernel;
  block.grid_size = grid.grid;
  block.block_size = grid.block;
  block.body = grid.body;
  block.capability = capability();
  block.shared_bytes = grid.shared_bytes;
  block.stacks = std::make_unique<Stacks>(static_cast<int>(grid.block.x * grid.block.y * grid.block.z));
  void* shared = nullptr;  // exactly as large as asked for, so that address sanitizer sees the end
  if (grid.shared_bytes && posix_memalign(&shared, 1024, grid.shared_bytes)) __builtin_trap();
  block.shared = static_cast<unsigned char*>(shared);
  while (!grid.stop) {
    uint64_t i = grid.taken++;
    if (i >= grid.total) break;
    uint64_t number = (grid.first + multiply_modulo(i, grid.step, grid.total)) % grid.total;
    block.number = static_cast<int64_t>(number);
    block.index =
        dim3(static_cast<unsigned>(number % grid.grid.x), static_cast<unsigned>(number / grid.grid.x % grid.grid.y),
             static_cast<unsigned>(number / grid.grid.x / grid.grid.y));
    block.random_state = mixed(mixed(seed) + number) | 1;
    run_block(block);
    if (block.finding[0]) {
      std::lock_guard<std::mutex> lock(grid.mutex);
      if (!grid.stop) memcpy(grid.finding, block.finding, sizeof grid.finding);
      grid.stop = true;
    }
  }
  free(shared);
  add_counts(block.counts);
  std::lock_guard<std::mutex> lock(grid.mutex);
  grid.stores.insert(grid.stores.end(), block.stores.begin(), block.stores.end());
}

inline int launch_blocks(const char* kernel, const std::function<void()>& body, dim3 grid_size, dim3 block_size,
                         size_t shared_bytes) {
  char text[1024];
  if (refused(kernel, grid_size, block_size, shared_bytes, text)) return keep_finding(text);
  Grid grid(kernel, grid_size, block_size, shared_bytes, &body);
  int count = static_cast<int>(std::min<uint64_t>(static_cast<uint64_t>(std::max(1, host_threads.load())), grid.total));
  std::vector<std::thread> helpers;
  for (int i = 1; i < count; ++i) helpers.emplace_back(run_blocks, std::ref(grid));
  run_blocks(grid);
  for (std::thread& helper : helpers) helper.join();
  if (grid.finding[0] || conflicting_stores(kernel, grid.stores, grid.finding)) return keep_finding(grid.finding);
  return 0;
}

}  // namespace smelt::emulator

namespace smelt {

inline const char* message(int code) {
  if (code == 0) return "no error";
  int number = code - emulator::FIRST_FINDING;
  return number >= 0 && number < emulator::FINDINGS_KEPT ? emulator::ledger.texts[number] : "unknown code";
}

inline int capability(int* value) {
  *value = emulator::capability();
  return 0;
}

template <class... Parameters, class... Arguments>
int launch(const char* name, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, void*,
           Arguments... arguments) {
  std::function<void()> body = [&] { kernel(static_cast<Parameters>(arguments)...); };
  return emulator::launch_blocks(name, body, grid, block, shared_bytes);
}

}  // namespace smelt

#define SMELT_EXPORTED extern "C" __attribute__((used, visibility("default"))) inline
SMELT_EXPORTED void smelt_emulator_seed(uint64_t seed) { smelt::emulator::seed = seed; }
SMELT_EXPORTED void smelt_emulator_threads(int threads) { smelt::emulator::host_threads = threads; }
// Since the last call: blocks, mma, ldmatrix phases, extra ways of bank conflicts, worst ways, bytes that cp.async read
// from global memory, wgmma. Returns how many were written.
SMELT_EXPORTED int smelt_emulator_counts(int64_t* out, int n) {
  std::lock_guard<std::mutex> lock(smelt::emulator::ledger.mutex);
  smelt::emulator::Counts& counts = smelt::emulator::ledger.counts;
  const int64_t all[] = {counts.blocks,     counts.mma,          counts.matrix_phases, counts.extra_ways,
                         counts.worst_ways, counts.copied_bytes, counts.wgmma};
  int written = std::min(n, static_cast<int>(sizeof all / sizeof *all));
  for (int i = 0; i < written; ++i) out[i] = all[i];
  counts = smelt::emulator::Counts();
  return written;
}
