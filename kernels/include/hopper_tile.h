// How does a block of the Hopper tier (wgmma, sm_90a) compute its tile of a product?
//
//     sum[row, column] = sum over k of left[row, k] right[k, column]        one tile, float32, K_STEP = 64 a stage
//
// A warpgroup of 128 threads has 64 rows. An operand lies in shared memory as rows of 128 bytes, 16-byte chunk c of
// row r at 128 r + 16 (c ^ r % 8): the 128-byte swizzle of the descriptors (PTX ISA, wgmma, "Shared Memory Matrix
// Layout").
//
//     AlongK    k contiguous in memory ("K-major"): a row for each row of the tile, 64 values of k
//     AcrossK   rows (or columns) of the tile contiguous ("MN-major"): a row for each k, 64 columns; more columns are in
//               further blocks of 64 rows. Only whole blocks are canonical, so 96 and 176 columns do not exist here.
//
// Either way 64 rows of the tile take BLOCK_BYTES, and the left operand of warpgroup g starts at g BLOCK_BYTES.
//
// All copies are cp.async. TMA cannot gather rows on Hopper, and what does not exist becomes zero without being read: 0
// times a NaN next door would be NaN.
//
// In step t a thread waits for its copies of stage t, makes them visible to the tensor cores (fence_async: they read
// through another proxy), meets the others at the barrier, starts the product of stage t and copies stage t + STAGES -
// 2 to where stage t - 2 was. Every warpgroup has waited for product t - 2 before that barrier; product t - 1 may
// still be running in another warpgroup, so STAGES - 1 ahead would be one too far.
#pragma once
#include "grid.h"
#include "hopper.h"
#include "tile.h"

namespace smelt::hopper {

constexpr int TIER = 90;
constexpr int K_STEP = 64, K_INSTRUCTION = 16;  // 128 bytes a row; values of k of one wgmma
constexpr int ROW_BYTES = 128, BLOCK_BYTES = 64 * ROW_BYTES;
// Of compute capability 9.0 (CUDA C++ Programming Guide, technical specifications): shared memory of an SM, what of it
// is taken for every block, registers of an SM.
constexpr int SM_SHARED_BYTES = 228 * 1024, BLOCK_RESERVED_BYTES = 1024, SM_REGISTERS = 64 * 1024;

// ROWS x COLUMNS a block. Two blocks share an SM, one storing while the other multiplies, where that leaves three
// stages and as many registers as a thread needs: its sums, COLUMNS / 2, and some 60 more.
template <int ROWS_, int COLUMNS_>
struct Tile {
  static constexpr int ROWS = ROWS_, COLUMNS = COLUMNS_;
  static constexpr int THREADS = ROWS / 64 * 128;
  static constexpr int LEFT_BYTES = ROWS * ROW_BYTES, STAGE_BYTES = LEFT_BYTES + COLUMNS * ROW_BYTES;
  static constexpr int STAGES_OF_TWO = (SM_SHARED_BYTES / 2 - BLOCK_RESERVED_BYTES) / STAGE_BYTES;
  static constexpr int BLOCKS = STAGES_OF_TWO >= 3 && 2 * THREADS * (COLUMNS / 2 + 60) <= SM_REGISTERS ? 2 : 1;
  static constexpr int STAGES = (SM_SHARED_BYTES / BLOCKS - BLOCK_RESERVED_BYTES) / STAGE_BYTES;
  static_assert(STAGES >= 3, "one is read, one may still be read, one is filled");
  static constexpr size_t SHARED_BYTES = STAGES * STAGE_BYTES;
};

// EXTENT rows of the left operand or columns of the right one. `row_of(n)` is where number n of the tensor begins, or
// null.
template <int EXTENT, int THREADS, class RowOf>
struct AlongK {
  static constexpr bool ACROSS = false;
  static constexpr int INSTRUCTION_BYTES = K_INSTRUCTION * 2;  // from one wgmma to the next
  static constexpr int ROWS_AT_ONCE = THREADS / 8, EACH = (EXTENT + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  RowOf row_of;
  const bf16* row[EACH];
  const bf16* somewhere;  // of a copy of no bytes
  unsigned k, depth;      // k + K_STEP may be 2^31

  SMELT_DEVICE AlongK(const bf16* tensor, int depth_, int64_t first, RowOf row_of_)
      : row_of(row_of_), somewhere(tensor), depth(depth_) {
    start(first);
  }

  // Go to k = 0 of EXTENT numbers from `first` on.
  SMELT_DEVICE void start(int64_t first) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int r = threadIdx.x / 8 + i * ROWS_AT_ONCE;
      row[i] = r < EXTENT ? row_of(first + r) : nullptr;
    }
    rewind();
  }

