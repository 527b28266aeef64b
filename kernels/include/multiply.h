// How does a block multiply one tile? bf16 from shared memory by mma.sync m16n8k16, fed by a ring of cp.async stages.
//
//     c[row, column] = sum over k of left[row, k] right[k, column]        one tile, float32
//
// k advances by K_STEP = 32 a stage: 1056 = 33 x 32, so the hidden width that 64 does not divide has no tail. An
// operand is either AlongK, its rows contiguous along k (tokens, and weights [out, in]), or AcrossK, its rows one for
// each k (weights [in, out], and both sides of a weight gradient, whose k counts slots); ldmatrix turns the second
// kind. What lies outside, along k or across, is read as zero and never loaded: 0 times a NaN next door would be NaN.
//
// Rows are chunks of 16 bytes. ldmatrix reads one chunk of 8 rows at a time; `swizzled` puts those 8 into 8 different
// groups of banks, whatever the rows are: 4, 8, 12 or 16 chunks.
#pragma once
#include "device.h"
#include "stages.h"

namespace smelt {

constexpr int K_STEP = 32, STAGES = 4;  // at most 96 KiB: sm_86 and sm_89 give a block 99

// ROWS x COLUMNS a block, M x N tiles of 16 x 8 a warp. A warp of 64 x 64 loads the fewest fragments for each mma.
template <int ROWS_, int COLUMNS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int WARPS_N = COLUMNS == 256 ? 4 : 2, WARPS_M = COLUMNS == 256 ? ROWS / 64 : 2;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WARP_ROWS = ROWS / WARPS_M, WARP_COLUMNS = COLUMNS / WARPS_N;
  static constexpr int M = WARP_ROWS / 16, N = WARP_COLUMNS / 8;
  static constexpr int LEFT_BYTES = ROWS * K_STEP * 2, RIGHT_BYTES = COLUMNS * K_STEP * 2;
  static constexpr int SHARED_BYTES = STAGES * (LEFT_BYTES + RIGHT_BYTES);
  static constexpr int BLOCKS = THREADS == 256 ? 1 : 2;  // of an SM: up to 255 registers a thread
};

// Where this thread's warp begins in the tile, and its lane.
template <class T>
struct Warp {
  int lane, row, column, number_n;
  SMELT_DEVICE Warp() {
    const int warp = threadIdx.x / 32;
    lane = threadIdx.x % 32;
    number_n = warp % T::WARPS_N;
    row = warp / T::WARPS_N * T::WARP_ROWS;
    column = number_n * T::WARP_COLUMNS;
  }
};

// Byte offset of a chunk of a row in shared memory.
template <int CHUNKS>
SMELT_DEVICE int swizzled(int row, int chunk) {
  static_assert(CHUNKS % 4 == 0, "rows in multiples of 64 bytes");
  // rows of an odd number of 64 bytes change sides by themselves
  const int turn = CHUNKS % 8 == 0 ? row & 7 : row >> 1 & 3;
  return (row * CHUNKS + (chunk ^ turn)) * 16;
}

// [EXTENT][K_STEP]. `row_of(r)` is where row r of the tile begins, or null.
template <int EXTENT, int THREADS>
struct AlongK {
  static constexpr int CHUNKS = K_STEP / 8, EACH = EXTENT * CHUNKS / THREADS;
  static_assert(EXTENT * CHUNKS % THREADS == 0 && THREADS % CHUNKS == 0, "every thread copies as many chunks");
  const bf16* row[EACH];
  const bf16* somewhere;  // for a copy of no bytes
  unsigned k, depth;      // k + K_STEP may reach 2^31

  template <class RowOf>
  SMELT_DEVICE AlongK(const bf16* tensor, int depth_, RowOf row_of)
      : somewhere(tensor), k(threadIdx.x % CHUNKS * 8), depth(depth_) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) row[i] = row_of((threadIdx.x + i * THREADS) / CHUNKS);
  }

  // Starts the copies of the next K_STEP.
  SMELT_DEVICE void copy(unsigned char* stage) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int x = threadIdx.x + i * THREADS;
      const bool inside = row[i] && k < depth;
      copy_async16(stage + swizzled<CHUNKS>(x / CHUNKS, x % CHUNKS), inside ? row[i] + k : somewhere, inside ? 16 : 0);
    }
    k += K_STEP;
  }

  // 16 rows x 16 k, the left operand of an mma.
  static SMELT_DEVICE void left(uint32_t (&fragment)[4], const unsigned char* stage, int row, int k_part, int lane) {
    load_matrix4(fragment, stage + swizzled<CHUNKS>(row + lane % 16, k_part * 2 + lane / 16));
  }

  // 16 columns x 16 k, the right operands of two mma.
  static SMELT_DEVICE void right(uint32_t (&fragment)[4], const unsigned char* stage, int row, int k_part, int lane) {
    load_matrix4(fragment, stage + swizzled<CHUNKS>(row + lane % 8 + lane / 16 * 8, k_part * 2 + lane / 8 % 2));
  }
};

