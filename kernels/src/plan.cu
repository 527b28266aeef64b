// In which slot does each choice stand, once choices are sorted by expert?
//
//     offs [E + 1]   where each expert's slots begin              choice [S]    n K + k of a slot, -1 where spare
//     tile0 [E + 1]  where its tiles of tile_rows slots begin     slot [N K]    of a choice, -1 where not routed
//
// A stable counting sort without atomics, S = N K. A block owns a chunk of choices and takes THREADS of them at a time:
// a choice's rank among those with its id is the number of equal ids before it in shared memory, and the last of them
// moves the chunk's count on.
//
//     count     of each expert and chunk                          counts [E, chunks]
//     scan      choices of the expert in earlier chunks           counts, totals [E]
//     offsets   choices of earlier experts                        offs, tile0
//     place     offs + earlier chunks + earlier in the chunk      choice, slot
//
// Ids are compared as 64 bits: one that is negative, or 2^32 + 3, names no expert.
#include "device.h"
#include "grid.h"

namespace smelt {

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int MOST_CHUNKS = 512;  // four blocks of an H200's 132 processors; a warp scans them in 16 steps

struct PlanArguments {
  const int64_t* idx;
  int64_t S, chunk;  // choices of a chunk
  int E, chunks, tile_rows;
  int *offs, *tile0, *choice, *slot, *counts, *totals;
};

// The expert of a choice, -1 for none.
SMELT_DEVICE int expert_of(const PlanArguments& a, int64_t choice, int64_t end) {
  const int64_t id = choice < end ? a.idx[choice] : -1;
  return id >= 0 && id < a.E ? static_cast<int>(id) : -1;
}

struct Rank {
  int earlier;  // choices of the same expert among the THREADS at hand
  bool last;
};

// All threads of a block call it; a barrier must follow before the next call.
SMELT_DEVICE Rank rank(int* ids, int expert) {
  const int me = threadIdx.x;
  store_shared(ids + me, expert);
  barrier();
  int earlier = 0, later = 0;
  for (int other = 0; other < THREADS; ++other) {
    const bool same = load_shared(ids + other) == expert;
    earlier += same && other < me;
    later += same && other > me;
  }
  return {earlier, expert >= 0 && later == 0};
}

SMELT_KERNEL(THREADS, 8)
void count_kernel(PlanArguments a) {
  SMELT_SHARED(shared);
  int* const count = a.counts + blockIdx.x;  // of expert e: count[e * chunks], this block's alone
  for (int64_t e = threadIdx.x; e < a.E; e += THREADS) count[e * a.chunks] = 0;
  const int64_t begin = blockIdx.x * a.chunk, end = begin + a.chunk < a.S ? begin + a.chunk : a.S;
  for (int64_t first = begin; first < end; first += THREADS) {
    const int expert = expert_of(a, first + threadIdx.x, end);
    const Rank r = rank(reinterpret_cast<int*>(shared), expert);
    if (r.last) count[static_cast<int64_t>(expert) * a.chunks] += r.earlier + 1;
    barrier();
  }
}

// The sum of this and the lower lanes' values.
SMELT_DEVICE int sum_up_to(int value, int lane) {
  SMELT_UNROLL
  for (int delta = 1; delta < 32; delta *= 2) {
    const int below = shuffle_up(value, delta);
    if (lane >= delta) value += below;
  }
  return value;
}

// A warp takes an expert.
SMELT_KERNEL(THREADS, 8)
void scan_kernel(PlanArguments a) {
  const int lane = threadIdx.x % 32;
  const int64_t expert = static_cast<int64_t>(blockIdx.x) * WARPS + threadIdx.x / 32;
  if (expert >= a.E) return;
  int* const counts = a.counts + expert * a.chunks;
  int carry = 0;  // of lane 0
  for (int first = 0; first < a.chunks; first += 32) {
    const int count = first + lane < a.chunks ? counts[first + lane] : 0;
    const int through = sum_up_to(lane == 0 ? count + carry : count, lane);
    if (first + lane < a.chunks) counts[first + lane] = through - count;
    carry = static_cast<int>(shuffle_xor(static_cast<uint32_t>(through), 31));
  }
  if (lane == 0) a.totals[expert] = carry;
}

// One block.
SMELT_KERNEL(THREADS, 1)
void offsets_kernel(PlanArguments a) {
  SMELT_SHARED(shared);
  int* const sums = reinterpret_cast<int*>(shared);  // [2, WARPS], 16 bytes a row
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int slots_before = 0, tiles_before = 0;
  for (int64_t first = 0; first < a.E; first += THREADS) {
    const int64_t e = first + threadIdx.x;
    const int slots = e < a.E ? a.totals[e] : 0, row_tiles = (slots + a.tile_rows - 1) / a.tile_rows;
    int slots_through = sum_up_to(slots, lane), tiles_through = sum_up_to(row_tiles, lane);
    if (lane == 31) {
      store_shared(sums + warp, slots_through);
      store_shared(sums + WARPS + warp, tiles_through);
    }
    barrier();
    slots_through += slots_before;
    tiles_through += tiles_before;
    for (int w = 0; w < WARPS; ++w) {
      const int warp_slots = load_shared(sums + w), warp_tiles = load_shared(sums + WARPS + w);
      slots_before += warp_slots;
      tiles_before += warp_tiles;
      if (w < warp) {
        slots_through += warp_slots;
        tiles_through += warp_tiles;
      }
    }
    if (e < a.E) {
      store4(a.offs + e, slots_through - slots);
      store4(a.tile0 + e, tiles_through - row_tiles);
    }
    barrier();
  }
  if (threadIdx.x == 0) {
    store4(a.offs + a.E, slots_before);
    store4(a.tile0 + a.E, tiles_before);
  }
}

SMELT_KERNEL(THREADS, 8)
void place_kernel(PlanArguments a) {
  SMELT_SHARED(shared);
  int* const count = a.counts + blockIdx.x;
  const int64_t begin = blockIdx.x * a.chunk, end = begin + a.chunk < a.S ? begin + a.chunk : a.S;
  for (int64_t first = begin; first < end; first += THREADS) {
    const int64_t choice = first + threadIdx.x;
    const int expert = expert_of(a, choice, end);
    const Rank r = rank(reinterpret_cast<int*>(shared), expert);
    int slot = -1;
    if (expert >= 0) {
      slot = a.offs[expert] + count[static_cast<int64_t>(expert) * a.chunks] + r.earlier;
      store4(a.choice + slot, static_cast<uint32_t>(choice));
    }
    if (choice < end) {
      store4(a.slot + choice, slot);
      // there are as many slots as choices: this one is spare
      if (choice >= a.offs[a.E]) store4(a.choice + choice, static_cast<uint32_t>(-1));
    }
    barrier();
    if (r.last) count[static_cast<int64_t>(expert) * a.chunks] += r.earlier + 1;
    barrier();
  }
}

struct Chunks {
  int64_t chunk;
  int chunks;
};

static Chunks chunks_of(int64_t S) {
  const int64_t chunk = tiles(tiles(S, MOST_CHUNKS), THREADS) * THREADS;
  return {chunk, S ? static_cast<int>(tiles(S, chunk)) : 0};
}

}  // namespace smelt