  SMELT_DEVICE void rewind() { k = threadIdx.x % 8 * 8; }

  // Start the copies of the next K_STEP.
  SMELT_DEVICE void copy(unsigned char* stage) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int r = threadIdx.x / 8 + i * ROWS_AT_ONCE;
      if (r >= EXTENT) break;
      const bool inside = row[i] && k < depth;
      copy_async16(stage + r * ROW_BYTES + (threadIdx.x % 8 ^ r % 8) * 16, inside ? row[i] + k : somewhere,
                   inside ? 16 : 0);
    }
    k += K_STEP;
  }
};

// EXTENT rows of the left operand or columns of the right one, from `first` on and below `width`. `row_of(k)` is where
// row k of the tensor begins, or null. It is asked one stage ahead: no copy waits for the index of a gathered row.
template <int EXTENT, int THREADS, class RowOf>
struct AcrossK {
  static_assert(EXTENT % 64 == 0, "whole blocks");
  static constexpr bool ACROSS = true;
  static constexpr int INSTRUCTION_BYTES = K_INSTRUCTION * ROW_BYTES;
  static constexpr int ROWS_AT_ONCE = THREADS / 8, EACH = K_STEP / ROWS_AT_ONCE;
  RowOf row_of;
  const bf16* next[EACH];
  const bf16* somewhere;
  int64_t first;
  unsigned k;
  int width;

  SMELT_DEVICE AcrossK(const bf16* tensor, int width_, int64_t first, RowOf row_of_)
      : row_of(row_of_), somewhere(tensor), width(width_) {
    start(first);
  }

  SMELT_DEVICE void start(int64_t first_) {
    first = first_;
    rewind();
  }

  SMELT_DEVICE void rewind() {
    k = 0;
    ask();
  }

  SMELT_DEVICE void ask() {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) next[i] = row_of(k + threadIdx.x / 8 + i * ROWS_AT_ONCE);
    k += K_STEP;
  }

  SMELT_DEVICE void copy(unsigned char* stage) {
    SMELT_UNROLL
    for (int i = 0; i < EACH; ++i) {
      const int r = threadIdx.x / 8 + i * ROWS_AT_ONCE;
      SMELT_UNROLL
      for (int block = 0; block < EXTENT / 64; ++block) {
        const int64_t column = first + block * 64 + threadIdx.x % 8 * 8;
        const bool inside = next[i] && column < width;
        copy_async16(stage + block * BLOCK_BYTES + r * ROW_BYTES + (threadIdx.x % 8 ^ r % 8) * 16,
                     inside ? next[i] + column : somewhere, inside ? 16 : 0);
      }
    }
    ask();
  }
};

// A block does nothing while its first copies are on their way, and again while it stores. So a product of few steps
// is followed by that of the next tile of columns, whose copies run meanwhile, until a block has as many steps as
// this. The number is a guess: no GPU has run it yet.
constexpr int64_t BLOCK_STEPS = 32;

// How many blocks share the tiles of columns of a tile of rows.
inline int64_t column_blocks(int64_t column_tiles, int64_t steps) {
  return tiles(column_tiles, steps < BLOCK_STEPS ? BLOCK_STEPS / (steps > 0 ? steps : 1) : 1);
}

SMELT_DEVICE int steps_of(int64_t depth) { return static_cast<int>((depth + K_STEP - 1) / K_STEP); }

template <class T>
using Sums = float[T::COLUMNS / 2];

#if SMELT_HOPPER
// The products of a block: left times a tile of columns of right, `steps` stages; with MANY then the tile gridDim.y
// further on, and so forth below `width`. The copies run ahead across the end of a tile: those of the next one arrive
// while the sums of this one are stored.
template <class T, bool MANY, class Left, class Right>
struct Products {
  Left& left;
  Right& right;
  const int steps;
  const int64_t width;
  int64_t column;  // of the next copies
  int step = 0, stage = 0, refill = 0;

  SMELT_DEVICE Products(Left& left_, Right& right_, int steps_, int64_t first, int64_t width_)
      : left(left_), right(right_), steps(steps_), width(width_), column(steps_ ? first : width_) {
    for (int i = 0; i < T::STAGES - 2; ++i) copy();
  }

