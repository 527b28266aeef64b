// How do float32 sums leave the registers as rows of bf16?
//
// A lane holds 2 neighbouring columns of rows lane / 4 and lane / 4 + 8 of a block of 16 x 8 sums. Rounded these are 4
// bytes, and the 4 lanes of a row would write 16: half a sector of L2. So they swap what they have of two blocks of
// columns: then a lane holds 4 columns of one of them and the 4 lanes write whole sectors of 32 bytes.
#pragma once
#include "multiply.h"

namespace smelt {

// Four columns of a row in bf16.
struct Quad {
  uint32_t low, high;
};

// `first` and `second` are this lane's columns of two blocks; even lanes get four of the first, odd lanes of the
// second. All lanes of a warp call it.
SMELT_DEVICE Quad swap_blocks(uint32_t first, uint32_t second, int lane) {
  const bool odd = lane & 1;
  const uint32_t mine = odd ? second : first, other = shuffle_xor(odd ? first : second, 1);
  return odd ? Quad{other, mine} : Quad{mine, other};
}

// Where a lane's four begin, counted from the first column of the first of two neighbouring blocks.
SMELT_DEVICE int quad_column(int lane) { return lane % 2 * 8 + lane % 4 / 2 * 4; }

// Rows first <= row < last, columns column0 <= column < columns of `out`, from the sums of the block's tile.
template <class T>
SMELT_DEVICE void store_rows(const Sums<T>& c, bf16* out, int64_t first, int64_t last, int64_t column0,
                             int64_t columns) {
  const Warp<T> warp;
  SMELT_UNROLL
  for (int i = 0; i < T::M; ++i)
    SMELT_UNROLL
    for (int half = 0; half < 2; ++half) {
      const int64_t row = first + warp.row + i * 16 + half * 8 + warp.lane / 4;
      SMELT_UNROLL
      for (int j = 0; j < T::N; j += 2) {
        const float *x = &c[i][j][half * 2], *y = &c[i][j + 1][half * 2];
        const Quad quad = swap_blocks(pack(x[0], x[1]), pack(y[0], y[1]), warp.lane);
        const int64_t column = column0 + warp.column + j * 8 + quad_column(warp.lane);
        if (row < last && column < columns) store8(out + row * columns + column, quad.low, quad.high);
      }
    }
}

}  // namespace smelt