// [K_STEP][EXTENT], columns first <= column < width of each row. `row_of(k)` is where row k begins, or null. It is
// asked one stage ahead, so that a copy does not wait for the index of a gathered row.
template <int EXTENT, int THREADS, class RowOf>
struct AcrossK {
  static constexpr int CHUNKS = EXTENT / 8, EACH = K_STEP * CHUNKS / THREADS;
  static_assert(K_STEP * CHUNKS % THREADS == 0, "every thread copies as many chunks");
  RowOf row_of;
  const bf16* next[EACH];
  const bf16* somewhere;
  int64_t first;
  int width;
  unsigned k = 0;

  SMELT_DEVICE AcrossK(const bf16* tensor, int64_t first_, int width_, RowOf row_of_)
      : row_of(row_of_), somewhere(tensor), first(first_), width(width_) {
    ask();
  }

  SMELT_DEVICE void ask() {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) next[i] = row_of(k + (threadIdx.x + i * THREADS) / CHUNKS);
    k += K_STEP;
  }

  SMELT_DEVICE void copy(unsigned char* stage) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int x = threadIdx.x + i * THREADS;
      const int64_t column = first + x % CHUNKS * 8;
      const bool inside = next[i] && column < width;
      copy_async16(stage + swizzled<CHUNKS>(x / CHUNKS, x % CHUNKS), inside ? next[i] + column : somewhere,
                   inside ? 16 : 0);
    }
    ask();
  }

  static SMELT_DEVICE void left(uint32_t (&fragment)[4], const unsigned char* stage, int column, int k_part, int lane) {
    load_matrix4_transposed(
        fragment, stage + swizzled<CHUNKS>(k_part * 16 + lane % 8 + lane / 16 * 8, column / 8 + lane / 8 % 2));
  }

  static SMELT_DEVICE void right(uint32_t (&fragment)[4], const unsigned char* stage, int column, int k_part,
                                 int lane) {
    load_matrix4_transposed(fragment, stage + swizzled<CHUNKS>(k_part * 16 + lane % 16, column / 8 + lane / 16));
  }
};

SMELT_DEVICE int64_t k_steps(int64_t depth) { return (depth + K_STEP - 1) / K_STEP; }

template <class T>
using Sums = float[T::M][T::N][4];

// c = left right over `steps` stages; zero for none.
template <class T, class Left, class Right>
SMELT_DEVICE void multiply(Left& left, Right& right, int64_t steps, Sums<T>& c) {
  SMELT_SHARED(shared);
  unsigned char* const left_ring = shared;
  unsigned char* const right_ring = shared + STAGES * T::LEFT_BYTES;
  const Warp<T> warp;
  SMELT_UNROLL
  for (int i = 0; i < T::M; ++i)
    SMELT_UNROLL
    for (int j = 0; j < T::N; ++j)
      SMELT_UNROLL
      for (int q = 0; q < 4; ++q) c[i][j][q] = 0;

  SMELT_UNROLL
  for (int stage = 0; stage < STAGES - 1; ++stage) {
    if (stage < steps) {
      left.copy(left_ring + stage * T::LEFT_BYTES);
      right.copy(right_ring + stage * T::RIGHT_BYTES);
    }
    commit_copies();  // a group for every step, empty past the last: the count of the wait stays
  }
  int stage = 0;
  for (int64_t step = 0; step < steps; ++step) {
    wait_copies<STAGES - 2>();
    barrier();  // all copies of this stage are seen by all, and nobody reads the stage that is filled next any more
    if (step + STAGES - 1 < steps) {
      const int refill = (stage + STAGES - 1) % STAGES;
      left.copy(left_ring + refill * T::LEFT_BYTES);
      right.copy(right_ring + refill * T::RIGHT_BYTES);
    }
    commit_copies();
    const unsigned char* const left_stage = left_ring + stage * T::LEFT_BYTES;
    const unsigned char* const right_stage = right_ring + stage * T::RIGHT_BYTES;
    SMELT_UNROLL
    for (int k_part = 0; k_part < K_STEP / 16; ++k_part) {
      uint32_t a[T::M][4], b[T::N / 2][4];
      SMELT_UNROLL
      for (int i = 0; i < T::M; ++i) Left::left(a[i], left_stage, warp.row + i * 16, k_part, warp.lane);
      SMELT_UNROLL
      for (int j = 0; j < T::N / 2; ++j) Right::right(b[j], right_stage, warp.column + j * 16, k_part, warp.lane);
      SMELT_UNROLL
      for (int i = 0; i < T::M; ++i)
        SMELT_UNROLL
        for (int j = 0; j < T::N; ++j) mma(c[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
    stage = (stage + 1) % STAGES;
  }
}

}  // namespace smelt