  static SMELT_DEVICE int after(int stage) { return stage + 1 == T::STAGES ? 0 : stage + 1; }

  SMELT_DEVICE void copy() {
    SMELT_SHARED(shared);
    if (MANY ? column < width : step < steps) {
      left.copy(shared + refill * T::STAGE_BYTES);
      right.copy(shared + refill * T::STAGE_BYTES + T::LEFT_BYTES);
      if (++step == steps && MANY) {
        step = 0;
        column += static_cast<int64_t>(gridDim.y) * T::COLUMNS;
        left.rewind();
        right.start(column);
      }
    }
    commit_copies();  // a group for every step, empty past the last: the count of the wait stays
    refill = after(refill);
  }

  // sum = left times the next tile of columns, zero where there are no steps.
  SMELT_DEVICE void next(Sums<T>& sum) {
    SMELT_SHARED(shared);
    SMELT_UNROLL
    for (int i = 0; i < T::COLUMNS / 2; ++i) sum[i] = 0;
    if (steps == 0) return;  // here: zeros defined beside the last wait are to ptxas an access during the product
    for (int i = 0; i < steps; ++i) {
      wait_copies<T::STAGES - 3>();
      fence_async();
      barrier();
      const unsigned char* const left_stage = shared + stage * T::STAGE_BYTES + threadIdx.x / 128 * BLOCK_BYTES;
      const unsigned char* const right_stage = shared + stage * T::STAGE_BYTES + T::LEFT_BYTES;
      wgmma_fence();
      SMELT_UNROLL
      for (int part = 0; part < K_STEP / K_INSTRUCTION; ++part)
        wgmma<T::COLUMNS, Left::ACROSS, Right::ACROSS>(
            sum, descriptor(left_stage + part * Left::INSTRUCTION_BYTES, Left::ACROSS, BLOCK_BYTES),
            descriptor(right_stage + part * Right::INSTRUCTION_BYTES, Right::ACROSS, BLOCK_BYTES));
      wgmma_commit();
      copy();
      wgmma_wait<1>();
      stage = after(stage);
    }
    wgmma_wait<0>();
    hold(sum);
  }
};
#endif

// A thread's sums come in fragments of 8 columns: 4 j + 2 half + i is column 8 j + 2 (lane % 4) + i of row_of(half).
SMELT_DEVICE int row_of(int half) { return threadIdx.x / 32 * 16 + half * 8 + threadIdx.x % 32 / 4; }

// Of two lanes whose numbers differ in `bit`, the lower takes both `first`, the other both `second`, in their order.
template <class Word>
SMELT_DEVICE void swap(Word& first, Word& second, int bit) {
  const bool upper = threadIdx.x & bit;
  const Word got = shuffle_xor(upper ? first : second, bit);
  first = upper ? got : first;
  second = upper ? second : got;
}

// Four lanes share a row of a fragment, two columns each: too few for a wide access. Of four fragments, word i becomes
// what lane i of the four had of fragment `lane % 4`, so that a lane has all 8 columns of one.
template <class Word>
SMELT_DEVICE void gather_fragment(Word (&word)[4]) {
  swap(word[0], word[1], 1);
  swap(word[2], word[3], 1);
  swap(word[0], word[2], 2);
  swap(word[1], word[3], 2);
}

SMELT_DEVICE uint4 vector(const uint32_t (&word)[4]) { return {word[0], word[1], word[2], word[3]}; }

// Rows first_row <= row < last_row of out [, width] from column first_column on, rounded to bf16.
template <class T>
SMELT_DEVICE void store_bf16(const Sums<T>& sum, bf16* out, int64_t first_row, int64_t last_row, int64_t first_column,
                             int64_t width) {
  SMELT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + row_of(half);
    SMELT_UNROLL
    for (int j = 0; j < T::COLUMNS / 8; j += 4) {
      uint32_t word[4];
      SMELT_UNROLL
      for (int i = 0; i < 4; ++i)  // of 176 columns the last four fragments are two
        word[i] = j + i < T::COLUMNS / 8 ? pack(sum[(j + i) * 4 + half * 2], sum[(j + i) * 4 + half * 2 + 1]) : 0;
      gather_fragment(word);
      const int fragment = j + threadIdx.x % 4;
      const int64_t column = first_column + fragment * 8;
      if (row < last_row && fragment < T::COLUMNS / 8 && column < width)
        store16(out + row * width + column, vector(word));
    }
  }
}

}  // namespace smelt::hopper