using namespace smelt;

int64_t smelt_plan_workspace(int64_t S, int E) {
  return (static_cast<int64_t>(E) * chunks_of(S).chunks + E) * static_cast<int64_t>(sizeof(int));
}

int smelt_plan(const int64_t* idx, int64_t N, int K, int E, int tile_rows, int32_t* offs, int32_t* tile0,
               int32_t* choice, int32_t* slot, void* workspace, void* stream) {
  if (N < 0 || K < 0 || E < 1 || (K > 0 && N > INT32_MAX / K) || tile_rows < 1) return SMELT_BAD_ARGUMENT;
  const int64_t S = N * K;
  const Chunks c = chunks_of(S);
  int* const counts = static_cast<int*>(workspace);
  int* const totals = counts + static_cast<int64_t>(E) * c.chunks;
  const PlanArguments a{idx, S, c.chunk, E, c.chunks, tile_rows, offs, tile0, choice, slot, counts, totals};
  constexpr int IDS = THREADS * sizeof(int);
  int code = S ? SMELT_LAUNCH(count_kernel, dim3(c.chunks), THREADS, IDS, stream, a) : 0;
  if (!code) code = SMELT_LAUNCH(scan_kernel, dim3(tiles(E, WARPS)), THREADS, 0, stream, a);
  if (!code) code = SMELT_LAUNCH(offsets_kernel, dim3(1), THREADS, 2 * WARPS * sizeof(int), stream, a);
  if (!code && S) code = SMELT_LAUNCH(place_kernel, dim3(c.chunks), THREADS, IDS, stream, a);
  return code;
}
