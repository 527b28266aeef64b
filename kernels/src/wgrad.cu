// What is the gradient of an expert's matrix?
//
//     dw[e] [rows, columns] = sum over slots s of e of left[s]^T right[s]
//
// dw_gate_up = dpre^T x and dw_down = grad^T hw.
//
// k counts the slots of the expert, as many as there are; slots of other experts are never read. Rows of a tensor that
// is indexed by token are gathered: slot s reads row choice[s] / K. An expert without slots takes no steps and stores
// zeros.
//
// Experts and tiles of rows lie on grid.x, tiles of columns on grid.y, renumbered so that all tiles of an expert come
// one after the other: each of its rows is read once for every tile, from L2 but for the first.
#include "epilogue.h"
#include "grid.h"
#include "tile.h"

namespace smelt {

struct Slots {
  const bf16* tensor;
  int64_t stride;
  const int* choice;  // or null: slots are rows
  int K;
  int64_t first, last;

  SMELT_DEVICE const bf16* operator()(int64_t k) const {
    const int64_t s = first + k;
    if (s >= last) return nullptr;
    return tensor + (choice ? choice[s] / K : s) * stride;
  }
};

template <int ROWS, int COLUMNS>
SMELT_KERNEL((Tile<ROWS, COLUMNS>::THREADS), (Tile<ROWS, COLUMNS>::BLOCKS))
void wgrad_kernel(WgradArguments a, int row_tiles) {
  using T = Tile<ROWS, COLUMNS>;
  const int64_t block = static_cast<int64_t>(blockIdx.y) * gridDim.x + blockIdx.x;
  const int64_t of_rows = block / gridDim.y, row0 = of_rows % row_tiles * ROWS, column0 = block % gridDim.y * COLUMNS;
  const int64_t expert = of_rows / row_tiles;
  const int64_t first = a.offs[expert], last = a.offs[expert + 1];
  if (a.how == SMELT_FP32_ADD && first == last) return;

  const Slots left_rows{a.left, a.ldl, a.left_choice, a.K, first, last};
  const Slots right_rows{a.right, a.ldr, a.right_choice, a.K, first, last};
  AcrossK<ROWS, T::THREADS, Slots> left(a.left, row0, a.rows, left_rows);
  AcrossK<COLUMNS, T::THREADS, Slots> right(a.right, column0, a.columns, right_rows);
  Sums<T> c;
  multiply<T>(left, right, k_steps(last - first), c);

  const int64_t out = expert * a.rows * a.columns;
  if (a.how == SMELT_BF16) {
    store_rows<T>(c, static_cast<bf16*>(a.dw) + out, row0, a.rows, column0, a.columns);
    return;
  }
  const Warp<T> warp;
  float* const dw = static_cast<float*>(a.dw) + out;
  SMELT_UNROLL
  for (int i = 0; i < T::M; ++i)
    SMELT_UNROLL
    for (int half = 0; half < 2; ++half)
      SMELT_UNROLL
      for (int j = 0; j < T::N; ++j) {
        const int64_t row = row0 + warp.row + i * 16 + half * 8 + warp.lane / 4;
        const int64_t column = column0 + warp.column + j * 8 + warp.lane % 4 * 2;
        if (row >= a.rows || column >= a.columns) continue;
        float* const at = dw + row * a.columns + column;
        float x = c[i][j][half * 2], y = c[i][j][half * 2 + 1];
        if (a.how == SMELT_FP32_ADD) x += at[0], y += at[1];
        store8(at, x, y);
      }
}

template <int ROWS, int COLUMNS>
static int launch(const WgradArguments& a) {
  using T = Tile<ROWS, COLUMNS>;
  const int64_t row_tiles = tiles(a.rows, ROWS), x = a.E * row_tiles, y = tiles(a.columns, COLUMNS);
  if (!fits_grid(x, y)) return SMELT_BAD_ARGUMENT;
  return SMELT_LAUNCH((wgrad_kernel<ROWS, COLUMNS>), dim3(x, y), T::THREADS, T::SHARED_BYTES, a.stream, a,
                      static_cast<int>(row_tiles));
}

template <int ROWS>
static int launch_rows(const WgradArguments& a) {
  switch (tile_columns(80, SMELT_WGRAD_UP, a.columns)) {
    case 128: return launch<ROWS, 128>(a);
    case 96: return launch<ROWS, 96>(a);
    case 64: return launch<ROWS, 64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

int portable::wgrad(const WgradArguments& a) {
  switch (tile_columns(80, SMELT_WGRAD_UP, a.rows)) {
    case 128: return launch_rows<128>(a);
    case 96: return launch_rows<96>(a);
    case 64: return launch_rows<64>(a);
    default: return SMELT_UNSUPPORTED;
  }
}

}  // namespace smelt
