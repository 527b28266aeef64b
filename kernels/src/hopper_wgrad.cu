// How does the Hopper tier compute the gradient of each expert's weight, dw[e] [rows, columns] = left_e^T right_e?
//
// The k of this product counts the slots of the expert, as many as it has; both operands are contiguous across it. Rows
// are gathered where a *_choice says so: slot s reads row choice[s] / K. An expert without slots has no steps, and gets
// zeros.
#include "hopper_tile.h"

namespace smelt::hopper {

// Where the slots of an expert begin.
struct Slots {
  const bf16* tensor;
  int64_t stride;
  const int* choice;  // or null: slots are rows
  int K;
  int64_t first, count;

  SMELT_DEVICE const bf16* operator()(int64_t k) const {
    const int64_t s = first + k;
    return k < count ? tensor + (choice ? choice[s] / K : s) * stride : nullptr;
  }
};

// fp32 in vectors of four columns: of two fragments a lane takes half a row of one.
template <class T>
SMELT_DEVICE void store_fp32(const Sums<T>& sum, float* out, int64_t first_row, int64_t last_row, int64_t first_column,
                             int64_t width, bool add) {
  SMELT_UNROLL
  for (int half = 0; half < 2; ++half) {
    const int64_t row = first_row + row_of(half);
    SMELT_UNROLL
    for (int j = 0; j < T::COLUMNS / 8; j += 2) {
      const float* const two = sum + j * 4 + half * 2;
      float value[4] = {two[0], two[1], two[4], two[5]};
      swap(value[0], value[2], 1);
      swap(value[1], value[3], 1);
      const int64_t column = first_column + (j + threadIdx.x % 2) * 8 + threadIdx.x % 4 / 2 * 4;
      if (row >= last_row || column >= width) continue;
      float* const place = out + row * width + column;
      if (add) {
        const uint4 there = load16(place);
        value[0] += from_bits(there.x);
        value[1] += from_bits(there.y);
        value[2] += from_bits(there.z);
        value[3] += from_bits(there.w);
      }
      store16(place, uint4{bits(value[0]), bits(value[1]), bits(value[2]), bits(value[3])});
    }
  }
}

template <class T>
SMELT_KERNEL(T::THREADS, T::BLOCKS)
void wgrad_kernel(WgradArguments a) {
#if SMELT_HOPPER
  // renumbered as in grid.h: the tiles of an expert, which share its slots, come one after the other
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t row_tile = block / gridDim.y, row_tiles = (a.rows + T::ROWS - 1) / T::ROWS;
  const int64_t expert = row_tile / row_tiles, row0 = row_tile % row_tiles * T::ROWS;
  const int64_t first = block % gridDim.y * T::COLUMNS;
  const int64_t begin = a.offs[expert], slots = a.offs[expert + 1] - begin;
  if (slots == 0 && a.how == SMELT_FP32_ADD) return;

  const Slots left_rows{a.left, a.ldl, a.left_choice, a.K, begin, slots};
  const Slots right_rows{a.right, a.ldr, a.right_choice, a.K, begin, slots};
  AcrossK<T::ROWS, T::THREADS, Slots> left(a.left, a.rows, row0, left_rows);
  AcrossK<T::COLUMNS, T::THREADS, Slots> right(a.right, a.columns, first, right_rows);
  Products<T, false, decltype(left), decltype(right)> products(left, right, steps_of(slots), first, a.columns);
  Sums<T> sum;
  products.next(sum);
  const int64_t at = expert * a.rows * a.columns;
  if (a.how == SMELT_BF16)
    store_bf16<T>(sum, static_cast<bf16*>(a.dw) + at, row0, a.rows, first, a.columns);
  else
    store_fp32<T>(sum, static_cast<float*>(a.dw) + at, row0, a.rows, first, a.columns, a.how == SMELT_FP32_ADD);
#endif
}

template <class T>
static int launch(const WgradArguments& a) {
  const int64_t x = a.E * tiles(a.rows, T::ROWS), y = tiles(a.columns, T::COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((wgrad_kernel<T>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a);
}

int wgrad(const WgradArguments& a) {
  switch (tile_columns(TIER, SMELT_WGRAD_UP, a.columns)) {
    case 256: return launch<Tile<128, 256>>(a);
    case 192: return launch<Tile<128, 192>>(a);
    case 128: return launch<Tile<128, 128>>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt::hopper
